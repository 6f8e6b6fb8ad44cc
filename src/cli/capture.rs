//! Writes the capture records before a command creates the slot. From then on the relay has to publish
//! every committed row, even if it has never run.

use crate::capture::claim::{self, Begin};
use crate::capture::record;
use crate::capture::shape::{self, Tops};
use crate::error::Result;
use crate::postgres::Sql;
use crate::settings::Settings;

/// Reads the tops of the tables before the slot is created.
///
/// # Errors
/// `table-captured`; `schema-missing`; those of a statement.
pub(super) async fn before_the_slot(sql: &Sql, settings: &Settings) -> Result<Tops> {
    let found = claim::look(sql, &settings.tables).await?;
    let records = record::read(&**sql).await?;
    claim::refuse_others(&claim::matched(&found, &records), &settings.slot)?;
    shape::tops(sql, &found).await
}

/// Records, right before the slot is created, that its relay captures the tables. A crash in between
/// then loses nothing: the relay reads from the tables the rows that the slot does not stream.
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
