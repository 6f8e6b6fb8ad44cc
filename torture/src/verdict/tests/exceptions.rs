//! Tests of the judges with `dispatch = exceptions`.

use super::*;

/// Evidence of a relay with `dispatch = exceptions`, which records no published events.
fn without_records() -> Evidence {
    let mut evidence = evidence();
    evidence.exceptions = true;
    evidence.records.clear();
    evidence.recorded_at.clear();
    for sample in &mut evidence.samples {
        sample.records_below = 0;
    }
    evidence
}

#[test]
fn without_records_only_exceptions_have_a_row() {
    assert_eq!(texts(&without_records()), [""; 0]);
    let mut evidence = without_records();
    evidence.records = self::evidence().records[..1].to_vec();
    evidence.samples.clear();
    assert_eq!(
        texts(&evidence),
        ["dispatch row of event e1: it was never set aside, and should have none"]
    );
}

#[test]
fn without_records_only_the_end_of_a_session_explains_repeats() {
    let repeated = |fault| {
        let mut evidence = without_records();
        evidence.attempts.push(attempt(3, 400, "e3"));
        evidence.occurrences = vec![happened(fault, 350, 360)];
        judge(&evidence)
    };
    for ends in [Fault::TerminateWalsender, Fault::Stop(ms(10))] {
        let ended = repeated(ends);
        assert!(ended.is_clean(), "{:?}", ended.violations);
        assert_eq!(ended.duplicates.get(&Cause::SessionEnded), Some(&1));
    }
    assert!(!repeated(Fault::LockDispatch(ms(10))).is_clean());
    let mut evidence = without_records();
    evidence.attempts.push(attempt(3, 400, "e3"));
    assert!(!judge(&evidence).is_clean());
    evidence.log.recovers = vec![ms(350)];
    assert_eq!(judge(&evidence).duplicates.get(&Cause::Recovered), Some(&1));
}

#[test]
fn without_records_a_repeat_is_complete() {
    let mut evidence = without_records();
    evidence.occurrences = vec![happened(Fault::Kill(ms(10)), 350, 360)];
    for (sequence, id) in [(3, "e1"), (4, "e2"), (5, "e3")] {
        evidence.attempts.push(Attempt {
            peer: peer(2),
            ..attempt(sequence, 100 * sequence + 100, id)
        });
    }
    assert_eq!(texts(&evidence), [""; 0]);
    evidence.attempts.remove(4);
    assert!(judge(&evidence).swapped() > 0, "the repeat omits e2");
    // e2 is already stored. After a recovery the repeat may omit e2 if the transaction of e2 began before the
    // transaction of e1 ended.
    evidence.log.recovers = vec![ms(390)];
    evidence.begun_after = [("t2".to_owned(), 1_029)].into();
    assert_eq!(texts(&evidence), [""; 0]);
    evidence.begun_after = [("t2".to_owned(), 1_030)].into();
    assert!(
        judge(&evidence).swapped() > 0,
        "its transaction began later"
    );
    evidence.begun_after = [("t2".to_owned(), 1_029)].into();
    evidence.log.recovers = vec![ms(601)];
    assert!(judge(&evidence).swapped() > 0, "there was no recovery");
    evidence.log.recovers = vec![ms(390)];
    evidence.attempts.remove(1);
    assert!(!judge(&evidence).is_clean(), "e2 was never stored");
}

#[test]
fn without_records_only_events_that_ended_after_a_gap_may_be_overtaken() {
    let overtaken = |gap| {
        let mut evidence = without_records();
        evidence.from_table = FromTable::Late;
        evidence.gaps = vec![(gap, gap)];
        evidence.samples.clear();
        for (index, id) in (0..).zip([0, 2, 1]) {
            evidence.attempts[index].first_message_id = Some(id);
        }
        judge(&evidence).swapped()
    };
    assert_eq!(overtaken(1_500), 0);
    assert!(overtaken(2_030) > 0);
}

#[test]
fn without_records_the_position_is_ignored_only_during_a_recovery() {
    let mut evidence = without_records();
    // The confirmed position is past e2 and e3, although only e1 is stored.
    evidence.samples.push(Sample {
        at: ms(180),
        confirmed: 3_040,
        records_below: 0,
    });
    assert_eq!(violations(&evidence).len(), 2);
    evidence.log.recovers = vec![ms(170)];
    evidence.log.lives = vec![Life {
        pid: 1,
        born: ms(10),
        died: None,
        streams: vec![ms(20), ms(190)],
        ..Life::default()
    }];
    assert_eq!(texts(&evidence), [""; 0]);
    evidence.samples[3].at = ms(195);
    assert_eq!(violations(&evidence).len(), 2);
}
