//! The possible findings of a check, and their texts.

use std::fmt;

/// Maximum number of violations that a report lists. Of the remaining violations, the report shows only their
/// number.
const SHOWN: usize = 20;

/// Identifies the sequence of messages of one topic and ordering key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream {
    /// `projects/{project}/topics/{topic}`.
    pub topic: String,
    /// The ordering key. Empty for messages without order.
    pub ordering_key: String,
}

impl Stream {
    /// Creates the stream of one topic and ordering key.
    pub fn new(topic: impl Into<String>, ordering_key: impl Into<String>) -> Self {
        Self {
            topic: topic.into(),
            ordering_key: ordering_key.into(),
        }
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} key {:?}", self.topic, self.ordering_key)
    }
}

/// A rule that the publisher broke. `sequence` is the number of an attempt in the journal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// An expected event was never stored.
    #[error("missing: event {event_id} of {stream} was never stored")]
    Missing {
        /// The stream to which the event belongs.
        stream: Stream,
        /// The event.
        event_id: String,
    },
    /// An event was stored in a stream in which it was not expected.
    #[error("unexpected: attempt {sequence} stored event {event_id} in {stream}")]
    Unexpected {
        /// The stream in which the event was stored.
        stream: Stream,
        /// The event.
        event_id: String,
        /// The attempt that stored the event.
        sequence: u64,
    },
    /// A message without an event id was stored, so the check cannot judge the message.
    #[error("unnamed: message {index} of attempt {sequence} has no event id")]
    Unnamed {
        /// The attempt.
        sequence: u64,
        /// The message's index in the attempt, from 0.
        index: usize,
    },
    /// The first copy of an event came after the first copy of a later event.
    #[error("out of order: attempt {sequence} stored {event_id} of {stream} first after {after}")]
    OutOfOrder {
        /// The stream.
        stream: Stream,
        /// The event that came too late.
        event_id: String,
        /// The later event that was already stored.
        after: String,
        /// The attempt that stored the event that came too late.
        sequence: u64,
    },
    /// The publisher skipped events: this copy is neither the next event nor an earlier one.
    #[error("skipped: attempt {sequence} stored {event_id} of {stream} right after {after}")]
    Skipped {
        /// The stream.
        stream: Stream,
        /// The event that came too early.
        event_id: String,
        /// The event that was stored right before. Empty if no event was stored before.
        after: String,
        /// The attempt that stored the event that came too early.
        sequence: u64,
    },
    /// Two requests for one ordering key were in flight at the same time.
    #[error("in flight together: attempts {first} and {second} of {stream}")]
    InFlightTogether {
        /// The stream.
        stream: Stream,
        /// The earlier attempt.
        first: u64,
        /// The attempt that arrived before the first attempt had ended.
        second: u64,
    },
    /// The messages of a request had different ordering keys.
    #[error("mixed keys: attempt {sequence} has the ordering keys {keys:?}")]
    MixedKeys {
        /// The attempt.
        sequence: u64,
        /// The ordering keys of the attempt.
        keys: Vec<String>,
    },
}

/// Why an event was stored again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The previous copy was not answered with its message id, so the client had to publish the
    /// event again.
    NotAnswered,
    /// The previous copy was answered with its message id. The client may still publish the event
    /// again after a crash, if it had not recorded this answer before the crash.
    Unexplained,
}

/// A second or later copy of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Duplicate {
    /// The stream.
    pub stream: Stream,
    /// The event.
    pub event_id: String,
    /// The attempt that stored the previous copy.
    pub before: u64,
    /// The attempt that stored this copy.
    pub sequence: u64,
    /// Why the event was stored again.
    pub reason: Reason,
}

/// The result of [`check`](super::check).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// How many attempts were checked.
    pub attempts: usize,
    /// How many events were expected.
    pub expected_events: usize,
    /// How many messages were stored, duplicates included.
    pub stored_messages: usize,
    /// Rules that the publisher broke.
    pub violations: Vec<Violation>,
    /// Events that were stored more than once. A duplicate is not a violation, because delivery is at
    /// least once.
    pub duplicates: Vec<Duplicate>,
}

impl Report {
    /// Whether the publisher kept every rule.
    pub fn is_clean(&self) -> bool {
        self.violations.is_empty()
    }

    /// The number of duplicates whose previous copy was answered. The journal shows no reason to publish
    /// these events again (see [`Reason::Unexplained`]).
    pub fn unexplained_duplicates(&self) -> usize {
        let unexplained = |duplicate: &&Duplicate| duplicate.reason == Reason::Unexplained;
        self.duplicates.iter().filter(unexplained).count()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unexplained = self.unexplained_duplicates();
        writeln!(
            f,
            "{} events expected, {} messages stored by {} attempts: {} violations, {} duplicates \
             ({} after a missing answer, {unexplained} unexplained)",
            self.expected_events,
            self.stored_messages,
            self.attempts,
            self.violations.len(),
            self.duplicates.len(),
            self.duplicates.len() - unexplained,
        )?;
        for violation in self.violations.iter().take(SHOWN) {
            writeln!(f, "  {violation}")?;
        }
        if self.violations.len() > SHOWN {
            writeln!(f, "  … and {} more", self.violations.len() - SHOWN)?;
        }
        Ok(())
    }
}
