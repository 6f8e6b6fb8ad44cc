//! Finds the outcome of an outbox row: looks up one event by its id, or lists the newest events.
//!
//! [`find`] looks an event up by its id, and [`list`] finds events by key, topic or time. Both return
//! [`EventReport`]s. [`state`] decides and explains the state of an event.
//!
//! Every statement uses an index or has a time limit. In outbox.dispatch there is an index on the event id,
//! and the id of a captured table is usually its primary key. Two searches may read all of outbox.dispatch: a
//! list with few matches, and the search for a deleted row whose id is not a uuid. The event id of such a row
//! cannot be computed from the row's id alone, because it also depends on the row's transaction.

pub(crate) mod find;
pub(crate) mod list;
pub(crate) mod named_table;
mod rows;
mod state;

use serde::Serialize;

pub(crate) use state::EventState;

use crate::error::{Code, Error, Result};
use crate::ops::since::Since;
use crate::postgres::Sql;
use crate::store::dispatch::history::RecordFilter;
pub(crate) use crate::store::dispatch::history::{EarlierMessage, EventOutcome};

/// Which events to list or to follow.
#[derive(Debug)]
pub(crate) struct EventQuery<'a> {
    pub(crate) key: Option<&'a str>,
    /// The topic's full name or short name.
    pub(crate) topic: Option<&'a str>,
    /// Only events committed at this time or later.
    pub(crate) since: Option<&'a Since>,
}

impl EventQuery<'_> {
    /// Returns the query as a filter on records.
    ///
    /// # Errors
    /// `setting-invalid` for a time that does not exist; database errors.
    pub(super) async fn filter(&self, sql: &Sql) -> Result<RecordFilter> {
        let since = match self.since {
            Some(since) => {
                let since = since.resolve(sql).await?;
                Some((since.first_commit(sql).await?, since.sql().to_owned()))
            }
            None => None,
        };
        Ok(RecordFilter {
            key: self.key.map(str::to_owned),
            topic: self.topic.map(str::to_owned),
            since,
        })
    }

    /// If a search through outbox.dispatch timed out, returns an error that says how to narrow the
    /// search. Returns any other error unchanged.
    pub(super) fn took_long(&self, error: Error) -> Error {
        if error.code() != Code::PostgresTimeout {
            return error;
        }
        let hint = if self.since.is_none() {
            "add --since, such as --since 1h, so that only newer events are searched"
        } else {
            "give a shorter --since, or CREATE INDEX CONCURRENTLY ON outbox.dispatch (ordering_key, \
             commit_lsn, ordinal)"
        };
        let what = "searching outbox.dispatch took too long";
        Error::new(Code::PostgresTimeout, what).hint(hint)
    }
}

/// One event. Programs depend on the JSON form.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct EventReport {
    /// The event's id in outbox.dispatch and in the attribute `event_id`.
    pub(crate) event_id: String,
    /// `schema.table:id`, if the table's ids are not uuids.
    pub(crate) source_id: Option<String>,
    pub(crate) state: EventState,
    /// The state in a sentence, followed by what to do.
    pub(crate) meaning: String,
    pub(crate) topic: Option<String>,
    pub(crate) ordering_key: Option<String>,
    /// The id that Pub/Sub gave to the last message.
    pub(crate) message_id: Option<String>,
    /// The name of the replay that published the last message; `None` if it is the original message.
    pub(crate) replay: Option<String>,
    /// The earlier messages of the event, oldest first: the original message, and the messages of
    /// earlier replays. Replays before migration 0021 did not record them.
    pub(crate) earlier_messages: Vec<EarlierMessage>,
    /// The event's row in its outbox table, if the row still exists. In a list, `None` for every event with a record,
    /// because a list looks in the tables only for rows without a record.
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
