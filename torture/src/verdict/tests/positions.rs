//! Tests of the judges of confirmed positions.

use super::*;

#[test]
fn confirming_an_unstored_event_is_found_by_the_position_that_its_writer_saw() {
    let mut evidence = evidence();
    evidence.records.clear();
    // One byte before the position at which the second transaction had ended, according to its
    // writer. So this sample proves nothing about e2.
    evidence.samples[0].confirmed = 2_029;
    let early = |evidence: &Evidence| {
        let is_early = |v: &Violation| matches!(v, Violation::ConfirmedBeforeStored { .. });
        violations(evidence).into_iter().filter(is_early).count()
    };
    assert_eq!(early(&evidence), 0);
    evidence.samples[0].confirmed = 2_030;
    assert_eq!(early(&evidence), 1);
}

#[test]
fn confirming_an_unstored_event_is_found_by_its_dispatch_row() {
    let mut evidence = evidence();
    // The writer got no answer to its COMMIT, so only the dispatch row contains the position.
    evidence.committed_by.clear();
    evidence.samples[0].confirmed = 2_010;
    let found = violations(&evidence);
    assert!(
        found.iter().any(|violation| matches!(
            violation,
            Violation::ConfirmedBeforeStored { event_id, .. } if event_id == "e2"
        )),
        "{found:?}"
    );
}

#[test]
fn confirming_events_without_a_dispatch_row_is_found() {
    let mut evidence = evidence();
    evidence.samples[1].records_below = 1;
    let expected = Violation::ConfirmedBeforeRecorded {
        unrecorded: 1,
        sample: evidence.samples[1],
    };
    assert_eq!(violations(&evidence), [expected]);
}

#[test]
fn the_position_of_a_lost_slot_is_ignored_until_a_relay_takes_it_again() {
    let mut evidence = evidence();
    evidence.samples[1].records_below = 1;
    let lost = Fault::SlotLost(Down::Killed, Loss::Recreated);
    evidence.occurrences = vec![happened(lost, 150, 200)];
    assert_eq!(texts(&evidence), [""; 0]);
    evidence.log.lives = vec![Life {
        pid: 1,
        born: ms(160),
        died: None,
        streams: vec![ms(210)],
        ..Life::default()
    }];
    assert_eq!(violations(&evidence).len(), 1);
}
