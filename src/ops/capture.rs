//! Refuses tables that another slot captures, and writes the capture records after a command has created the slot.
//! The slot streams every row that is committed from then on. With `start = new`, older rows are not captured, so
//! the relay never publishes them.

use decoder::Lsn;
use slot_manager::publication;

use crate::capture::claim::{self, CaptureStart};
use crate::error::Result;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::capture_record;

/// Refuses tables that a relay on another slot captures. Call it before creating the slot.
///
/// # Errors
/// `table-captured`; `publication-drift` if a table is missing; `column-missing`; database errors.
pub(crate) async fn refuse_others(sql: &Sql, settings: &Settings) -> Result<()> {
    let found = claim::find_tables(sql, &settings.tables).await?;
    let records = capture_record::read(&**sql).await?;
    claim::refuse_others(&found, &records, &settings.slot)
}

/// Records that the slot's relay captures the tables, and that the slot streams their rows from
/// `since_lsn` on.
///
/// # Errors
/// The errors of [`refuse_others`].
pub(crate) async fn from_now_on(
    sql: &Sql,
    settings: &Settings,
    instance: &str,
    since_lsn: Option<Lsn>,
) -> Result<()> {
    let found = claim::find_tables(sql, &settings.tables).await?;
    let slot = &settings.slot;
    let publication =
        publication::inspect(sql, &settings.publication, &settings.captured()).await?;
    let begin = CaptureStart {
        start: settings.start,
        tables: &settings.tables,
        publication: publication.fingerprint(),
        is_first: false,
        since_lsn,
        moment: None,
        is_session: false,
    };
    claim::claim(sql, slot, found, begin, instance).await?;
    Ok(())
}
