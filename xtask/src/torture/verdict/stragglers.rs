//! Requests whose sender had died, lost its connection, lost the slot or was frozen before they were
//! stored.
//!
//! What left such a client is still read and stored by the server, in its own time: perhaps when
//! the successor has sent the same events already. So is what lay in a frozen client's own buffers,
//! when it wakes. Nobody can call it back. Such a copy repeats, and what is said of order between
//! requests of *living* senders says nothing about it.

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

/// Whether this is what a frozen relay had in its buffers and sent as it woke: its connection is
/// older than that, and it has brought nothing of this lane since it was frozen. What it had sent
/// before may be read while it is frozen.
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

/// Whether two requests of one relay are never on their way together. Messages without an ordering
/// key have several lanes; there it is certain of the same event alone.
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

/// Two requests of one key under way together are no fault of the relay if they came over two
/// connections and the one that sent the first was dead, had seen its connection break, or had lost
/// the slot to another, or if one lay in the buffers of a frozen relay.
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

/// The attempts without those of stragglers that were stored behind another connection's copies of
/// the same events.
pub(super) fn without(evidence: &Evidence, attempts: &[Attempt]) -> Vec<Attempt> {
    let connections = Connections::of(attempts);
    let opened = |peer: &Connection| connections.opened(*peer).unwrap_or_default();
    let mut in_order: Vec<&Attempt> = attempts.iter().filter(|a| a.is_stored()).collect();
    in_order.sort_by_key(|attempt| attempt.first_message_id);
    // Of each event, the connections that have stored it so far.
    let mut stored_by: HashMap<&str, HashSet<Connection>> = HashMap::new();
    // By sequence and first message: of a request there may be several parts.
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

/// The spans of faults that may have ended or frozen the sender while this attempt was on its way.
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
