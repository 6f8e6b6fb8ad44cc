//! Reads the record of one event, and how many events of its key are in quarantine.

use serde::Serialize;

use super::{seconds, select};
use crate::error::Result;
use crate::event::EventPosition;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::dispatch::quarantine_commands;

/// The output of `quarantine show --json`; programs depend on it.
#[derive(Debug, Serialize)]
pub(crate) struct ShownEvent {
    /// The event's uuid, or `schema.table:id` if the ids of its table are not uuids.
    pub(crate) event_id: String,
    /// The event's uuid, which its message has in the attribute `event_id`.
    pub(crate) uuid: String,
    pub(crate) state: String,
    pub(crate) error: Option<String>,
    pub(crate) topic: Option<String>,
    pub(crate) ordering_key: Option<String>,
    /// Number of requests with which Pub/Sub may have stored the event. Requests that Pub/Sub refused do not
    /// count.
    pub(crate) attempts: i32,
    #[serde(flatten)]
    pub(crate) position: EventPosition,
    pub(crate) committed_seconds_ago: u64,
    pub(crate) dispatched_seconds_ago: u64,
    pub(crate) message_id: Option<String>,
    /// How many events of the same key are in quarantine before this event.
    pub(crate) earlier_in_quarantine: u64,
    /// How many events of the same key are in quarantine behind this event.
    pub(crate) later_in_quarantine: u64,
}

/// Reads the record of one event.
///
/// # Errors
/// The errors of [`select::rows_of`]; database errors.
pub(crate) async fn show(sql: &Sql, settings: &Settings, id: &str) -> Result<ShownEvent> {
    // If the event is in quarantine, show its first dispatch row, otherwise its latest one.
    let mut rows = select::rows_of(sql, settings, id).await?;
    let event = if rows[0].is_in_quarantine() {
        rows.swap_remove(0)
    } else {
        rows.swap_remove(rows.len() - 1)
    };
    let (earlier, later) = quarantine_commands::neighbours(sql, &event).await?;
    let record = quarantine_commands::record(sql, &event).await?;
    Ok(ShownEvent {
        event_id: event.source_id.unwrap_or_else(|| event.uuid.to_string()),
        uuid: event.uuid.to_string(),
        state: event.state,
        error: record.error,
        topic: record.topic,
        ordering_key: record.ordering_key,
        attempts: record.attempts,
        position: event.position,
        committed_seconds_ago: seconds(record.committed_seconds_ago),
        dispatched_seconds_ago: seconds(record.dispatched_seconds_ago),
        message_id: record.message_id,
        earlier_in_quarantine: earlier,
        later_in_quarantine: later,
    })
}
