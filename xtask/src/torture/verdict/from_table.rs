//! Events that were read from their table, since the stream did not bring them (G9).
//!
//! Their records show it by their place. They come only where the plan takes the stream away, or
//! where a relay without records has recovered, and never for a transaction that had ended before
//! the publication was altered, unless the slot had to be made anew.

use std::collections::{HashMap, HashSet};

use super::{Evidence, Violation, order};

/// What the plan does to the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::torture) enum FromTable {
    /// It brings everything.
    #[default]
    Never,
    /// The slot is lost, and the relay notices: what comes from the tables comes before the stream.
    InOrder,
    /// The stream leaves something out, which is found beside it and comes late.
    Late,
}

pub(super) fn check(evidence: &Evidence) -> Vec<Violation> {
    let transactions: HashMap<&str, &str> = evidence
        .events
        .iter()
        .map(|event| (&*event.id, &*event.transaction))
        .collect();
    // A slot that was made anew has everything without a record delivered from the tables.
    let first_gap = match evidence.log.recoveries() {
        0 => evidence.gaps.iter().min(),
        _ => None,
    };
    let mut violations = Vec::new();
    for record in &evidence.records {
        if !record.is_from_table() {
            continue;
        }
        let mut complain = |what: &str| {
            violations.push(Violation::Record {
                event_id: record.event_id.clone(),
                what: what.to_owned(),
            });
        };
        // Without records a relay may have to recover after any crash.
        let recovered = evidence.exceptions && evidence.log.recoveries() > 0;
        if evidence.from_table == FromTable::Never && !recovered {
            complain("it was read from its table, though the stream has brought everything");
        }
        let transaction = transactions.get(&*record.event_id).copied();
        let ended = transaction.and_then(|label| evidence.committed_by.get(label));
        if let (Some(ended), Some(gap)) = (ended, first_gap)
            && ended <= gap
        {
            complain("it was read from its table, and was committed before any gap");
        }
    }
    violations
}

/// Those that may come behind later events of their key.
pub(super) fn late(evidence: &Evidence) -> HashSet<&str> {
    match (evidence.from_table, evidence.exceptions) {
        (FromTable::Late, true) => overtaken(evidence),
        (FromTable::Late, false) => recorded_late(evidence).collect(),
        (FromTable::Never | FromTable::InOrder, _) => HashSet::new(),
    }
}

/// Without records nothing tells what the stream has left out but that it was overtaken. That is
/// allowed to what ended after the publication was altered, and to nothing else.
fn overtaken(evidence: &Evidence) -> HashSet<&str> {
    let Some(gap) = evidence.gaps.iter().min() else {
        return HashSet::new();
    };
    let first = order::first_copies(&evidence.attempts);
    let mut overtaken = HashSet::new();
    for (stream, events) in order::streams(evidence) {
        // From the last to the first: the earliest first copy of those behind.
        let mut earliest = u64::MAX;
        for event in events.into_iter().rev() {
            let Some((message, _)) = first.get(&*event.id).copied() else {
                continue;
            };
            let ended = evidence.committed_by.get(&event.transaction);
            let may_be_late = ended.is_none_or(|ended| ended > gap);
            if message > earliest && may_be_late && !stream.ordering_key.is_empty() {
                overtaken.insert(&*event.id);
            }
            earliest = earliest.min(message);
        }
    }
    overtaken
}

fn recorded_late(evidence: &Evidence) -> impl Iterator<Item = &str> {
    let records = evidence.records.iter();
    records
        .filter(|record| record.is_from_table())
        .map(|record| record.event_id.as_str())
}

pub(super) fn count(evidence: &Evidence) -> u64 {
    let records = evidence.records.iter();
    records.filter(|record| record.is_from_table()).count() as u64
}
