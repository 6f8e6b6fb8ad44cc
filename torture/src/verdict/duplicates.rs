//! Finds out why an event was stored twice. Each duplicate needs a reason.
//!
//! If the answer to a copy was an error or had too few ids, the relay must send the event again. If
//! the answer was good, the relay may send the event again only if something happened to the relay
//! between the two copies, such as a crash, cut connections or a lost session. `Cause` lists all
//! reasons. `senders` checks that a recorded event is not sent again.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use pubsub_emulator::checks::Duplicate;
use pubsub_emulator::{Action, Answer, Attempt};

use super::connections::{Connections, connection};
use super::{Evidence, Violation};
use crate::fault::{Down, Fault, Side, Trouble};
use crate::stage::Occurrence;

/// The reason for a duplicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Cause {
    /// The relay was killed between the two copies.
    Killed,
    /// PostgreSQL was down, or unreachable for longer than the lease, between the two copies.
    ServerDown,
    /// The relay was frozen, and another relay may have taken over.
    Frozen,
    /// The relay's session was ended from outside, and another relay took over.
    TakenOver,
    /// The relay's session was ended from outside. Before the relay read the error from PostgreSQL, it noticed that
    /// PostgreSQL had released its slot.
    GivenUp,
    /// A fault ended the relay's session, and the harness recreated the slot. The harness's session held the slot for
    /// a moment. The relay noticed this before it read the error from PostgreSQL, and took that session for its
    /// successor. So the relay did not record the outcomes of its events in flight.
    Succeeded,
    /// The connections to Pub/Sub were cut.
    Cut,
    /// Pub/Sub closed the connection after a GOAWAY, right after the answer.
    Closed,
    /// With `dispatch = exceptions`, the session ended before the relay could confirm the event's
    /// position.
    SessionEnded,
    /// With `dispatch = exceptions`, a relay recovered between the two copies. In this mode published events have
    /// no record, so a recovery publishes recent events again.
    Recovered,
    /// Pub/Sub answered a stored request with an error, or with too few ids.
    StoredButFailed,
    /// Pub/Sub did not answer within the publish timeout.
    NoAnswer,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cause::Killed => "after kill -9",
            Cause::ServerDown => "after PostgreSQL was down or out of reach",
            Cause::Frozen => "after a freeze",
            Cause::TakenOver => "after a takeover from a living relay",
            Cause::GivenUp => "after a session whose slot was released before it ended",
            Cause::Succeeded => "after a session whose slot another session held for a moment",
            Cause::Cut => "after cut connections",
            Cause::Closed => "after a connection that was closed right after its last answers",
            Cause::SessionEnded => "after the end of a session without records",
            Cause::Recovered => "after a recovery without records",
            Cause::StoredButFailed => "after an error for a request that was stored",
            Cause::NoAnswer => "after no answer in time",
        })
    }
}

/// How long after a fault the emulator may still read and store a request that was in flight when its
/// sender died or its connection broke.
pub(super) const LATE: Duration = Duration::from_secs(1);

/// The time within which a relay notices that its walsender has ended. A relay that has stopped reading its
/// stream asks PostgreSQL at least once in this time.
const UNNOTICED: Duration = Duration::from_secs(5);

/// If Pub/Sub closes a connection shortly after an answer, within this time, the client may lose the answer. The
/// reason: a client that writes to a closed connection gets an error, and may then ignore answers that have already
/// arrived.
const LAST_MOMENTS: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub(super) struct Explained {
    pub(super) causes: BTreeMap<Cause, u64>,
    pub(super) violations: Vec<Violation>,
}

pub(super) fn explain(evidence: &Evidence, duplicates: &[Duplicate]) -> Explained {
    let attempts: HashMap<u64, &Attempt> = evidence
        .attempts
        .iter()
        .map(|attempt| (attempt.sequence, attempt))
        .collect();
    let connections = Connections::of(&evidence.attempts);
    let mut explained = Explained::default();
    for duplicate in duplicates {
        let (before, again) = (attempts[&duplicate.before], attempts[&duplicate.sequence]);
        match cause(evidence, &connections, before, again) {
            Some(cause) => *explained.causes.entry(cause).or_default() += 1,
            None => explained.violations.push(Violation::UnexplainedDuplicate {
                event_id: duplicate.event_id.clone(),
                before: before.sequence,
                attempt: again.sequence,
            }),
        }
    }
    explained
}

fn cause(
    evidence: &Evidence,
    connections: &Connections,
    before: &Attempt,
    again: &Attempt,
) -> Option<Cause> {
    if matches!(before.answer, Answer::Error(_) | Answer::FewerIds) {
        return Some(Cause::StoredButFailed);
    }
    let by_fault = blamed(evidence, connections, before, again).min();
    // The relay's timeout starts when the relay sends the request, but the journal contains the time
    // at which the emulator read the request. On a busy machine the emulator reads late, so the wait
    // in the journal may be shorter than the timeout.
    let timeout = evidence.publish_timeout;
    let at_least = (timeout.mul_f64(0.9)).min(timeout.saturating_sub(Duration::from_millis(500)));
    let waited = again.received.saturating_sub(before.received);
    let timed_out = waited >= at_least
        && (before.ended).is_none_or(|ended| ended - before.received >= at_least);
    let recovered = evidence.exceptions
        && (evidence.log.recovers.iter())
            .any(|begun| (before.received..=again.received).contains(begun));
    let given_up = (evidence.log.given_up.iter())
        .filter(|found| **found >= before.received)
        .any(|found| is_ended_walsender(evidence, before, again, *found));
    // The log line of the takeover may be older than the first copy of the event. The relay that has lost the slot logs
    // the takeover once, and may send a few more requests afterwards. The first copy may be in one of them.
    let succeeded = (evidence.log.succeeded.iter())
        .any(|found| is_ended_walsender(evidence, before, again, *found));
    let closed = evidence.closes_connections
        && connection(again) != connection(before)
        && is_among_the_last(evidence, before);
    by_fault
        .or(closed.then_some(Cause::Closed))
        .or(timed_out.then_some(Cause::NoAnswer))
        .or(recovered.then_some(Cause::Recovered))
        .or(given_up.then_some(Cause::GivenUp))
        .or(succeeded.then_some(Cause::Succeeded))
}

/// At the time `found`, a relay noticed that it had lost its slot. Returns whether the reason may be a fault that
/// ended the relay's walsender.
///
/// `before` and `again` are the two attempts that stored the event. Returns false if the relay noticed the loss after
/// `again`, because then the loss cannot explain the duplicate.
fn is_ended_walsender(
    evidence: &Evidence,
    before: &Attempt,
    again: &Attempt,
    found: Duration,
) -> bool {
    let is_found_since = |occurrence: &Occurrence| occurrence.from <= found;
    let ends_one = |occurrence: &Occurrence| {
        matches!(
            occurrence.fault,
            Fault::TerminateWalsender | Fault::SlotLost(Down::Running, _)
        )
    };
    // A walsender ends with an error whenever it reads WAL from the time when the publication did not exist. So
    // a gap can end walsenders long after the fault is over.
    let ends_each = |occurrence: &Occurrence| {
        matches!(occurrence.fault, Fault::Gap(..)) && is_found_since(occurrence)
    };
    // A relay continues to send until it notices that its walsender has ended. So the first copy of the event may
    // have been sent after the fault, but before the relay noticed the fault. Then the fault explains the duplicate
    // too.
    let unnoticed = evidence
        .occurrences
        .iter()
        .filter(|occurrence| before.received <= found + LATE && found <= occurrence.to + UNNOTICED);
    found <= again.received
        && (evidence.occurrences.iter().any(ends_each)
            || between(evidence, before, again)
                .chain(unnoticed)
                .any(|occurrence| ends_one(occurrence) && is_found_since(occurrence)))
}

/// Whether the attempt was one of the last on its connection. The connection may then have been
/// closed right after it.
fn is_among_the_last(evidence: &Evidence, attempt: &Attempt) -> bool {
    let ended = attempt.ended.unwrap_or(attempt.received);
    let is_later = |other: &Attempt| {
        connection(other) == connection(attempt) && other.received > ended + LAST_MOMENTS
    };
    attempt.peer.is_some() && !evidence.attempts.iter().any(is_later)
}

/// The faults that happened between two attempts.
pub(super) fn between<'a>(
    evidence: &'a Evidence,
    before: &'a Attempt,
    again: &'a Attempt,
) -> impl Iterator<Item = &'a Occurrence> {
    evidence.occurrences.iter().filter(|occurrence| {
        occurrence.from <= again.received && occurrence.to + LATE >= before.received
    })
}

/// Examines the faults that happened between two attempts. Returns a cause for each fault that explains why the
/// relay sent an event again.
pub(super) fn blamed<'a>(
    evidence: &'a Evidence,
    connections: &'a Connections,
    before: &'a Attempt,
    again: &'a Attempt,
) -> impl Iterator<Item = Cause> {
    between(evidence, before, again).filter_map(|occurrence| {
        let cause = blame(evidence, &occurrence.fault)?;
        let parts = match cause {
            Cause::Killed => true,
            // If a network withholds answers, the relay's connections stay open at first. The relay may send the
            // event again because of its publish timeout, and so send both copies over the same connection.
            Cause::Cut => !occurrence.fault.withholds_answers(),
            _ => false,
        };
        let is_parted = || connections.are_parted_by(occurrence, evidence.relays, before, again);
        if !parts || is_parted() {
            return Some(cause);
        }
        // Before the harness destroyed the slot, it killed a relay. If this was the standby, the active relay kept its
        // connections to Pub/Sub. But the active relay lost the slot, and another session took over.
        let loses_slot = matches!(occurrence.fault, Fault::SlotLost(..));
        (loses_slot && evidence.relays > 1).then_some(Cause::TakenOver)
    })
}

/// The cause of a duplicate if this fault happened between the two copies. `None` if the fault cannot
/// explain a duplicate.
pub(super) fn blame(evidence: &Evidence, fault: &Fault) -> Option<Cause> {
    match fault {
        Fault::Kill(_) => Some(Cause::Killed),
        Fault::Server(..) => Some(Cause::ServerDown),
        Fault::Freeze(_) => Some(Cause::Frozen),
        Fault::CutPubsub | Fault::RefusePubsub(_) => Some(Cause::Cut),
        Fault::Network(_, Trouble::Delayed(_), _) => None,
        Fault::Network(Side::Pubsub, ..) => Some(Cause::Cut),
        Fault::Network(Side::Postgres, ..) => Some(Cause::ServerDown),
        Fault::SlotLost(Down::Killed, _)
        | Fault::Gap(Down::Killed, ..)
        | Fault::Replaced(Down::Killed, _) => Some(Cause::Killed),
        // PostgreSQL releases the slot at once, while the relay's requests are still in flight. The
        // relay cannot record their outcomes once another relay has the slot.
        Fault::TerminateWalsender | Fault::SlotLost(..) if evidence.relays > 1 => {
            Some(Cause::TakenOver)
        }
        // With `dispatch = exceptions`, not even a clean stop can confirm the events of a transaction that is
        // only partly delivered. So the next session repeats these events.
        Fault::Stop(_)
        | Fault::TerminateWalsender
        | Fault::TerminateSql
        | Fault::SlotLost(..)
        | Fault::Gap(..)
        | Fault::Replaced(..)
        | Fault::TooLong
        | Fault::Undecodable(_)
            if evidence.exceptions =>
        {
            Some(Cause::SessionEnded)
        }
        // After a clean stop or the end of its session, the relay waits for the requests in flight and records
        // their outcomes. So no event has to be sent again.
        Fault::Stop(_)
        | Fault::TerminateWalsender
        | Fault::TerminateSql
        | Fault::LockDispatch(_)
        | Fault::SlotLost(..)
        | Fault::Gap(..)
        | Fault::Replaced(..)
        | Fault::TooLong
        | Fault::Undecodable(_)
        | Fault::Release => None,
        Fault::Publish(action, _) | Fault::PublishFor(action, _) => match action {
            // These faults change only Pub/Sub's answers. `cause` explains their duplicates by the first copy alone:
            // the answer was an error or had too few ids, or the relay waited for the answer until its timeout. So the
            // fault is not needed as an explanation.
            Action::StoreThenFail(_) | Action::FewerIds => None,
            Action::StoreThenNeverAnswer | Action::NeverAnswer | Action::Delay(_) => None,
            Action::Fail(_) | Action::FailSaying { .. } => None,
            Action::FailWithReason { .. } => None,
            Action::Throttle { .. } | Action::Poison { .. } => None,
        },
        Fault::TopicGone(..) => None,
    }
}
