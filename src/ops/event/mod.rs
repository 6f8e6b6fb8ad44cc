//! From an outbox row to its outcome: looks up one event by its id, or lists the newest events.
//!
//! [`find`] starts from an id as a person knows it, and [`list`] from a key or a time. Both return
//! [`EventReport`]s, which [`state`] judges.
//!
//! Every statement uses an index or has a time limit: the event id has one in outbox.dispatch, and the
//! id of a captured table usually is its primary key. Only a numbered id whose row is gone needs a
//! search through outbox.dispatch, since the event id depends on the row's transaction.

pub(crate) mod find;
pub(crate) mod list;
mod state;

use serde::Serialize;

pub(crate) use state::EventState;

use crate::error::Result;
use crate::postgres::PatientSql;
use crate::settings::{Dispatch, Settings};
use crate::store::dispatch::history::EventOutcome;
use crate::store::relay_row;

/// Whether published events get no record: with `dispatch = exceptions`, by the settings of the command
/// or of the relay.
///
/// # Errors
/// Database errors.
pub(crate) async fn keeps_no_records(sql: &PatientSql, settings: &Settings) -> Result<bool> {
    let earlier = relay_row::read(sql, &settings.slot).await?;
    Ok(settings.dispatch == Dispatch::Exceptions
        || earlier.is_some_and(|earlier| earlier.dispatch == Dispatch::Exceptions))
}

/// One event; its JSON form, on which programs depend.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct EventReport {
    /// Its id in outbox.dispatch and in the attribute `event_id`.
    pub(crate) event_id: String,
    /// `schema.table:id`, where ids are not uuids.
    pub(crate) source_id: Option<String>,
    pub(crate) state: EventState,
    /// The state in a sentence, and what to do.
    pub(crate) meaning: String,
    pub(crate) topic: Option<String>,
    pub(crate) ordering_key: Option<String>,
    /// Pub/Sub's id of the message.
    pub(crate) message_id: Option<String>,
    /// The row, while it is in the outbox.
    pub(crate) row: Option<EventTableRow>,
    /// The record in outbox.dispatch, if there is one.
    pub(crate) record: Option<EventOutcome>,
}

/// The row of an event in its outbox table.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct EventTableRow {
    pub(crate) table: String,
    pub(crate) seq: Option<i64>,
    pub(crate) inserted_xid: Option<String>,
    /// RFC 3339, UTC.
    pub(crate) occurred_at: Option<String>,
}
