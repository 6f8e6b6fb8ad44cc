//! Defines the outcomes of events, and the column values that follow from them.
//!
//! Not here: writing the rows. `rows` encodes new rows, and `released` updates existing rows.

use std::sync::Arc;
use std::time::SystemTime;

use publisher::MessageIds;

use crate::event::{EventRef, OrderingKey};

/// Events of one topic and ordering key that have the same outcome.
#[derive(Debug)]
pub(crate) struct Record {
    /// `None` when the topic cannot be determined.
    pub(crate) topic: Option<Arc<str>>,
    pub(crate) ordering_key: OrderingKey,
    pub(crate) at: SystemTime,
    pub(crate) events: Vec<EventRef>,
    pub(crate) outcome: Outcome,
}

#[derive(Debug)]
pub(crate) enum Outcome {
    /// Pub/Sub stored the events. There is one message id for each event, in the same order.
    Published(MessageIds),
    /// The relay set the events aside in quarantine, for this reason.
    Quarantined(Arc<str>),
    /// The relay itself has released the events, because earlier events of their key are being released, or because
    /// the messages of the events are no longer in memory. The relay later publishes the events from their table.
    Released(Arc<str>),
}

/// The columns of one event's row that depend on its outcome.
pub(super) struct OutcomeColumns<'a> {
    pub(super) state: &'static str,
    pub(super) message_id: Option<&'a str>,
    pub(super) error: Option<&'a Arc<str>>,
}

impl Record {
    /// Total bytes of the source ids, ordering keys and errors in the rows. The other columns do not count,
    /// because they are always short.
    pub(crate) fn text_bytes(&self) -> usize {
        let error = match &self.outcome {
            Outcome::Published(_) => 0,
            Outcome::Quarantined(error) | Outcome::Released(error) => error.len(),
        };
        let of_each = self.ordering_key.as_str().len() + error;
        let ids = self.events.iter().map(|event| event.event_id.text_bytes());
        ids.sum::<usize>() + self.events.len() * of_each
    }

    /// Returns the ordering key as the table stores it: `None` for unordered events.
    pub(super) fn key(&self) -> Option<&str> {
        (!self.ordering_key.is_unordered()).then(|| self.ordering_key.as_str())
    }
}

impl Outcome {
    /// Returns the column values for event number `n` of the record.
    pub(super) fn of(&self, n: usize) -> OutcomeColumns<'_> {
        let (state, message_id, error) = match self {
            Self::Published(ids) => ("published", ids.get(n), None),
            Self::Quarantined(error) => ("quarantined", None, Some(error)),
            Self::Released(error) => ("released", None, Some(error)),
        };
        OutcomeColumns {
            state,
            message_id,
            error,
        }
    }
}

impl OutcomeColumns<'_> {
    /// Returns the number of requests with which Pub/Sub may have stored the event since the relay read it.
    /// Requests that Pub/Sub refused do not count.
    pub(super) fn attempts(&self, event: &EventRef) -> i32 {
        let carried = event.unknown_outcomes + u32::from(self.message_id.is_some());
        i32::try_from(carried).unwrap_or(i32::MAX)
    }
}
