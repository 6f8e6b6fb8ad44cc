//! Checks a journal: finds out whether every event was published, in order, and which events were
//! published more than once and why.
//!
//! [`check`] is a pure function. It compares a snapshot of the journal with the list of events that
//! should have been published. For each (topic, ordering key) the first copies must come in the
//! expected order. A publisher that repeats events must go back to an earlier event of the key, and send
//! all events from there on in order. Messages without an ordering key have no order. [`check`] does not
//! look at the messages that *subscribers* received.

mod report;

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

pub use self::report::{Duplicate, Reason, Report, Stream, Violation};
use crate::journal::{Answer, Attempt};

/// The events that should have been published: for each stream, the ids of its events in order.
pub type Expected = BTreeMap<Stream, Vec<String>>;

/// A request that was never answered may overlap with the next request of its key for this long, and
/// [`check`] does not count the two requests as in flight together. The reason is cancellation: a client
/// that cancels a request can send the next request before the server has noticed the cancellation.
const CANCEL_GRACE: Duration = Duration::from_millis(250);

/// Compares the attempts of a journal with the events that should have been published.
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

/// A stored copy of an event.
#[derive(Debug, Clone, Copy)]
struct Copy<'a> {
    message_id: u64,
    event_id: &'a str,
    sequence: u64,
    answer: Answer,
}

/// Returns the stored copies of each stream in the order in which they were stored, which is the
/// order of their message ids. Reports messages without an event id.
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

/// Checks that all expected events are stored, and in order if the stream has an ordering key.
fn check_stream(stream: &Stream, copies: &[Copy<'_>], expected: &[String], report: &mut Report) {
    let places: HashMap<&str, usize> = expected
        .iter()
        .enumerate()
        .map(|(place, id)| (id.as_str(), place))
        .collect();
    let mut seen = vec![false; expected.len()];
    // `before` is the index of the event of the previous copy. `latest` is the highest index so
    // far.
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
    let mut last_copy: HashMap<&str, &Copy<'_>> = HashMap::new();
    for copy in copies {
        let Some(before) = last_copy.insert(copy.event_id, copy) else {
            continue;
        };
        let reason = match before.answer {
            Answer::MessageIds => Reason::Unexplained,
            Answer::Error(_) | Answer::FewerIds | Answer::Never | Answer::Pending => {
                Reason::NotAnswered
            }
        };
        report.duplicates.push(Duplicate {
            stream: stream.clone(),
            event_id: copy.event_id.to_owned(),
            before: before.sequence,
            sequence: copy.sequence,
            reason,
        });
    }
}

/// Checks that all messages of a request have one ordering key, and that each ordering key has at
/// most one request in flight.
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
        // Keep the attempt that ends last, because the next attempt must not overlap with it.
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
        (
            Answer::MessageIds | Answer::FewerIds | Answer::Error(_) | Answer::Pending,
            Some(ended),
        ) => time < ended,
    }
}

#[cfg(test)]
mod tests;
