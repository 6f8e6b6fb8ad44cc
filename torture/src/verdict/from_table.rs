//! Judges events that the relay read from their table, because the stream did not deliver them (guarantee
//! G9).
//!
//! The position in an event's dispatch row shows whether the event was read from its table. The relay may read
//! events from a table only in these cases:
//!
//! - The plan loses the slot, or makes the stream omit rows ([`FromTable`]).
//! - A relay with `dispatch = exceptions` has recovered.
//! - A relay was killed before its first start had ended. On a busy machine, a first start takes some seconds.
//!
//! If the plan makes the stream omit rows for a while (a gap), only events whose transaction ended after the beginning
//! of the first gap may come from a table. After a recovery, this limit does not apply.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use pubsub_emulator::checks;

use super::duplicates::LATE;
use super::{Event, Evidence, Violation, order};

/// What the plan does to the replication stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum FromTable {
    /// The stream delivers every row.
    #[default]
    Never,
    /// The slot is lost, and the relay notices the loss. The relay publishes the rows from the tables
    /// before it streams.
    InOrder,
    /// The stream omits rows. The relay finds them while it streams, and publishes them late.
    Late,
}

pub(super) fn check(evidence: &Evidence) -> Vec<Violation> {
    let transactions: HashMap<&str, &str> = evidence
        .events
        .iter()
        .map(|event| (&*event.id, &*event.transaction))
        .collect();
    // Without a recovery, the relay reads a row from its table only if the row was committed after the first gap
    // began. A recovery delivers every unrecorded row from the tables, also rows from before the gap.
    let first_gap = match evidence.log.recoveries() {
        0 => evidence.first_gap(),
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
        // With `dispatch = exceptions`, a relay may have to recover after any crash. A recovery reads events from
        // their table, even if no fault of the plan makes the stream omit events.
        let recovered = evidence.exceptions && evidence.log.recoveries() > 0;
        let recovered = recovered || evidence.log.finishes_first_start();
        if evidence.from_table == FromTable::Never && !recovered {
            complain("it was read from its table, although the stream has delivered everything");
        }
        let transaction = transactions.get(&*record.event_id).copied();
        let ended = transaction.and_then(|label| evidence.committed_by.get(label));
        if let (Some(ended), Some(gap)) = (ended, first_gap)
            && *ended <= gap
        {
            complain("it was read from its table, and was committed before any gap");
        }
    }
    violations
}

/// Events that may come after later events of their key.
pub(super) fn late(evidence: &Evidence) -> HashSet<&str> {
    match (evidence.from_table, evidence.exceptions) {
        (FromTable::Late, true) => left_out(evidence),
        (FromTable::Late, false) => recorded_late(evidence)
            .chain(brought_later(evidence))
            .collect(),
        (FromTable::Never | FromTable::InOrder, _) => HashSet::new(),
    }
}

/// Returns the events that may come late in a schedule with `dispatch = exceptions`. Published events then have no
/// records, so no record shows which events the stream has omitted. An event may come late if all of this is true:
///
/// - A later event of its key was published first. This is the only sign that the stream has omitted the event.
/// - Its transaction ended after the first gap began, or the end of the transaction is unknown.
fn left_out(evidence: &Evidence) -> HashSet<&str> {
    let Some(gap) = evidence.first_gap() else {
        return HashSet::new();
    };
    let may_be = |event: &Event| {
        let ended = evidence.committed_by.get(&event.transaction);
        ended.is_none_or(|ended| *ended > gap)
    };
    let overtaken = overtaken(evidence).into_iter();
    let left_out = overtaken.filter(|overtaken| may_be(overtaken.event));
    left_out.map(|overtaken| &*overtaken.event.id).collect()
}

/// Whether the violation is a skip that `dispatch = exceptions` allows (docs/adr/0013-exceptions.md).
///
/// In this mode, a recovery repeats only rows whose transaction id is not below the floor of their table. For all
/// rows below the floor, the relay has vouched that they are resolved. A long transaction may have a lower id than
/// shorter transactions that committed before it. If the floor lies between these ids, the recovery repeats the
/// events of the shorter transactions, and skips the events of the long one, which are already published.
pub(super) fn leaves_out_what_is_vouched_for(
    evidence: &Evidence,
    found: &checks::Violation,
) -> bool {
    let checks::Violation::Skipped {
        stream,
        event_id,
        after,
        sequence,
    } = found
    else {
        return false;
    };
    let attempt = evidence.attempts.iter().find(|a| a.sequence == *sequence);
    let has_recovered = (evidence.log.recovers.iter().min())
        .is_some_and(|begun| attempt.is_some_and(|attempt| *begun < attempt.received));
    if !evidence.exceptions || !has_recovered {
        return false;
    }
    let first = order::first_copies(&evidence.attempts);
    let events = order::streams(evidence).remove(stream).unwrap_or_default();
    let mut events = events.into_iter().skip_while(|event| event.id != *after);
    let ended = (events.next()).and_then(|event| evidence.committed_by.get(&event.transaction));
    let mut left_out = events.take_while(|event| event.id != *event_id);
    left_out.all(|event| {
        let was_stored = first.get(&*event.id).is_some_and(|(_, at)| at < sequence);
        let begun = evidence.begun_after.get(&event.transaction);
        was_stored && ended.is_some_and(|ended| begun.is_some_and(|begun| begun < ended))
    })
}

/// Returns events that the stream omitted at first and delivered later, after later events of their key.
/// This can happen if a transaction was open while the publication was altered: PostgreSQL may send more
/// of the transaction's rows when it decodes the transaction again for another session.
fn brought_later(evidence: &Evidence) -> impl Iterator<Item = &str> {
    let received: HashMap<u64, Duration> = evidence
        .attempts
        .iter()
        .map(|attempt| (attempt.sequence, attempt.received))
        .collect();
    let begins_between = move |by: u64, first: u64| {
        // The harness reads a log line a little later than the relay writes it, so `LATE` is added.
        let between = received[&by]..received[&first] + LATE;
        let mut sessions = evidence.log.lives.iter().flat_map(|life| &life.sessions);
        sessions.any(|begun| between.contains(begun))
    };
    let overtaken = overtaken(evidence).into_iter();
    overtaken
        .filter(move |o| was_open(evidence, o.event) && begins_between(o.by, o.first))
        .map(|overtaken| &*overtaken.event.id)
}

/// Whether the event's transaction was open while the publication was altered.
fn was_open(evidence: &Evidence, event: &Event) -> bool {
    let begun = evidence.begun_after.get(&event.transaction);
    let ended = evidence.committed_by.get(&event.transaction);
    evidence.gaps.iter().any(|(before, after)| {
        begun.is_none_or(|begun| begun <= after) && ended.is_none_or(|ended| ended > before)
    })
}

/// Returns the events that the relay may have published twice, first from the stream and later from their table. Maps
/// each event to the start of the first session that began between the first and the last copy of the event. This
/// session and later ones may have received no row of the event from PostgreSQL.
///
/// Only an event whose transaction was open while the publication was altered can be published in this way:
///
/// 1. PostgreSQL sends the row to one session. This session publishes the row, but ends before the event is recorded.
/// 2. PostgreSQL omits the row in the next session.
/// 3. The relay reads the row from its table, and publishes it again.
pub(super) fn repeated_from_table(evidence: &Evidence) -> HashMap<&str, Duration> {
    let mut copies: HashMap<&str, (Duration, Duration)> = HashMap::new();
    for attempt in evidence
        .attempts
        .iter()
        .filter(|a| a.first_message_id.is_some())
    {
        for id in attempt.event_ids.iter().flatten() {
            let at = attempt.received;
            let span = copies.entry(id).or_insert((at, at));
            *span = (span.0.min(at), span.1.max(at));
        }
    }
    let recorded: HashSet<&str> = recorded_late(evidence).collect();
    let events = evidence.events.iter();
    let events = events.filter(|event| recorded.contains(&*event.id) && was_open(evidence, event));
    let since = |event: &Event| {
        let (first, last) = copies.get(&*event.id).copied()?;
        let mut sessions = evidence.log.lives.iter().flat_map(|life| &life.sessions);
        // The harness reads a log line a little later than the relay writes it, so `LATE` is added.
        let begun = sessions.find(|begun| (first..last + LATE).contains(begun))?;
        Some((*begun).min(last))
    };
    events
        .filter_map(|event| Some((&*event.id, since(event)?)))
        .collect()
}

/// An event whose first copy came after the first copy of a later event of its key. `first` and `by` are
/// the sequence numbers of the attempts that contained these two copies.
struct Overtaken<'a> {
    event: &'a Event,
    first: u64,
    by: u64,
}

fn overtaken(evidence: &Evidence) -> Vec<Overtaken<'_>> {
    let copies = order::first_copies(&evidence.attempts);
    let mut overtaken = Vec::new();
    for (stream, events) in order::streams(evidence) {
        if stream.ordering_key.is_empty() {
            continue;
        }
        // Go through the events of the key from the last to the first. Of all copies of later events, `earliest` is
        // the one that was stored first.
        let mut earliest = (u64::MAX, u64::MAX);
        for event in events.into_iter().rev() {
            let Some(copy) = copies.get(&*event.id).copied() else {
                continue;
            };
            if copy > earliest {
                overtaken.push(Overtaken {
                    event,
                    first: copy.1,
                    by: earliest.1,
                });
            }
            earliest = earliest.min(copy);
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
