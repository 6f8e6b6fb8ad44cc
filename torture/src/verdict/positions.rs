//! Checks that the slot confirms no event before the event is stored (guarantee G1) and recorded
//! (G4).
//!
//! A sample says that the slot had confirmed a position by a certain time. Every event whose
//! transaction ends at or before that position must have been stored by that time. The end of a
//! transaction is known from its writer, which asked for the WAL position right after COMMIT. The
//! dispatch row gives a more exact value, the position of the commit record.
//!
//! Two kinds of events are not checked, because the slot may pass them before they are stored:
//! events that wait in quarantine, which are recorded, and events that the stream does not deliver.
//! A position that no relay has confirmed proves nothing. An example is the position of a recreated
//! slot before a relay takes the slot.

use std::collections::HashMap;
use std::time::Duration;

use super::duplicates::LATE;
use super::{Evidence, Sample, Violation, quarantine};
use crate::fault::Fault;
use crate::stage::Occurrence;

pub(super) fn check(evidence: &Evidence) -> Vec<Violation> {
    let samples: Vec<Sample> = evidence
        .samples
        .iter()
        .filter(|sample| !is_of_a_lost_slot(evidence, sample.at))
        .filter(|sample| !is_of_a_recovery(evidence, sample.at))
        .copied()
        .collect();
    let mut violations = before_stored(evidence, samples.clone());
    violations.extend(before_recorded(evidence, &samples));
    violations
}

fn is_of_a_lost_slot(evidence: &Evidence, at: Duration) -> bool {
    let lost = |occurrence: &&Occurrence| matches!(occurrence.fault, Fault::SlotLost(..));
    evidence.occurrences.iter().filter(lost).any(|occurrence| {
        let lives = evidence.log.lives.iter();
        let streams = lives.flat_map(|life| &life.streams);
        let again = streams.filter(|said| **said > occurrence.to).min();
        at >= occurrence.from && again.is_none_or(|again| at <= *again)
    })
}

/// Whether the judges must ignore the position that the slot had confirmed at this time, because a relay was
/// recovering. They ignore positions during a recovery only in these cases:
///
/// - The relay runs with `dispatch = exceptions`. Then no record shows which events the relay read from the tables,
///   and the slot may pass such events before they are stored.
/// - The plan has a row that the slot cannot deliver. The relay then replaces the slot, and the new slot begins after
///   events that are not stored yet.
fn is_of_a_recovery(evidence: &Evidence, at: Duration) -> bool {
    let lives = evidence.log.lives.iter();
    let streams: Vec<Duration> = lives.flat_map(|life| life.streams.clone()).collect();
    let gives_up = |occurrence: &Occurrence| {
        matches!(occurrence.fault, Fault::TooLong | Fault::Undecodable(_))
    };
    (evidence.exceptions || evidence.occurrences.iter().any(gives_up))
        && evidence.log.recovers.iter().any(|begun| {
            let over = streams.iter().filter(|said| *said > begun).min();
            // `begun` is the time at which the harness read the log line. The recovery began a little earlier, so
            // samples up to `LATE` before `begun` count as part of it.
            at + LATE >= *begun && over.is_none_or(|over| at <= *over)
        })
}

fn before_stored(evidence: &Evidence, mut samples: Vec<Sample>) -> Vec<Violation> {
    let stored = first_stored(evidence);
    let records: HashMap<&str, _> = evidence
        .records
        .iter()
        .map(|record| (record.event_id.as_str(), record))
        .collect();
    let concerned = quarantine::concerned(evidence);
    // Pairs of a position and an event id. Once the slot has confirmed the position, it has confirmed the
    // event.
    let mut events: Vec<(u64, &str)> = Vec::new();
    for event in &evidence.events {
        let record = records.get(event.id.as_str());
        if concerned.contains(&*event.id) || record.is_some_and(|record| record.is_from_table()) {
            continue;
        }
        let by_writer = evidence.committed_by.get(&event.transaction).copied();
        // With `dispatch = exceptions`, nothing shows which events of a gap the stream omitted. So skip all
        // events that may have been committed after the first gap began.
        let gap = evidence.first_gap().filter(|_| evidence.exceptions);
        if gap.is_some_and(|gap| by_writer.is_none_or(|ended| ended > gap)) {
            continue;
        }
        let by_record = record.map(|record| record.commit_lsn + 1);
        if let Some(proof) = by_writer.into_iter().chain(by_record).min() {
            events.push((proof, &event.id));
        }
    }
    events.sort_unstable();
    samples.sort_by_key(|sample| sample.at);
    let mut violations = Vec::new();
    // Only the first sample past an event can find an error. If the event was stored by then, it
    // was also stored when the later samples were taken.
    let mut judged = 0;
    for sample in samples {
        while let Some((_, event_id)) = events
            .get(judged)
            .filter(|(proof, _)| *proof <= sample.confirmed)
        {
            judged += 1;
            if stored.get(event_id).is_none_or(|at| *at > sample.at) {
                violations.push(Violation::ConfirmedBeforeStored {
                    event_id: (*event_id).to_owned(),
                    sample,
                });
            }
        }
    }
    violations
}

/// Compares the number of dispatch rows below each sampled position with the final number below that
/// position. If the final number is higher, some rows were missing when the sample was taken.
fn before_recorded(evidence: &Evidence, samples: &[Sample]) -> Vec<Violation> {
    let mut commits: Vec<u64> = evidence
        .records
        .iter()
        .filter(|record| !record.is_from_table())
        .map(|record| record.commit_lsn)
        .collect();
    commits.sort_unstable();
    let mut violations = Vec::new();
    for sample in samples {
        let in_the_end = commits.partition_point(|commit| *commit < sample.confirmed) as u64;
        if in_the_end > sample.records_below {
            violations.push(Violation::ConfirmedBeforeRecorded {
                unrecorded: in_the_end - sample.records_below,
                sample: *sample,
            });
        }
    }
    violations
}

/// When the first copy of each event was stored.
fn first_stored(evidence: &Evidence) -> HashMap<&str, Duration> {
    let mut first: HashMap<&str, Duration> = HashMap::new();
    for attempt in &evidence.attempts {
        let Some(stored) = attempt.stored else {
            continue;
        };
        for event_id in attempt.event_ids.iter().flatten() {
            let at = first.entry(event_id).or_insert(stored);
            *at = stored.min(*at);
        }
    }
    first
}
