//! What stands in outbox.capture before a command makes the slot: from here on every committed row is
//! the relay's to publish, whether or not it has ever run.

use crate::capture::claim::{self, Begin};
use crate::capture::record;
use crate::capture::shape::{self, Tops};
use crate::error::Result;
use crate::postgres::Sql;
use crate::settings::Settings;

/// Looks at the tables before the slot is made.
///
/// # Errors
/// `table-captured`; `schema-missing`; those of a statement.
pub(super) async fn before_the_slot(sql: &Sql, settings: &Settings) -> Result<Tops> {
    let found = claim::look(sql, &settings.tables).await?;
    let records = record::read(&**sql).await?;
    claim::refuse_others(&claim::matched(&found, &records), &settings.slot)?;
    shape::tops(sql, &found).await
}

/// Writes down, right before the slot is made, that its relay captures the tables. A crash in between
/// loses nothing then: what the slot does not bring comes from the tables.
///
/// # Errors
/// As [`before_the_slot`].
pub(super) async fn from_now_on(
    sql: &Sql,
    settings: &Settings,
    tops: &Tops,
    instance: &str,
) -> Result<()> {
    let found = claim::look(sql, &settings.tables).await?;
    let slot = &settings.slot;
    let begin = Begin {
        start: settings.start,
        is_first: false,
    };
    claim::claim(sql, slot, found, begin, tops, instance).await?;
    Ok(())
}
