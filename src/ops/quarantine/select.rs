//! Resolves which events an operator means: one event by its id, the events of a key or topic, or all.

use printable::printable;
use uuid::Uuid;

use crate::error::{Code, Error, Result};
use crate::event::SHOWN_CHARS;
use crate::ops::LOCK_TIMEOUT;
use crate::ops::event::named_table::{self, NamedTable};
use crate::postgres::{Sql, limiting_lock_waits};
use crate::settings::Settings;
use crate::store::dispatch::quarantine_commands::{self, EventRow, QuarantineFilter};

/// The events in quarantine with this ordering key, with this topic, or with both. Without key and topic, all
/// events in quarantine. A topic may be given without its project.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QuarantineSelection<'a> {
    pub(crate) key: Option<&'a str>,
    pub(crate) topic: Option<&'a str>,
}

impl QuarantineSelection<'_> {
    pub(super) fn filter(self) -> QuarantineFilter {
        QuarantineFilter::new(self.key, self.topic)
    }

    /// Returns the error for a selection that matches no event.
    pub(super) fn nothing(self) -> Error {
        not_in_quarantine(match (self.key, self.topic) {
            (Some(key), _) => format!("no event of key {key} is in quarantine"),
            (None, Some(topic)) => format!("no event of topic {topic} is in quarantine"),
            (None, None) => "nothing is in quarantine".to_owned(),
        })
    }
}

/// Returns a name of the event that an operator can type as an argument: its source id, or its uuid if
/// the source id is long or has characters that a terminal cannot show.
pub(super) fn name(source_id: Option<&str>, uuid: Uuid) -> String {
    let can_be_typed = |id: &&str| id.chars().nth(SHOWN_CHARS).is_none() && printable(id) == **id;
    source_id
        .filter(can_be_typed)
        .map_or_else(|| uuid.to_string(), str::to_owned)
}

/// Returns those dispatch rows of an event that are in quarantine, in commit order. If none of its dispatch
/// rows is in quarantine, returns all of them. `id` is a uuid, a source id, or `schema.table:uuid`.
///
/// # Errors
/// - `not-in-quarantine` if the event has no dispatch row.
/// - `setting-invalid` if several events have this id. Also if `id` is `schema.table:uuid`, and the table is not
///   captured or the event belongs to another table.
/// - Database errors.
pub(super) async fn rows_of(sql: &Sql, settings: &Settings, id: &str) -> Result<Vec<EventRow>> {
    let id = id.trim();
    let mut rows = rows_with(sql, id).await?;
    if rows.is_empty() {
        // A uuid may be given as `schema.table:uuid`, like the ids that are not uuids.
        match named_table::read(settings, id) {
            Some(named) => rows = rows_of_table(sql, settings, named).await?,
            None => named_table::unknown(settings, id).map_or(Ok(()), Err)?,
        }
    }
    let mut uuids: Vec<Uuid> = rows.iter().map(|row| row.uuid).collect();
    uuids.sort_unstable();
    uuids.dedup();
    match uuids.len() {
        0 => Err(not_in_quarantine(format!("event {id} is not recorded"))),
        1 => Ok(rows),
        count => {
            let uuids: Vec<String> = uuids.iter().take(5).map(Uuid::to_string).collect();
            let what = format!("{count} events have the id {id}: their table was recreated");
            Err(Error::new(Code::SettingInvalid, what)
                .hint(format!("name one by its uuid: {}", uuids.join(", "))))
        }
    }
}

/// Returns the dispatch rows with this uuid or source id.
async fn rows_with(sql: &Sql, id: &str) -> Result<Vec<EventRow>> {
    let rows = quarantine_commands::rows_in_quarantine(sql, id).await?;
    if !rows.is_empty() {
        return Ok(rows);
    }
    // A search by `source_id` reads all of outbox.dispatch. There is no other way, because the uuid also depends on
    // the transaction, so it cannot be computed from the id.
    quarantine_commands::all_rows(sql, id).await
}

/// Returns the dispatch rows with this uuid.
///
/// # Errors
/// `setting-invalid` if the event belongs to another table.
async fn rows_of_table(
    sql: &Sql,
    settings: &Settings,
    named: NamedTable<'_>,
) -> Result<Vec<EventRow>> {
    let identity = limiting_lock_waits(sql, LOCK_TIMEOUT, named.check_row(sql, settings)).await?;
    let rows = rows_with(sql, named.uuid).await?;
    let mut source_ids = rows.iter().filter_map(|row| row.source_id.as_deref());
    source_ids.try_for_each(|source_id| named.check(settings, &identity, source_id))?;
    Ok(rows)
}

fn not_in_quarantine(what: String) -> Error {
    Error::new(Code::NotInQuarantine, what)
}

/// Returns the first of the event's dispatch rows that is in quarantine.
///
/// # Errors
/// The errors of [`rows_of`]; `not-in-quarantine` if the event has another state.
pub(super) async fn in_quarantine(sql: &Sql, settings: &Settings, id: &str) -> Result<EventRow> {
    let first = rows_of(sql, settings, id).await?.swap_remove(0);
    if first.is_in_quarantine() {
        Ok(first)
    } else {
        Err(not_in_quarantine(format!("event {id} is {}", first.state)))
    }
}
