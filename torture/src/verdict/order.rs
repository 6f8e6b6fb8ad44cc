//! Checks which events were published, and in which order.
//!
//! The versions give the order of a key's events. Two kinds of events may be late, that is, come after later
//! events of their key: events that the stream omitted, and events that were quarantined and released without
//! the later events of their key. The late events are judged as a separate stream, which must be in order too.
//! No late event may come *before* an earlier event of its key.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

use pubsub_emulator::Attempt;
use pubsub_emulator::checks::{self, Expected, Report, Stream, Violation};

use super::{Event, Evidence, buckets, from_table, quarantine, stragglers};

pub(super) fn check(evidence: &Evidence) -> Report {
    let attempts: Cow<'_, [Attempt]> = match evidence.buckets {
        Some(_) => buckets::apart(evidence, &evidence.attempts).into(),
        None => (&evidence.attempts).into(),
    };
    let mut report = check_attempts(evidence, &attempts);
    let is_skip = |found: &Violation| matches!(found, Violation::Skipped { .. });
    if report.violations.iter().any(is_skip) {
        // A straggler stores old events again (see `stragglers`). The next request of a living sender then seems
        // to skip all events between these old events and its own. So keep only the skips that remain without
        // the stragglers.
        let living = stragglers::without(evidence, &attempts);
        let among_the_living = check_attempts(evidence, &living).violations;
        report
            .violations
            .retain(|found| !is_skip(found) || among_the_living.contains(found));
    }
    if evidence.buckets.is_some() {
        report.attempts = evidence.attempts.len();
        report.violations.retain(|found| !is_of_requests(found));
        // Check the rules about whole requests on the original requests, not on the parts into which
        // `buckets` has split them.
        let of_requests = checks::check(&evidence.attempts, &Expected::new()).violations;
        let of_requests = of_requests.into_iter().filter(is_of_requests);
        report.violations.extend(of_requests);
    }
    report
        .violations
        .retain(|found| !from_table::leaves_out_what_is_vouched_for(evidence, found));
    report
}

/// Whether the violation is about a request as a whole, not about the events in it.
fn is_of_requests(found: &Violation) -> bool {
    matches!(
        found,
        Violation::InFlightTogether { .. } | Violation::MixedKeys { .. }
    )
}

fn check_attempts(evidence: &Evidence, attempts: &[Attempt]) -> Report {
    let mut late: HashSet<&str> = from_table::late(evidence);
    late.extend(quarantine::late(evidence));
    let is_late = |id: &str| late.contains(id);
    let is_punctual = |id: &str| !late.contains(id);
    if late.is_empty() {
        return checks::check(attempts, &expected(evidence, is_punctual));
    }
    let mut report = checks::check(
        &only(attempts, |_, id| is_punctual(id)),
        &expected(evidence, is_punctual),
    );
    let since = from_table::repeated_from_table(evidence);
    let counts = |attempt: &Attempt, id: &str| {
        is_late(id) && since.get(id).is_none_or(|since| attempt.received >= *since)
    };
    let of_late = checks::check(&only(attempts, counts), &expected(evidence, is_late));
    report.stored_messages += of_late.stored_messages;
    report.duplicates.extend(of_late.duplicates);
    // Leave out violations of the rules about requests, because they were already found above.
    let found = of_late.violations.into_iter();
    report
        .violations
        .extend(found.filter(|found| !is_of_requests(found)));
    report
        .violations
        .extend(too_early(evidence, attempts, &late));
    report
}

/// The wanted events that must have been published, per key and sorted by version. Leaves out events that are
/// set aside in the end: the module `quarantine` judges these.
fn expected(evidence: &Evidence, wanted: impl Fn(&str) -> bool) -> Expected {
    let unpublished: HashSet<&str> = evidence
        .records
        .iter()
        .filter(|record| !record.is_published())
        .map(|record| record.event_id.as_str())
        .collect();
    let is_expected = |event: &Event| wanted(&event.id) && !unpublished.contains(&*event.id);
    let ids = |events: Vec<&Event>| {
        let expected = events.into_iter().filter(|event| is_expected(event));
        expected.map(|event| event.id.clone()).collect()
    };
    let streams = streams(evidence).into_iter();
    streams
        .map(|(stream, events)| (stream, ids(events)))
        .collect()
}

/// All events per topic and key, sorted by version.
pub(super) fn streams(evidence: &Evidence) -> BTreeMap<Stream, Vec<&Event>> {
    let mut streams: BTreeMap<Stream, Vec<&Event>> = BTreeMap::new();
    for event in &evidence.events {
        let stream = Stream::new(&*event.topic, &*event.key);
        streams.entry(stream).or_default().push(event);
    }
    for events in streams.values_mut() {
        events.sort_by_key(|event| event.version);
    }
    streams
}

/// Returns copies of the attempts that contain only the wanted events. If an attempt loses an event, the later events
/// of this attempt get lower message ids, because the ids count up from the first id of the attempt. The order of all
/// message ids stays the same.
fn only(attempts: &[Attempt], wanted: impl Fn(&Attempt, &str) -> bool) -> Vec<Attempt> {
    let only = |attempt: &Attempt| {
        let ids = attempt.event_ids.iter();
        let kept = ids.filter(|id| id.as_deref().is_none_or(|id| wanted(attempt, id)));
        Attempt {
            event_ids: kept.cloned().collect(),
            ..attempt.clone()
        }
    };
    attempts.iter().map(only).collect()
}

/// Finds late events that were published before an event of their key with a lower version. Late events may be
/// published after events with higher versions, but not before events with lower versions.
///
/// The function does not compare two late events, because [`check_attempts`] checks their order as a separate stream.
fn too_early(evidence: &Evidence, attempts: &[Attempt], late: &HashSet<&str>) -> Vec<Violation> {
    let first = first_copies(attempts);
    let mut violations = Vec::new();
    for (stream, events) in streams(evidence) {
        if stream.ordering_key.is_empty() {
            continue;
        }
        // Among the earlier events that are not late, the one whose first copy was stored last. The tuple contains
        // the message id and the attempt of this copy, and the event.
        let mut last: Option<(u64, u64, &Event)> = None;
        for event in events {
            let Some((message, sequence)) = first.get(&*event.id).copied() else {
                continue;
            };
            if !late.contains(&*event.id) {
                if last.is_none_or(|(latest, ..)| latest < message) {
                    last = Some((message, sequence, event));
                }
            } else if let Some((_, sequence, earlier)) = last.filter(|(m, ..)| *m > message) {
                violations.push(Violation::OutOfOrder {
                    stream: stream.clone(),
                    event_id: earlier.id.clone(),
                    after: event.id.clone(),
                    sequence,
                });
            }
        }
    }
    violations
}

/// The message id and attempt of each event's first copy.
pub(super) fn first_copies(attempts: &[Attempt]) -> HashMap<&str, (u64, u64)> {
    let mut first: HashMap<&str, (u64, u64)> = HashMap::new();
    for attempt in attempts {
        let Some(first_id) = attempt.first_message_id else {
            continue;
        };
        for (id, event_id) in (first_id..).zip(attempt.event_ids.iter()) {
            if let Some(event_id) = event_id.as_deref() {
                let copy = first.entry(event_id).or_insert((id, attempt.sequence));
                *copy = (*copy).min((id, attempt.sequence));
            }
        }
    }
    first
}
