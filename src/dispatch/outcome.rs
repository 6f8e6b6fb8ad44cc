//! What became of events, and what their rows say of it.
//!
//! Not here: how it is written. `rows` has new rows, `released` those that are there already.

use std::sync::Arc;
use std::time::SystemTime;

use crate::lanes::EventRef;
use crate::map::OrderingKey;
use crate::publish::MessageIds;

/// Outcomes of events of one topic and ordering key.
#[derive(Debug)]
pub(crate) struct Record {
    /// `None` when the row does not tell.
    pub(crate) topic: Option<Arc<str>>,
    pub(crate) ordering_key: OrderingKey,
    pub(crate) at: SystemTime,
    pub(crate) events: Vec<EventRef>,
    pub(crate) outcome: Outcome,
}

/// What became of events.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Stored, with Pub/Sub's ids in the order of the events.
    Published(MessageIds),
    /// Set aside, and why.
    Quarantined(Arc<str>),
    /// Set aside behind events that are being released: it is released with them.
    Released(Arc<str>),
}

/// What an outcome says of one event.
pub(super) struct Told<'a> {
    pub(super) state: &'static str,
    pub(super) message_id: Option<&'a str>,
    pub(super) error: Option<&'a Arc<str>>,
}

impl Record {
    /// Bytes of those texts of its rows that may be long.
    pub(crate) fn text_bytes(&self) -> usize {
        let error = match &self.outcome {
            Outcome::Published(_) => 0,
            Outcome::Quarantined(error) | Outcome::Released(error) => error.len(),
        };
        let of_each = self.ordering_key.as_str().len() + error;
        let ids = self.events.iter().map(|event| event.event_id.text_bytes());
        ids.sum::<usize>() + self.events.len() * of_each
    }

    /// The ordering key as it is recorded.
    pub(super) fn key(&self) -> Option<&str> {
        (!self.ordering_key.is_unordered()).then(|| self.ordering_key.as_str())
    }
}

impl Outcome {
    /// Of the event that stands at `n` in its record.
    pub(super) fn of(&self, n: usize) -> Told<'_> {
        let (state, message_id, error) = match self {
            Self::Published(ids) => ("published", ids.get(n), None),
            Self::Quarantined(error) => ("quarantined", None, Some(error)),
            Self::Released(error) => ("released", None, Some(error)),
        };
        Told {
            state,
            message_id,
            error,
        }
    }
}

impl Told<'_> {
    /// Requests that carried the event.
    pub(super) fn attempts(&self, event: &EventRef) -> i32 {
        let carried = event.failed_attempts + u32::from(self.message_id.is_some());
        i32::try_from(carried).unwrap_or(i32::MAX)
    }
}
