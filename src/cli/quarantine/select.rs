//! Resolves which events a command means: one event by its id, the events of a key or topic, or all.

use printable::printable;
use uuid::Uuid;

use crate::error::{Code, Error, Result};
use crate::event::SHOWN_CHARS;
use crate::postgres::Sql;
use crate::store::dispatch::quarantine_commands::{self, EventRow};

/// The arguments that select events.
#[derive(Debug, clap::Args)]
pub(super) struct Which {
    /// The event: its uuid, or `schema.table:id` where ids are not uuids
    #[arg(value_name = "ID", conflicts_with_all = ["key", "topic", "all"],
          required_unless_present_any = ["key", "all"])]
    pub(super) id: Option<String>,
    /// All events of this ordering key
    #[arg(long, value_name = "KEY", conflicts_with = "all")]
    pub(super) key: Option<String>,
    /// Only of this topic
    #[arg(long, value_name = "TOPIC")]
    pub(super) topic: Option<String>,
    /// All events in quarantine
    #[arg(long)]
    pub(super) all: bool,
}

/// Returns a name of the event that a person can type as an argument: its source id, or its uuid if
/// the source id is long or has characters that a terminal cannot show.
pub(super) fn name(source_id: Option<&str>, uuid: Uuid) -> String {
    let can_be_typed = |id: &&str| id.chars().nth(SHOWN_CHARS).is_none() && printable(id) == **id;
    source_id
        .filter(can_be_typed)
        .map_or_else(|| uuid.to_string(), str::to_owned)
}

/// Returns the rows of an event in quarantine, in log order. If none of its rows is in quarantine,
/// returns all its rows.
///
/// # Errors
/// `not-in-quarantine` when the event has no row; `setting-invalid` when several events have this id.
pub(super) async fn rows_of(sql: &Sql, id: &str) -> Result<Vec<EventRow>> {
    let mut rows = quarantine_commands::rows_in_quarantine(sql, id).await?;
    if rows.is_empty() {
        // A search by `source_id` reads the whole table, but there is no other way: the uuid cannot be
        // computed from the id, because it also depends on the transaction.
        rows = quarantine_commands::all_rows(sql, id).await?;
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

fn not_in_quarantine(what: String) -> Error {
    Error::new(Code::NotInQuarantine, what)
}

/// The row of an event in quarantine.
///
/// # Errors
/// The errors of [`rows_of`]; `not-in-quarantine` if the event has another state.
pub(super) async fn in_quarantine(sql: &Sql, id: &str) -> Result<EventRow> {
    let first = rows_of(sql, id).await?.swap_remove(0);
    if first.is_in_quarantine() {
        Ok(first)
    } else {
        Err(not_in_quarantine(format!("event {id} is {}", first.state)))
    }
}
