//! Judges a journal: was every event published, in order, and what was repeated and why?
//!
//! [`check`] is a pure function over a snapshot of the journal and the list of what should have
//! been published. For each (topic, ordering key) the first copies must come in the expected
//! order, and repeats only as blocks that go back and carry on from there: nothing is skipped,
//! nothing swapped. Messages without an ordering key have no order to keep. Judging what
//! *subscribers* got is not its business.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use crate::journal::{Answer, Attempt};

/// The events that should have been published: for each stream their ids, in order.
pub type Expected = BTreeMap<Stream, Vec<String>>;

/// A client that gives up on an attempt may send the next one before the server has noticed that
/// the first was cancelled. Within this time the two do not count as in flight together.
const CANCEL_GRACE: Duration = Duration::from_secs(1);
/// A report shows so many findings of each sort; the rest is only counted.
const SHOWN: usize = 20;

/// What has an order: an ordering key of a topic.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream {
    /// `projects/{project}/topics/{topic}`.
    pub topic: String,
    /// Empty for messages without order.
    pub ordering_key: String,
}

impl Stream {
    /// The stream of a topic's ordering key.
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

/// A broken promise. `sequence` numbers are those of the journal's attempts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// An expected event was never stored.
    #[error("missing: event {event_id} of {stream} was never stored")]
    Missing {
        /// Where it belongs.
        stream: Stream,
        /// The event.
        event_id: String,
    },
    /// An event was stored that nobody expected there.
    #[error("unexpected: attempt {sequence} stored event {event_id} in {stream}")]
    Unexpected {
        /// Where it was stored.
        stream: Stream,
        /// The event.
        event_id: String,
        /// The attempt that stored it.
        sequence: u64,
    },
    /// A message without an event id was stored, so nothing can be said about it.
    #[error("unnamed: message {index} of attempt {sequence} has no event id")]
    Unnamed {
        /// The attempt.
        sequence: u64,
        /// The message's place in it, from 0.
        index: usize,
    },
    /// The first copy of an event came after the first copy of a later event.
    #[error("out of order: attempt {sequence} stored {event_id} of {stream} first after {after}")]
    OutOfOrder {
        /// The stream.
        stream: Stream,
        /// The event that came too late.
        event_id: String,
        /// The later event that was already there.
        after: String,
        /// The attempt that stored it.
        sequence: u64,
    },
    /// Events were jumped over: neither the next event followed nor an earlier one.
    #[error("skipped: attempt {sequence} stored {event_id} of {stream} right after {after}")]
    Skipped {
        /// The stream.
        stream: Stream,
        /// The event that came too early.
        event_id: String,
        /// What was stored before it; empty at the beginning.
        after: String,
        /// The attempt that stored it.
        sequence: u64,
    },
    /// Two requests for one ordering key were under way at the same time.
    #[error("in flight together: attempts {first} and {second} of {stream}")]
    InFlightTogether {
        /// The stream.
        stream: Stream,
        /// The earlier attempt.
        first: u64,
        /// The one that came before the first had ended.
        second: u64,
    },
    /// A request mixed ordering keys.
    #[error("mixed keys: attempt {sequence} has the ordering keys {keys:?}")]
    MixedKeys {
        /// The attempt.
        sequence: u64,
        /// Its ordering keys.
        keys: Vec<String>,
    },
}

/// Why an event was stored again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The copy before it was not answered with its message id, so the client had to repeat it.
    NotAnswered,
    /// The copy before it was answered. Right after a crash of the client, at most.
    Unexplained,
}

/// A second or later copy of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Duplicate {
    /// The stream.
    pub stream: Stream,
    /// The event.
    pub event_id: String,
    /// The attempt that stored this copy.
    pub sequence: u64,
    /// Why.
    pub reason: Reason,
}

/// What [`check`] found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Attempts that were looked at.
    pub attempts: usize,
    /// Events that were expected.
    pub expected_events: usize,
    /// Messages that were stored, duplicates included.
    pub stored_messages: usize,
    /// Broken promises.
    pub violations: Vec<Violation>,
    /// Repeated events. Not a violation in themselves: delivery is at least once.
    pub duplicates: Vec<Duplicate>,
}

impl Report {
    /// Whether every promise was kept.
    pub fn is_clean(&self) -> bool {
        self.violations.is_empty()
    }

    /// How many duplicates no missing answer explains.
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

/// Judges the attempts of a journal against what should have been published.
pub fn check(attempts: &[Attempt], expected: &Expected) -> Report {
    let mut report = Report {
        attempts: attempts.len(),
        expected_events: expected.values().map(Vec::len).sum(),
        ..Report::default()
    };
    let stored = stored_copies(attempts, &mut report);
    for (stream, copies) in &stored {
        let expected = expected.get(stream).map_or(&[][..], Vec::as_slice);
        check_stream(stream, copies, expected, &mut report);
        find_duplicates(stream, copies, &mut report);
    }
    for (stream, events) in expected
        .iter()
        .filter(|(stream, _)| !stored.contains_key(stream))
    {
        check_stream(stream, &[], events, &mut report);
    }
    check_requests(attempts, &mut report);
    report
}

/// One stored copy of an event.
#[derive(Debug, Clone, Copy)]
struct Copy<'a> {
    message_id: u64,
    event_id: &'a str,
    sequence: u64,
    answer: Answer,
}

/// The stored copies of each stream in the order in which they were stored, which is that of their
/// message ids.
fn stored_copies<'a>(
    attempts: &'a [Attempt],
    report: &mut Report,
) -> BTreeMap<Stream, Vec<Copy<'a>>> {
    let mut streams: BTreeMap<Stream, Vec<Copy<'a>>> = BTreeMap::new();
    for attempt in attempts {
        let Some(first_message_id) = attempt.first_message_id else {
            continue;
        };
        report.stored_messages += attempt.event_ids.len();
        let stream = Stream::new(&*attempt.topic, &*attempt.ordering_key);
        let copies = streams.entry(stream).or_default();
        for (index, event_id) in attempt.event_ids.iter().enumerate() {
            match event_id {
                None => report.violations.push(Violation::Unnamed {
                    sequence: attempt.sequence,
                    index,
                }),
                Some(event_id) => copies.push(Copy {
                    message_id: first_message_id + index as u64,
                    event_id,
                    sequence: attempt.sequence,
                    answer: attempt.answer,
                }),
            }
        }
    }
    for copies in streams.values_mut() {
        copies.sort_by_key(|copy| copy.message_id);
    }
    streams
}

/// Completeness, and order where there is an ordering key.
fn check_stream(stream: &Stream, copies: &[Copy<'_>], expected: &[String], report: &mut Report) {
    let places: HashMap<&str, usize> = expected
        .iter()
        .enumerate()
        .map(|(place, id)| (id.as_str(), place))
        .collect();
    let mut seen = vec![false; expected.len()];
    // The place of the copy before, and of the latest event that had a first copy.
    let mut before: Option<usize> = None;
    let mut latest: Option<usize> = None;
    for copy in copies {
        let Some(&place) = places.get(copy.event_id) else {
            report.violations.push(Violation::Unexpected {
                stream: stream.clone(),
                event_id: copy.event_id.to_owned(),
                sequence: copy.sequence,
            });
            continue;
        };
        let is_first = !std::mem::replace(&mut seen[place], true);
        if stream.ordering_key.is_empty() {
            continue;
        }
        if let Some(later) = latest.filter(|latest| is_first && *latest > place) {
            report.violations.push(Violation::OutOfOrder {
                stream: stream.clone(),
                event_id: copy.event_id.to_owned(),
                after: expected[later].clone(),
                sequence: copy.sequence,
            });
        }
        if place > before.map_or(0, |before| before + 1) {
            report.violations.push(Violation::Skipped {
                stream: stream.clone(),
                event_id: copy.event_id.to_owned(),
                after: before
                    .map(|before| expected[before].clone())
                    .unwrap_or_default(),
                sequence: copy.sequence,
            });
        }
        before = Some(place);
        latest = latest.max(before);
    }
    let missing = expected.iter().zip(seen).filter(|(_, seen)| !seen);
    report
        .violations
        .extend(missing.map(|(event_id, _)| Violation::Missing {
            stream: stream.clone(),
            event_id: event_id.clone(),
        }));
}

fn find_duplicates(stream: &Stream, copies: &[Copy<'_>], report: &mut Report) {
    let mut last_answer: HashMap<&str, Answer> = HashMap::new();
    for copy in copies {
        let Some(answer_before) = last_answer.insert(copy.event_id, copy.answer) else {
            continue;
        };
        let reason = match answer_before {
            Answer::MessageIds => Reason::Unexplained,
            Answer::Error(_) | Answer::Never | Answer::Pending => Reason::NotAnswered,
        };
        report.duplicates.push(Duplicate {
            stream: stream.clone(),
            event_id: copy.event_id.to_owned(),
            sequence: copy.sequence,
            reason,
        });
    }
}

/// One ordering key in each request, and one request at a time for each ordering key.
fn check_requests(attempts: &[Attempt], report: &mut Report) {
    let mut under_way: HashMap<(&str, &str), &Attempt> = HashMap::new();
    let mut by_arrival: Vec<&Attempt> = attempts.iter().collect();
    by_arrival.sort_by_key(|attempt| attempt.received);
    for attempt in by_arrival {
        if !attempt.other_keys.is_empty() {
            let first = attempt.ordering_key.to_string();
            report.violations.push(Violation::MixedKeys {
                sequence: attempt.sequence,
                keys: [&[first], &attempt.other_keys[..]].concat(),
            });
            continue;
        }
        if attempt.ordering_key.is_empty() {
            continue;
        }
        let key = (&*attempt.topic, &*attempt.ordering_key);
        let Some(earlier) = under_way.get(&key) else {
            under_way.insert(key, attempt);
            continue;
        };
        if is_under_way(earlier, attempt.received) {
            report.violations.push(Violation::InFlightTogether {
                stream: Stream::new(&*attempt.topic, &*attempt.ordering_key),
                first: earlier.sequence,
                second: attempt.sequence,
            });
        }
        // Whichever ends last is the one that the next must not meet.
        let ends_later = earlier
            .ended
            .is_none_or(|e| attempt.ended.is_some_and(|a| a < e));
        if !ends_later {
            under_way.insert(key, attempt);
        }
    }
}

fn is_under_way(attempt: &Attempt, time: Duration) -> bool {
    match (attempt.answer, attempt.ended) {
        (_, None) => true,
        (Answer::Never, Some(ended)) => time + CANCEL_GRACE < ended,
        (Answer::MessageIds | Answer::Error(_) | Answer::Pending, Some(ended)) => time < ended,
    }
}

#[cfg(test)]
mod tests;
