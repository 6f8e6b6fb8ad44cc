//! Events that were read from their table, since the stream did not bring them (G9).
//!
//! Their records show it by their place. They come only where the plan takes the stream away, and
//! never for a transaction that had ended before the publication was altered, unless the slot had
//! to be made anew.

use std::collections::HashMap;

use super::{Evidence, Violation};

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
        if evidence.from_table == FromTable::Never {
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
pub(super) fn late(evidence: &Evidence) -> impl Iterator<Item = &str> {
    let records = evidence.records.iter();
    records
        .filter(|record| evidence.from_table == FromTable::Late && record.is_from_table())
        .map(|record| record.event_id.as_str())
}

pub(super) fn count(evidence: &Evidence) -> u64 {
    let records = evidence.records.iter();
    records.filter(|record| record.is_from_table()).count() as u64
}
