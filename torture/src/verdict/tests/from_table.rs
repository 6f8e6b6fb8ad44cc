//! Tests of the judges for events that are read from their table.

use super::*;

/// Evidence of a schedule in which the relay read event e2 from its table. `plan` says whether the plan of the
/// schedule makes the relay read from tables, and in which way.
fn from_table(plan: FromTable) -> Evidence {
    let mut evidence = evidence();
    evidence.from_table = plan;
    evidence.records[1].commit_lsn = 2_015;
    for sample in &mut evidence.samples[1..] {
        sample.records_below -= 1;
    }
    evidence
}

#[test]
fn an_event_may_be_read_from_its_table_only_if_the_plan_disturbs_the_stream() {
    assert_eq!(
        texts(&from_table(FromTable::Never)),
        [
            "dispatch row of event e2: it was read from its table, although the stream has delivered \
          everything"
        ]
    );
    let verdict = judge(&from_table(FromTable::InOrder));
    assert!(verdict.is_clean(), "{:?}", verdict.violations);
    assert_eq!(verdict.from_table, 1);
}

#[test]
fn an_event_may_be_read_from_its_table_after_a_first_start_that_did_not_end() {
    let mut evidence = from_table(FromTable::Never);
    let line = "WARN recovering: an earlier recovery (first-start) has not finished; every row ...";
    evidence.log.lines.push(line.to_owned());
    let verdict = judge(&evidence);
    assert!(verdict.is_clean(), "{:?}", verdict.violations);
}

#[test]
fn an_event_may_be_recorded_twice_from_its_table_only_with_two_relays() {
    let mut evidence = from_table(FromTable::InOrder);
    let again = Record {
        ordinal: 2,
        ..evidence.records[1].clone()
    };
    evidence.records.push(again);
    assert_eq!(
        texts(&evidence),
        ["dispatch row of event e2: it is not the only one"]
    );
    evidence.relays = 2;
    assert_eq!(texts(&evidence), [""; 0]);
}

#[test]
fn events_from_before_a_gap_come_from_the_table_only_with_a_new_slot() {
    let mut evidence = from_table(FromTable::Late);
    evidence.gaps = vec![(2_029, 2_029)];
    assert_eq!(texts(&evidence), [""; 0]);
    evidence.gaps = vec![(2_030, 2_030)];
    assert_eq!(
        texts(&evidence),
        ["dispatch row of event e2: it was read from its table, and was committed before any gap"]
    );
    evidence.log.recovers = vec![ms(150)];
    assert_eq!(texts(&evidence), [""; 0]);
}

/// Judges e1, e2 and e3 with these message ids, which give the order in which the events were
/// stored. e2 was read from its table.
fn stored_in_order(plan: FromTable, order: [u64; 3]) -> Vec<Violation> {
    let mut evidence = from_table(plan);
    evidence.samples.clear();
    for (index, id) in (0..).zip(order) {
        let (record, attempt) = (&mut evidence.records, &mut evidence.attempts);
        record[index].message_id = Some(id);
        attempt[index].first_message_id = Some(id);
    }
    violations(&evidence)
}

#[test]
fn an_omitted_event_may_come_late_but_not_early() {
    assert_eq!(stored_in_order(FromTable::Late, [0, 2, 1]), []);
    assert!(matches!(
        &stored_in_order(FromTable::Late, [1, 0, 2])[..],
        [Violation::Delivery(checks::Violation::OutOfOrder { event_id, after, .. })]
            if event_id == "e1" && after == "e2"
    ));
    assert!(
        !stored_in_order(FromTable::Late, [2, 1, 0]).is_empty(),
        "e3 before e1"
    );
    // If the relay notices that the slot was lost, it must publish the rows from the table and from
    // the stream in order.
    assert!(!stored_in_order(FromTable::InOrder, [0, 2, 1]).is_empty());
}

#[test]
fn events_that_come_late_are_in_order_among_themselves() {
    let late = |ids: [u64; 3]| {
        let mut evidence = from_table(FromTable::Late);
        evidence.samples.clear();
        evidence.records[2].commit_lsn = 2_023;
        for (index, id) in (0..).zip(ids) {
            evidence.records[index].message_id = Some(id);
            evidence.attempts[index].first_message_id = Some(id);
        }
        judge(&evidence)
    };
    assert!(late([0, 1, 2]).is_clean());
    assert!(late([0, 2, 1]).swapped() > 0);
}

#[test]
fn omitted_rows_of_an_open_transaction_may_come_with_the_next_session() {
    // Pub/Sub stores e1, then e3, then e2.
    let mut evidence = evidence();
    evidence.from_table = FromTable::Late;
    for (index, (id, at)) in [(0, 100), (2, 400), (1, 300)].into_iter().enumerate() {
        evidence.records[index].message_id = Some(id);
        evidence.attempts[index].first_message_id = Some(id);
        evidence.attempts[index].received = ms(at);
    }
    evidence.samples.clear();
    evidence.recorded_at.clear();
    evidence.begun_after = [("t2".to_owned(), 1_900)].into();
    evidence.gaps = vec![(1_850, 1_950)];
    assert_eq!(judge(&evidence).swapped(), 2, "in one session");
    evidence.log.lives = vec![Life {
        pid: 1,
        born: ms(10),
        died: None,
        streams: vec![ms(20), ms(350)],
        sessions: vec![ms(20), ms(350)],
        ..Life::default()
    }];
    assert!(judge(&evidence).is_clean());
    evidence.gaps = vec![(1_850, 1_899)];
    assert_eq!(
        judge(&evidence).swapped(),
        2,
        "its transaction began after the gap"
    );
    evidence.gaps = vec![(2_030, 2_040)];
    assert_eq!(
        judge(&evidence).swapped(),
        2,
        "its transaction ended before the gap"
    );
}

/// The first session streams e3 but not e2, and ends before e3 is recorded. The next session streams neither.
#[test]
fn an_event_streamed_once_and_then_omitted_may_be_repeated_after_earlier_rows() {
    let mut evidence = evidence();
    evidence.from_table = FromTable::Late;
    evidence.samples.clear();
    evidence.recorded_at.clear();
    for (index, (id, at)) in [(0, 100), (2, 400), (1, 200)].into_iter().enumerate() {
        evidence.attempts[index].first_message_id = Some(id);
        evidence.attempts[index].received = ms(at);
        evidence.records[index].message_id = Some(id);
    }
    evidence.attempts.push(attempt(3, 410, "e3"));
    evidence.records[2].message_id = Some(3);
    for (index, ordinal) in [(1, 1), (2, 2)] {
        evidence.records[index].commit_lsn = 3_503;
        evidence.records[index].ordinal = ordinal;
    }
    evidence.begun_after = [("t3".to_owned(), 1_900)].into();
    evidence.gaps = vec![(1_850, 1_950)];
    assert!(judge(&evidence).swapped() > 0, "in one session");
    evidence.log.lives = vec![Life {
        pid: 1,
        born: ms(10),
        died: None,
        streams: vec![ms(20), ms(350)],
        sessions: vec![ms(20), ms(350)],
        ..Life::default()
    }];
    assert_eq!(judge(&evidence).swapped(), 0, "{:?}", violations(&evidence));
}

/// The relay recovers, and publishes e2 and e3 from the table. Pub/Sub stores them without an answer, so the relay sends
/// them again before it streams.
#[test]
fn a_retry_of_a_recovery_is_not_a_repeat_by_the_next_session() {
    let mut evidence = evidence();
    evidence.from_table = FromTable::Late;
    evidence.samples.clear();
    evidence.recorded_at.clear();
    for (index, at) in [(1, 200), (2, 210)] {
        evidence.attempts[index].first_message_id = Some(index as u64);
        evidence.attempts[index].received = ms(at);
        evidence.records[index].commit_lsn = 3_503;
        evidence.records[index].ordinal = index as i32;
        evidence.records[index].message_id = Some(index as u64 + 2);
    }
    evidence.attempts.push(attempt(3, 400, "e2"));
    evidence.attempts.push(attempt(4, 410, "e3"));
    // Only the transaction of e2 was open while the publication was altered.
    evidence.begun_after = [("t2".to_owned(), 1_900), ("t3".to_owned(), 1_990)].into();
    evidence.gaps = vec![(1_850, 1_950)];
    evidence.log.lives = vec![Life {
        pid: 1,
        born: ms(10),
        streams: vec![ms(20), ms(420)],
        sessions: vec![ms(20), ms(150)],
        ..Life::default()
    }];
    let orders = |evidence: &Evidence| judge(evidence).swapped();
    assert_eq!(orders(&evidence), 0, "{:?}", violations(&evidence));
    evidence.log.lives[0].sessions.push(ms(420));
    assert!(orders(&evidence) > 0, "a new session began in between");
}
