//! Tests that the judges report a relay that sends an event although it must know that the event is recorded.

use super::*;

/// Judges a relay that is killed after it sent e3 at 300 ms, and its successor, which sends e3 at
/// 400 and 500 ms. The watch saw the dispatch row of e3 at `recorded_ms`, and the row names the
/// message of attempt `by`. Returns the violations of the rule that a recorded event is not sent
/// again.
fn sent_again(recorded_ms: u64, by: u64) -> Vec<Violation> {
    let kill = happened(Fault::Kill(ms(10)), 310, 350);
    let mut evidence = repeated(Answer::MessageIds, vec![kill]);
    let life = |pid, born, died, streams| Life {
        pid,
        born: ms(born),
        died,
        streams: vec![ms(streams)],
        ..Life::default()
    };
    evidence.log.lives = vec![life(1, 10, Some(ms(310)), 20), life(2, 350, None, 390)];
    evidence
        .recorded_at
        .insert("e3".to_owned(), ms(recorded_ms));
    evidence.records[2].message_id = Some(by);
    evidence.attempts.push(attempt(4, 500, "e3"));
    let is_meant = |violation: &Violation| matches!(violation, Violation::SentAfterRecorded { .. });
    violations(&evidence).into_iter().filter(is_meant).collect()
}

fn after_recorded(attempt: u64) -> Violation {
    Violation::SentAfterRecorded {
        event_id: "e3".to_owned(),
        attempt,
    }
}

#[test]
fn an_event_recorded_before_a_relay_started_may_not_be_sent_by_it() {
    assert_eq!(sent_again(349, 2), [after_recorded(3), after_recorded(4)]);
    // The judges find no error here, because the killed relay's connection may have recorded e3 after the
    // new relay read the dispatch rows.
    assert_eq!(sent_again(351, 2), []);
}

#[test]
fn an_event_that_a_relay_has_recorded_may_not_be_sent_by_it_again() {
    assert_eq!(sent_again(450, 3), [after_recorded(4)]);
    assert_eq!(sent_again(501, 3), []);
}

#[test]
fn a_frozen_relay_may_send_recorded_events_only_from_its_buffers() {
    let complaints = |mut evidence: Evidence| {
        evidence.log.lives = vec![Life {
            pid: 2,
            born: ms(50),
            died: None,
            streams: vec![ms(315)],
            ..Life::default()
        }];
        evidence.recorded_at.insert("e3".to_owned(), ms(340));
        evidence.records[2].message_id = Some(2);
        let is_meant = |v: &Violation| matches!(v, Violation::SentAfterRecorded { event_id, .. } if event_id == "e3");
        violations(&evidence).into_iter().filter(is_meant).count()
    };
    assert_eq!(complaints(sent_by_a_woken_relay(391)), 0);
    assert_eq!(complaints(sent_by_a_woken_relay(1_500)), 1, "long awake");
    let first_is_read = |at_ms| {
        let mut late = sent_by_a_woken_relay(991);
        late.attempts[0].received = ms(at_ms);
        late.attempts[0].ordering_key = "another".into();
        late.occurrences = vec![happened(Fault::Freeze(ms(680)), 310, 990)];
        complaints(late)
    };
    assert_eq!(first_is_read(340), 0, "sent before the freeze");
    assert_eq!(
        first_is_read(990),
        1,
        "its connection was opened after the freeze"
    );
    let mut unordered = sent_by_a_woken_relay(391);
    unordered.attempts.push(Attempt {
        peer: unordered.attempts[3].peer,
        ..attempt(4, 390, "e2")
    });
    for attempt in &mut unordered.attempts {
        attempt.ordering_key = "".into();
    }
    assert_eq!(complaints(unordered), 0, "another lane");
    let mut goes_on = sent_by_a_woken_relay(391);
    goes_on.attempts.push(Attempt {
        peer: goes_on.attempts[3].peer,
        ..attempt(4, 395, "e3")
    });
    assert_eq!(complaints(goes_on), 1, "the second request");
    let mut unfrozen = sent_by_a_woken_relay(391);
    unfrozen.occurrences.clear();
    assert_eq!(complaints(unfrozen), 1);
}
