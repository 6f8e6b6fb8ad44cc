//! Finds stragglers: requests that were stored after their sender had died, lost its connection, lost the slot
//! or was frozen.
//!
//! Pub/Sub may read and store such a request late, perhaps after the sender's successor has sent the same
//! events. A frozen sender may also send the requests in its buffers when it wakes up. The relay cannot prevent
//! either. So a straggler counts only as a duplicate, and the rules for the order between requests of *living*
//! senders do not apply to it.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use pubsub_emulator::Attempt;
use pubsub_emulator::checks::Violation;

use super::Evidence;
use super::connections::{Connection, Connections, connection};
use super::duplicates::{Cause, LATE, blame, blamed};

fn is_the_end_of_a_client(cause: Cause) -> bool {
    matches!(cause, Cause::Killed | Cause::Cut | Cause::TakenOver)
}

/// Whether a frozen relay had this request in its buffers and sent it when it woke up. The request must
/// arrive right after the freeze, over a connection that already existed. No other request of its lane may
/// have arrived over this connection since the freeze began.
pub(super) fn lay_in_a_frozen_relay(evidence: &Evidence, attempt: &Attempt) -> bool {
    let is_of_peer =
        |other: &&Attempt| attempt.peer.is_some() && connection(other) == connection(attempt);
    let of_peer = || evidence.attempts.iter().filter(is_of_peer);
    let is_of_lane = |other: &&Attempt| is_of_lane(other, attempt);
    let freezes = evidence.occurrences.iter().filter(|occurrence| {
        blame(evidence, &occurrence.fault) == Some(Cause::Frozen)
            && (occurrence.to..=occurrence.to + LATE).contains(&attempt.received)
    });
    freezes.into_iter().any(|freeze| {
        let since = |other: &Attempt| (freeze.from..attempt.received).contains(&other.received);
        of_peer().any(|other| other.received < freeze.to)
            && !of_peer().filter(is_of_lane).any(since)
    })
}

/// Whether the two requests belong to one lane. A relay never has two requests of a lane in flight. Messages
/// without an ordering key are spread over several lanes, so two such requests count as one lane only if they
/// have an event in common.
fn is_of_lane(one: &Attempt, other: &Attempt) -> bool {
    let lane = |attempt: &Attempt| (attempt.topic.clone(), attempt.ordering_key.clone());
    let is_in_other = |id| {
        other
            .event_ids
            .iter()
            .flatten()
            .any(|of_other| of_other == id)
    };
    lane(one) == lane(other)
        && (!one.ordering_key.is_empty() || one.event_ids.iter().flatten().any(is_in_other))
}

/// Returns true if the violation says that two requests of one key were in flight together, and the relay
/// could not prevent it. The relay could not prevent it in two cases:
///
/// - The requests arrived over two connections, and the sender of the first request was dead, had seen its
///   connection break, or had lost the slot.
/// - One request was in the buffers of a frozen relay.
pub(super) fn are_under_way_together(evidence: &Evidence, found: &Violation) -> bool {
    let Violation::InFlightTogether { first, second, .. } = found else {
        return false;
    };
    let attempt = |sequence: &u64| evidence.attempts.iter().find(|a| a.sequence == *sequence);
    let (Some(first), Some(second)) = (attempt(first), attempt(second)) else {
        return false;
    };
    [first, second]
        .into_iter()
        .any(|attempt| lay_in_a_frozen_relay(evidence, attempt))
        || (connection(first) != connection(second)
            && blamed(
                evidence,
                &Connections::of(&evidence.attempts),
                first,
                second,
            )
            .any(is_the_end_of_a_client))
}

/// Returns the attempts without stragglers. An attempt is a straggler if all of this is true:
///
/// - While the attempt was in flight, a fault may have ended its connection or frozen its sender.
/// - After the fault began, newer connections were opened.
/// - Before Pub/Sub stored the attempt, it had stored each event of the attempt over one of these newer connections.
pub(super) fn without(evidence: &Evidence, attempts: &[Attempt]) -> Vec<Attempt> {
    let connections = Connections::of(attempts);
    let opened = |peer: &Connection| connections.opened(*peer).unwrap_or_default();
    let mut in_order: Vec<&Attempt> = attempts.iter().filter(|a| a.is_stored()).collect();
    in_order.sort_by_key(|attempt| attempt.first_message_id);
    // For each event, the connections over which copies of it have been stored so far.
    let mut stored_by: HashMap<&str, HashSet<Connection>> = HashMap::new();
    // A straggler is identified by its sequence number and first message id, because `buckets` splits a
    // request into several attempts with the same sequence number.
    let mut stragglers: HashSet<(u64, Option<u64>)> = HashSet::new();
    for attempt in in_order {
        let Some(peer) = connection(attempt) else {
            continue;
        };
        let ends: Vec<(Duration, Duration)> = ends_before(evidence, attempt)
            .filter(|(_, end)| opened(&peer) <= *end)
            .collect();
        let is_successor = |other: &Connection| {
            let began = opened(other);
            began > opened(&peer) && ends.iter().any(|(from, _)| began >= *from)
        };
        let is_repeated = |event_id: &str| {
            let stored = stored_by.get(event_id);
            stored.is_some_and(|peers| peers.iter().any(is_successor))
        };
        let mut events = attempt.event_ids.iter().flatten();
        if events.all(|event_id| is_repeated(event_id)) {
            stragglers.insert((attempt.sequence, attempt.first_message_id));
        }
        for event_id in attempt.event_ids.iter().flatten() {
            stored_by.entry(event_id).or_default().insert(peer);
        }
    }
    let stays =
        |attempt: &&Attempt| !stragglers.contains(&(attempt.sequence, attempt.first_message_id));
    attempts.iter().filter(stays).cloned().collect()
}

/// The time spans of the faults that may have killed, disconnected or frozen the sender while this
/// attempt was in flight.
fn ends_before(
    evidence: &Evidence,
    attempt: &Attempt,
) -> impl Iterator<Item = (Duration, Duration)> {
    let stored = attempt.stored.unwrap_or(attempt.received);
    evidence
        .occurrences
        .iter()
        .filter(move |occurrence| {
            occurrence.from <= stored && occurrence.to + LATE >= attempt.received
        })
        .filter(|occurrence| {
            blame(evidence, &occurrence.fault)
                .is_some_and(|cause| is_the_end_of_a_client(cause) || cause == Cause::Frozen)
        })
        .map(|occurrence| (occurrence.from, occurrence.to))
}
