//! Tests how the judges treat stragglers: requests of dead or frozen clients that Pub/Sub stores late.

use super::*;

#[test]
fn a_late_copy_from_a_dead_relay_does_not_count_as_a_wrong_order() {
    // The first relay (port 1) dies after e1, and its successor sends the other events. Between e3
    // and e4 a second copy of e1 arrives from the dead relay.
    let by = |port, sequence, at, id| Attempt {
        peer: peer(port),
        ..attempt(sequence, at, id)
    };
    let mut evidence = evidence();
    evidence.attempts = vec![
        by(1, 0, 100, "e1"),
        by(2, 1, 260, "e2"),
        by(2, 2, 270, "e3"),
        by(1, 3, 280, "e1"),
    ];
    evidence.events.push(Event {
        id: "e4".to_owned(),
        version: 4,
        ..evidence.events[2].clone()
    });
    evidence.attempts.push(by(2, 4, 290, "e4"));
    evidence.occurrences = vec![happened(Fault::Kill(ms(10)), 210, 230)];
    let swapped = |evidence: &Evidence| judge(evidence).swapped();
    assert_eq!(swapped(&evidence), 1, "the successor has not sent e1");
    evidence.attempts.insert(1, by(2, 9, 250, "e1"));
    for (sequence, attempt) in (0..).zip(&mut evidence.attempts) {
        attempt.sequence = sequence;
        attempt.first_message_id = Some(sequence);
    }
    assert_eq!(swapped(&evidence), 0);
    evidence.occurrences[0].fault = Fault::Freeze(ms(20));
    assert_eq!(
        swapped(&evidence),
        0,
        "it was in the buffers of a frozen relay"
    );
    evidence.occurrences[0].fault = Fault::TerminateSql;
    assert_eq!(swapped(&evidence), 1, "the first relay lives");
    evidence.occurrences[0].fault = Fault::Kill(ms(10));
    evidence.attempts[4].peer = peer(2);
    assert_eq!(
        swapped(&evidence),
        1,
        "the successor itself goes back and skips"
    );
    evidence.attempts[4].peer = peer(1);
    evidence.attempts[0].peer = peer(3);
    assert_eq!(
        swapped(&evidence),
        1,
        "over a connection that was opened later"
    );
    evidence.attempts[4].connected = Some(ms(200));
    assert_eq!(
        swapped(&evidence),
        0,
        "over a connection without earlier requests"
    );
    evidence.occurrences.clear();
    assert_eq!(swapped(&evidence), 1, "nobody died");
}

#[test]
fn concurrent_requests_of_a_key_are_excused_only_if_the_first_sender_died() {
    let mut evidence = repeated(Answer::MessageIds, vec![]);
    evidence.attempts[2].ended = Some(ms(410));
    let together = |evidence: &Evidence| {
        let is_together = |v: &Violation| {
            matches!(
                v,
                Violation::Delivery(checks::Violation::InFlightTogether { .. })
            )
        };
        violations(evidence).iter().any(is_together)
    };
    assert!(together(&evidence));
    evidence.occurrences = vec![happened(Fault::Freeze(ms(50)), 310, 390)];
    assert!(
        together(&evidence),
        "a frozen relay must not continue when it wakes up"
    );
    evidence.occurrences = vec![happened(Fault::Kill(ms(50)), 310, 390)];
    assert!(!together(&evidence));
    evidence.occurrences[0].fault = Fault::SlotLost(Down::Running, Loss::Recreated);
    assert!(together(&evidence), "a single relay continues");
    evidence.occurrences[0].fault = Fault::Network(Side::Pubsub, Trouble::Stalled, ms(50));
    assert!(!together(&evidence));
    evidence.attempts[3].peer = evidence.attempts[2].peer;
    assert!(together(&evidence), "both over one connection");
    let mut woken = sent_by_a_woken_relay(391);
    woken.attempts[2].ended = Some(ms(400));
    assert!(!together(&woken), "it was in the buffers of a frozen relay");
    woken.occurrences.clear();
    assert!(together(&woken));
}
