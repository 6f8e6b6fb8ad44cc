//! Judges the evidence of a schedule. Pure functions over plain data: no IO, no clock.
//!
//! `pubsub_emulator::checks` finds out whether every event was published, in order, with at most
//! one request in flight per key. The modules here prepare its input and add the checks that need
//! the database:
//!
//! - `order`: the expected events and their order.
//! - `positions`: nothing was confirmed too early.
//! - `records`: the dispatch table is correct.
//! - `quarantine`: only refused events and the later events of their keys are set aside.
//! - `from_table`: only events that the stream could not deliver are read from a table.
//! - `duplicates`: a fault of the plan explains every duplicate.
//! - `senders`: no relay sends an event after it has certainly read or written the event's dispatch
//!   row.
//! - `stragglers`: requests that a dead client left in flight do not count as errors of living
//!   clients.
//! - `connections`: when each connection was opened, and when it was last used.
//! - `buckets`: the order of aggregates that share a key.

mod buckets;
mod connections;
mod duplicates;
mod from_table;
mod order;
mod positions;
mod quarantine;
mod records;
mod senders;
mod stragglers;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::mem::discriminant;
use std::time::Duration;

use pubsub_emulator::Attempt;
use pubsub_emulator::checks;

pub(crate) use duplicates::Cause;
pub(crate) use from_table::FromTable;
pub(crate) use quarantine::Quarantine;

use crate::log::Logged;
use crate::stage::Occurrence;
use crate::watch::Sample;

/// A row of the outbox. Its transaction was committed, because the row is in the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) id: String,
    /// The full name of the topic.
    pub(crate) topic: String,
    /// Empty for an event without a key.
    pub(crate) key: String,
    /// The number by which the events of a key are ordered.
    pub(crate) version: i64,
    /// The label of the writer's transaction.
    pub(crate) transaction: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) event_id: String,
    pub(crate) commit_lsn: u64,
    pub(crate) ordinal: i32,
    pub(crate) state: String,
    pub(crate) topic: String,
    pub(crate) key: String,
    pub(crate) message_id: Option<u64>,
}

impl Record {
    fn is_published(&self) -> bool {
        self.state == "published"
    }

    /// Whether the relay read the event from its table. The commit record of a streamed event
    /// begins at a multiple of 8. An event from a table gets a position at which no commit record
    /// can begin (docs/adr/0011-recovery.md).
    fn is_from_table(&self) -> bool {
        self.commit_lsn % 8 == 7
    }
}

/// Everything that the judges know about a schedule. Times are on the clock of the emulator's journal.
#[derive(Debug, Default)]
pub(crate) struct Evidence {
    pub(crate) attempts: Vec<Attempt>,
    pub(crate) events: Vec<Event>,
    pub(crate) records: Vec<Record>,
    /// Maps the label of a transaction to a WAL position at or before its begin.
    pub(crate) begun_after: HashMap<String, u64>,
    /// Maps the label of a transaction to a WAL position at or after its end.
    pub(crate) committed_by: HashMap<String, u64>,
    pub(crate) samples: Vec<Sample>,
    /// Maps an event id to a time at which the event certainly had a record.
    pub(crate) recorded_at: HashMap<String, Duration>,
    pub(crate) occurrences: Vec<Occurrence>,
    pub(crate) publish_timeout: Duration,
    /// Whether Pub/Sub closes connections of a certain age.
    pub(crate) closes_connections: bool,
    /// Whether `dispatch` is `exceptions`. In this mode published events have no record unless they were
    /// released. After a crash, the relay repeats more events than with `dispatch = full`. The repeats must
    /// still be complete and in order.
    pub(crate) exceptions: bool,
    /// The number of buckets with `ordering = bucketed(n)`.
    pub(crate) buckets: Option<u64>,
    /// How many relays share the slot.
    pub(crate) relays: usize,
    /// Whether the plan makes the relay read rows from their table, and whether these rows may come late.
    pub(crate) from_table: FromTable,
    /// For each gap: a WAL position from before the stream began to omit the outbox table, and a
    /// position from after the gap.
    pub(crate) gaps: Vec<(u64, u64)>,
    pub(crate) quarantine: Quarantine,
    pub(crate) log: Logged,
}

impl Evidence {
    /// A WAL position before the first gap. `None` if there is no gap.
    fn first_gap(&self) -> Option<u64> {
        self.gaps.iter().map(|(before, _)| *before).min()
    }

    /// The ordering key under which an event is published.
    fn ordering_key<'a>(&self, event: &'a Event) -> Cow<'a, str> {
        match self.buckets.filter(|_| !event.key.is_empty()) {
            Some(buckets) => buckets::key(&event.key, buckets).into(),
            None => event.key.as_str().into(),
        }
    }
}

/// A rule that the relay broke.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Violation {
    /// An event was not published, or was published out of order or malformed, or a request broke a rule.
    Delivery(checks::Violation),
    /// The slot had confirmed an event before the event was stored (guarantee G1).
    ConfirmedBeforeStored { event_id: String, sample: Sample },
    /// The slot had confirmed events that had no dispatch row (guarantee G4).
    ConfirmedBeforeRecorded { unrecorded: u64, sample: Sample },
    /// A dispatch row is wrong or missing, or should not exist.
    Record { event_id: String, what: String },
    /// A relay sent an event although the event had a dispatch row (guarantee G3).
    SentAfterRecorded { event_id: String, attempt: u64 },
    /// An event was stored again, and no fault of the plan explains it.
    UnexplainedDuplicate {
        event_id: String,
        before: u64,
        attempt: u64,
    },
    /// The relay did something it must not, or failed to do something it must.
    Behaviour(String),
}

impl Violation {
    /// Returns equal values for violations that differ only in their details.
    pub(crate) fn kind(&self) -> impl PartialEq + use<> {
        let detail = match self {
            Violation::Delivery(found) => Some(discriminant(found)),
            Violation::ConfirmedBeforeStored { .. }
            | Violation::ConfirmedBeforeRecorded { .. }
            | Violation::Record { .. }
            | Violation::SentAfterRecorded { .. }
            | Violation::UnexplainedDuplicate { .. }
            | Violation::Behaviour(_) => None,
        };
        (discriminant(self), detail)
    }
}

/// The result of judging.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) violations: Vec<Violation>,
    pub(crate) events: u64,
    pub(crate) stored_messages: u64,
    pub(crate) attempts: u64,
    pub(crate) duplicates: BTreeMap<Cause, u64>,
    /// Events that were still set aside after everything else was delivered.
    pub(crate) set_aside: u64,
    /// Events that were read from their table.
    pub(crate) from_table: u64,
}

impl Verdict {
    pub(crate) fn is_clean(&self) -> bool {
        self.violations.is_empty()
    }

    /// Adds an error that was found while the schedule was played.
    pub(crate) fn add_misbehaviour(&mut self, what: Option<String>) {
        self.violations.extend(what.map(Violation::Behaviour));
    }

    pub(crate) fn lost(&self) -> u64 {
        self.count(|found| matches!(found, checks::Violation::Missing { .. }))
    }

    pub(crate) fn swapped(&self) -> u64 {
        self.count(|found| {
            matches!(
                found,
                checks::Violation::OutOfOrder { .. } | checks::Violation::Skipped { .. }
            )
        })
    }

    fn count(&self, wanted: impl Fn(&checks::Violation) -> bool) -> u64 {
        let meets = |violation: &&Violation| match violation {
            Violation::Delivery(found) => wanted(found),
            _ => false,
        };
        self.violations.iter().filter(meets).count() as u64
    }
}

/// Lets every judge examine the evidence. Returns all violations and the totals.
pub(crate) fn judge(evidence: &Evidence) -> Verdict {
    let report = order::check(evidence);
    let found = report.violations.into_iter();
    let mut violations: Vec<Violation> = found
        .filter(|found| !stragglers::are_under_way_together(evidence, found))
        .map(Violation::Delivery)
        .collect();
    violations.extend(positions::check(evidence));
    violations.extend(records::check(evidence));
    violations.extend(quarantine::check(evidence));
    violations.extend(from_table::check(evidence));
    let explained = duplicates::explain(evidence, &report.duplicates);
    violations.extend(explained.violations);
    violations.extend(senders::check(evidence));
    violations.extend(panics(&evidence.log.lines));
    Verdict {
        violations,
        events: evidence.events.len() as u64,
        stored_messages: report.stored_messages as u64,
        attempts: report.attempts as u64,
        duplicates: explained.causes,
        set_aside: evidence.quarantine.set_aside.len() as u64,
        from_table: from_table::count(evidence),
    }
}

fn panics(log: &[String]) -> Vec<Violation> {
    log.iter()
        .filter(|line| line.contains("panicked at"))
        .map(|line| Violation::Behaviour(format!("the relay panicked: {line}")))
        .collect()
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::Delivery(found) => found.fmt(f),
            Violation::ConfirmedBeforeStored { event_id, sample } => write!(
                f,
                "confirmed before stored: at {:.3} s the slot had confirmed {:X}, past event \
                 {event_id}, which was not stored by then",
                sample.at.as_secs_f64(),
                sample.confirmed
            ),
            Violation::ConfirmedBeforeRecorded { unrecorded, sample } => write!(
                f,
                "confirmed before recorded: at {:.3} s the slot had confirmed {:X}, and \
                 {unrecorded} events before that had no dispatch row",
                sample.at.as_secs_f64(),
                sample.confirmed
            ),
            Violation::Record { event_id, what } => {
                write!(f, "dispatch row of event {event_id}: {what}")
            }
            Violation::SentAfterRecorded { event_id, attempt } => write!(
                f,
                "sent after recorded: attempt {attempt} has event {event_id}, which already had a dispatch \
                 row"
            ),
            Violation::UnexplainedDuplicate {
                event_id,
                before,
                attempt,
            } => write!(
                f,
                "duplicate without a reason: event {event_id} was stored by attempt {before} and \
                 again by attempt {attempt}"
            ),
            Violation::Behaviour(what) => f.write_str(what),
        }
    }
}
