//! Writes the new outcomes of released events. These events already have rows, so the writer updates the
//! rows.
//!
//! Released events are few compared with new events, so one statement with an array per column is fast
//! enough.

use std::borrow::Cow;
use std::time::SystemTime;

use tokio_postgres::types::{PgLsn, ToSql};

use super::outcome::Record;
use super::rows::Storing;
use crate::event::{EventRef, Standing};
use crate::store::position;

/// Writes the outcomes of released events. If an operator discards an event that is in flight, Pub/Sub may
/// still store the event, and its row then becomes `published`. The last condition makes a retry idempotent.
/// If the first attempt was committed and only its answer was lost, the row already has the `dispatched_at`
/// of this outcome, and the retry does not change it.
pub(super) const UPDATE: &str = "\
    UPDATE outbox.dispatch d SET \
        state = u.state, topic = u.topic, ordering_key = u.ordering_key, \
        message_id = u.message_id, attempts = d.attempts + u.attempts, \
        dispatched_at = u.dispatched_at, error = u.error \
    FROM unnest($1::pg_lsn[], $2::int[], $3::text[], $4::text[], $5::text[], $6::int[], \
        $7::timestamptz[], $8::text[], $9::text[]) \
        u (commit_lsn, ordinal, topic, ordering_key, message_id, attempts, dispatched_at, error, \
           state) \
    WHERE d.commit_lsn = u.commit_lsn AND d.ordinal = u.ordinal \
      AND (d.state IN ('quarantined', 'released') OR d.state = 'discarded' AND u.state = 'published') \
      AND d.dispatched_at <> u.dispatched_at";

/// The rows of released events, by column.
#[derive(Debug, Default)]
pub(super) struct ReleasedRows<'a> {
    commit_lsns: Vec<PgLsn>,
    ordinals: Vec<i32>,
    topics: Vec<Option<&'a str>>,
    ordering_keys: Vec<Option<&'a str>>,
    message_ids: Vec<Option<&'a str>>,
    attempts: Vec<i32>,
    dispatched_at: Vec<SystemTime>,
    errors: Vec<Option<Cow<'a, str>>>,
    states: Vec<&'static str>,
}

impl<'a> ReleasedRows<'a> {
    pub(super) fn of(records: &'a [Record], storing: Storing) -> Self {
        let mut rows = Self::default();
        for record in records {
            for (n, event) in record.events.iter().enumerate() {
                if event.standing == Standing::Released {
                    rows.add(record, n, event, storing);
                }
            }
        }
        rows
    }

    fn add(&mut self, record: &'a Record, n: usize, event: &EventRef, storing: Storing) {
        let told = record.outcome.of(n);
        let (commit_lsn, ordinal) = position::columns(event.position);
        self.commit_lsns.push(commit_lsn);
        self.ordinals.push(ordinal);
        self.topics.push(record.topic.as_deref());
        self.ordering_keys.push(record.key());
        self.message_ids.push(told.message_id);
        self.attempts.push(told.attempts(event));
        self.dispatched_at.push(record.at);
        self.errors
            .push(told.error.map(|error| storing.text(error)));
        self.states.push(told.state);
    }

    pub(super) fn parameters(&self) -> [&(dyn ToSql + Sync); 9] {
        [
            &self.commit_lsns,
            &self.ordinals,
            &self.topics,
            &self.ordering_keys,
            &self.message_ids,
            &self.attempts,
            &self.dispatched_at,
            &self.errors,
            &self.states,
        ]
    }
}
