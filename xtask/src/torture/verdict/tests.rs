//! Every judge must be able to fail: evidence that is right in all, then wrong in one way.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use pubsub_emulator::{Action, Answer, Code};

use super::super::fault::{Down, Fault, Loss, Outage, Side, Trouble, Unpublished};
use super::super::log::Life;
use super::super::plan::Release;
use super::*;

const TOPIC: &str = "projects/torture/topics/order.events";
const KEY: &str = "k";

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// Three transactions of one event each, published at 100, 200 and 300 ms, recorded 10 ms later
/// and confirmed 20 ms later. Transaction `n` commits at 1000 n and ends at 1000 n + 10.
fn evidence() -> Evidence {
    let mut evidence = Evidence {
        publish_timeout: Duration::from_secs(10),
        relays: 1,
        ..Evidence::default()
    };
    for n in 1..=3 {
        let id = format!("e{n}");
        evidence.events.push(Event {
            id: id.clone(),
            topic: TOPIC.to_owned(),
            key: KEY.to_owned(),
            version: n as i64,
            transaction: format!("t{n}"),
        });
        evidence
            .committed_by
            .insert(format!("t{n}"), 1_000 * n + 30);
        evidence.attempts.push(attempt(n - 1, 100 * n, &id));
        evidence.records.push(Record {
            event_id: id.clone(),
            commit_lsn: 1_000 * n,
            ordinal: 1,
            state: "published".to_owned(),
            topic: TOPIC.to_owned(),
            key: KEY.to_owned(),
            message_id: Some(n - 1),
        });
        evidence.recorded_at.insert(id, ms(100 * n + 15));
        evidence.samples.push(Sample {
            shard: 0,
            at: ms(100 * n + 20),
            confirmed: 1_000 * n + 10,
            records_below: n,
        });
    }
    evidence
}

/// A connection, by its port.
fn peer(port: u16) -> Option<SocketAddr> {
    Some(([127, 0, 0, 1], port).into())
}

/// A request of one event that took 2 ms; its message id is its sequence number.
fn attempt(sequence: u64, received_ms: u64, event_id: &str) -> Attempt {
    Attempt {
        sequence,
        peer: peer(1),
        topic: TOPIC.into(),
        ordering_key: KEY.into(),
        other_keys: Vec::new(),
        event_ids: [Some(event_id.into())].into(),
        received: ms(received_ms),
        stored: Some(ms(received_ms + 1)),
        ended: Some(ms(received_ms + 2)),
        first_message_id: Some(sequence),
        answer: Answer::MessageIds,
    }
}

fn happened(fault: Fault, from_ms: u64, to_ms: u64) -> Occurrence {
    Occurrence {
        from: ms(from_ms),
        to: ms(to_ms),
        fault,
    }
}

fn violations(evidence: &Evidence) -> Vec<Violation> {
    judge(evidence).violations
}

#[test]
fn a_schedule_that_went_well_is_clean() {
    let verdict = judge(&evidence());
    assert!(verdict.is_clean(), "{:?}", verdict.violations);
    assert_eq!((verdict.events, verdict.stored_messages), (3, 3));
    assert!(verdict.duplicates.is_empty());
}

#[test]
fn an_event_that_was_not_published_is_lost() {
    let mut evidence = evidence();
    evidence.attempts.pop();
    let verdict = judge(&evidence);
    assert_eq!((verdict.lost(), verdict.swapped()), (1, 0));
}

#[test]
fn an_event_of_a_transaction_that_was_rolled_back_is_not_expected() {
    let mut evidence = evidence();
    evidence.attempts.push(attempt(3, 400, "rolled back"));
    let found = violations(&evidence);
    assert!(
        matches!(
            &found[..],
            [Violation::Delivery(checks::Violation::Unexpected { event_id, .. })]
                if event_id == "rolled back"
        ),
        "{found:?}"
    );
}

#[test]
fn events_of_a_key_in_another_order_than_their_versions_are_swapped() {
    let mut evidence = evidence();
    for (attempt, id) in evidence.attempts.iter_mut().zip(["e2", "e1", "e3"]) {
        attempt.event_ids = [Some(id.into())].into();
    }
    assert!(judge(&evidence).swapped() >= 1);
}

#[test]
fn a_position_past_an_event_that_was_not_stored_by_then_is_found_by_what_the_writer_knows() {
    let mut evidence = evidence();
    evidence.records.clear();
    // Just short of what the writer knows of the second transaction: no proof.
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
fn a_position_past_an_event_that_was_not_stored_by_then_is_found_by_the_place_of_its_record() {
    let mut evidence = evidence();
    // What the commit was answered with is lost; only the dispatch row has the position.
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
fn a_position_past_events_without_a_dispatch_row_is_found() {
    let mut evidence = evidence();
    evidence.samples[1].records_below = 1;
    let expected = Violation::ConfirmedBeforeRecorded {
        unrecorded: 1,
        sample: evidence.samples[1],
    };
    assert_eq!(violations(&evidence), [expected]);
}

/// What is wrong with the dispatch rows after `change`.
fn complaints(change: impl FnOnce(&mut Vec<Record>)) -> Vec<String> {
    let mut evidence = evidence();
    // Positions are not the point here.
    evidence.samples.clear();
    change(&mut evidence.records);
    let what = |violation: Violation| match violation {
        Violation::Record { event_id, what } => format!("{event_id}: {what}"),
        other => format!("{other}"),
    };
    violations(&evidence).into_iter().map(what).collect()
}

#[test]
fn every_event_has_exactly_one_dispatch_row_that_tells_the_truth() {
    let found = complaints(|records| drop(records.pop()));
    assert_eq!(found, ["e3: there is none"]);
    let found = complaints(|records| {
        let mut second = records[2].clone();
        second.ordinal = 2;
        records.push(second);
    });
    assert!(
        found.contains(&"e3: it is not the only one".to_owned()),
        "{found:?}"
    );
    let found = complaints(|records| records[1].message_id = Some(0));
    assert_eq!(
        found,
        ["e2: Pub/Sub has no message of that id for this event"]
    );
    let found = complaints(|records| records[1].message_id = None);
    assert_eq!(
        found,
        ["e2: Pub/Sub has no message of that id for this event"]
    );
    let found = complaints(|records| records[1].key = "other".to_owned());
    assert_eq!(found, ["e2: it names another topic or ordering key"]);
    let found = complaints(|records| {
        records.push(Record {
            event_id: "ghost".to_owned(),
            commit_lsn: 9_000,
            ..records[0].clone()
        });
    });
    assert_eq!(found, ["ghost: the outbox has no such event"]);
}

#[test]
fn the_place_of_a_dispatch_row_follows_the_order_of_commits() {
    let found = complaints(|records| {
        records[1].commit_lsn = 1_000;
        records[1].ordinal = 0;
    });
    let [found] = &found[..] else {
        panic!("{found:?}")
    };
    assert!(found.starts_with("e1: by its place in the log it comes after event e2"));
    let found = complaints(|records| records[1].commit_lsn = 2_030);
    assert_eq!(
        found,
        ["e2: its place in the log is past the end of its transaction"]
    );
}

/// Evidence in which Pub/Sub refuses e2: it is set aside, with e3 or alone.
fn refused(whole_key: bool, release: Release) -> Evidence {
    let mut evidence = evidence();
    evidence.quarantine = Quarantine {
        refused: ["e2".to_owned()].into(),
        whole_key,
        release,
        set_aside: HashSet::new(),
    };
    set_aside(&mut evidence, 1);
    if whole_key {
        set_aside(&mut evidence, 2);
    }
    evidence
}

/// The event of this index was set aside, and recorded when it would have been published.
fn set_aside(evidence: &mut Evidence, index: usize) {
    let record = &mut evidence.records[index];
    record.state = "quarantined".to_owned();
    record.message_id = None;
    let id = record.event_id.clone();
    let others = |attempt: &Attempt| attempt.event_ids[0].as_deref() != Some(&*id);
    evidence.attempts.retain(others);
    evidence.quarantine.set_aside.insert(id);
}

/// It was published in the end, at this time.
fn publish(evidence: &mut Evidence, index: usize, sequence: u64, received_ms: u64) {
    let record = &mut evidence.records[index];
    record.state = "published".to_owned();
    record.message_id = Some(sequence);
    let copy = attempt(sequence, received_ms, &record.event_id);
    evidence.attempts.push(copy);
}

fn texts(evidence: &Evidence) -> Vec<String> {
    let found = violations(evidence).into_iter();
    found.map(|violation| violation.to_string()).collect()
}

#[test]
fn an_event_that_is_set_aside_without_a_reason_is_a_violation() {
    let mut evidence = evidence();
    set_aside(&mut evidence, 2);
    // And so it was confirmed without having been stored.
    assert!(matches!(
        violations(&evidence)[0],
        Violation::ConfirmedBeforeStored { .. }
    ));
    evidence.samples.clear();
    assert_eq!(
        texts(&evidence),
        ["dispatch row of event e3: it was set aside without a reason"]
    );
}

#[test]
fn what_is_refused_is_set_aside_with_all_that_is_behind_it_in_its_key_or_alone() {
    for whole_key in [true, false] {
        let clean = refused(whole_key, Release::Never);
        assert_eq!(texts(&clean), [""; 0]);
        let mut other = refused(whole_key, Release::Never);
        other.quarantine.whole_key = !whole_key;
        other.samples.clear();
        let found = texts(&other);
        let what = match whole_key {
            true => "it was set aside without a reason",
            false => "it was not set aside",
        };
        assert_eq!(found, [format!("dispatch row of event e3: {what}")]);
    }
    let mut published = refused(true, Release::Never);
    published.quarantine.set_aside.remove("e2");
    publish(&mut published, 1, 7, 400);
    assert!(texts(&published).contains(&"dispatch row of event e2: it was not set aside".into()));
    let mut discarded = refused(true, Release::Never);
    discarded.records[1].state = "discarded".to_owned();
    assert_eq!(
        texts(&discarded),
        ["dispatch row of event e2: it is discarded in the end"]
    );
}

#[test]
fn another_key_does_not_wait_behind_an_event_that_is_refused() {
    let mut evidence = refused(true, Release::Never);
    evidence.events[2].key = "other".to_owned();
    evidence.samples.clear();
    assert_eq!(
        texts(&evidence),
        ["dispatch row of event e3: it was set aside without a reason"]
    );
}

#[test]
fn what_is_released_is_published_whole_and_in_order() {
    let release = |order: [usize; 2]| {
        let mut evidence = refused(true, Release::AtTheEnd);
        for (at, index) in (0..).zip(order) {
            publish(&mut evidence, index, 7 + at, 400 + 10 * at);
        }
        judge(&evidence)
    };
    let verdict = release([1, 2]);
    assert!(verdict.is_clean(), "{:?}", verdict.violations);
    assert_eq!(verdict.set_aside, 2);
    assert!(release([2, 1]).swapped() > 0);
    let found = texts(&refused(true, Release::UnderWay));
    assert!(
        found
            .iter()
            .any(|text| text.contains("it is quarantined, though"))
    );
}

#[test]
fn an_event_that_is_released_alone_comes_late_and_never_before_what_is_earlier() {
    let mut late = refused(false, Release::AtTheEnd);
    publish(&mut late, 1, 7, 400);
    assert_eq!(texts(&late), [""; 0]);
    let mut early = refused(false, Release::AtTheEnd);
    publish(&mut early, 1, 7, 400);
    for attempt in &mut early.attempts {
        // e2, e1, e3.
        attempt.first_message_id = attempt.first_message_id.map(|id| (id + 1) % 8);
    }
    for record in &mut early.records {
        record.message_id = record.message_id.map(|id| (id + 1) % 8);
    }
    assert_eq!(judge(&early).swapped(), 1, "{:?}", texts(&early));
}

#[test]
fn a_released_event_has_a_record_before_it_is_sent_and_any_other_must_not() {
    let mut released = refused(true, Release::AtTheEnd);
    released.log.lives = vec![Life {
        pid: 1,
        seat: 0,
        born: ms(350),
        died: None,
        streams: vec![ms(360)],
    }];
    publish(&mut released, 1, 7, 400);
    publish(&mut released, 2, 8, 410);
    assert_eq!(texts(&released), [""; 0]);
    let mut sent = refused(true, Release::Never);
    sent.log.lives = released.log.lives;
    // It was refused again.
    let mut again = attempt(7, 400, "e2");
    (again.stored, again.first_message_id) = (None, None);
    again.answer = Answer::Error(Code::InvalidArgument);
    sent.attempts.push(again);
    let expected = Violation::SentAfterRecorded {
        event_id: "e2".to_owned(),
        attempt: 7,
    };
    assert_eq!(violations(&sent), [expected]);
}

/// Evidence in which e2 was read from its table; and what the plan says of that.
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
fn an_event_is_read_from_its_table_only_where_the_plan_takes_the_stream_away() {
    assert_eq!(
        texts(&from_table(FromTable::Never)),
        [
            "dispatch row of event e2: it was read from its table, though the stream has brought \
          everything"
        ]
    );
    let verdict = judge(&from_table(FromTable::InOrder));
    assert!(verdict.is_clean(), "{:?}", verdict.violations);
    assert_eq!(verdict.from_table, 1);
}

#[test]
fn an_event_is_recorded_again_from_its_table_only_where_two_relays_may_meet() {
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
fn what_was_committed_before_a_gap_does_not_come_from_the_table_unless_the_slot_is_new() {
    let mut evidence = from_table(FromTable::Late);
    evidence.gaps = vec![2_029];
    assert_eq!(texts(&evidence), [""; 0]);
    evidence.gaps = vec![2_030];
    assert_eq!(
        texts(&evidence),
        ["dispatch row of event e2: it was read from its table, and was committed before any gap"]
    );
    evidence.log.recovers = vec![ms(150)];
    assert_eq!(texts(&evidence), [""; 0]);
}

/// e1, e2 and e3 are stored in another order; e2 was read from its table.
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
fn an_event_that_was_left_out_may_come_late_but_not_early() {
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
    // A loss that is noticed keeps the order over the seam.
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
fn the_position_of_a_lost_slot_says_nothing_until_a_relay_has_it_again() {
    let mut evidence = evidence();
    evidence.samples[1].records_below = 1;
    let lost = Fault::SlotLost(Down::Killed, Loss::Recreated);
    evidence.occurrences = vec![happened(lost, 150, 200)];
    assert_eq!(texts(&evidence), [""; 0]);
    evidence.log.lives = vec![Life {
        pid: 1,
        seat: 0,
        born: ms(160),
        died: None,
        streams: vec![ms(210)],
    }];
    assert_eq!(violations(&evidence).len(), 1);
}

/// Evidence with a second copy of e3 at 400 ms, over another connection, and what happened.
fn repeated(answer: Answer, occurrences: Vec<Occurrence>) -> Evidence {
    let mut evidence = evidence();
    evidence.attempts[2].answer = answer;
    evidence.attempts.push(attempt(3, 400, "e3"));
    evidence.attempts[3].peer = peer(2);
    evidence.recorded_at.remove("e3");
    evidence.records[2].message_id = Some(3);
    evidence.samples.truncate(2);
    evidence.occurrences = occurrences;
    evidence
}

fn cause(answer: Answer, occurrences: Vec<Occurrence>) -> Option<Cause> {
    let verdict = judge(&repeated(answer, occurrences));
    let unexplained = |v: &Violation| matches!(v, Violation::UnexplainedDuplicate { .. });
    let cause = verdict.duplicates.keys().next().copied();
    assert_eq!(verdict.violations.iter().any(unexplained), cause.is_none());
    assert!(verdict.violations.len() <= 1, "{:?}", verdict.violations);
    cause
}

#[test]
fn a_duplicate_needs_a_fault_between_its_copies() {
    let kill = |from, to| happened(Fault::Kill(ms(10)), from, to);
    assert_eq!(cause(Answer::MessageIds, vec![]), None);
    assert_eq!(
        cause(Answer::MessageIds, vec![kill(310, 390)]),
        Some(Cause::Killed)
    );
    // Too late for this one.
    assert_eq!(cause(Answer::MessageIds, vec![kill(401, 500)]), None);
    let mut late = repeated(Answer::MessageIds, vec![kill(10, 20)]);
    for attempt in &mut late.attempts[2..] {
        attempt.received += Duration::from_secs(2);
    }
    assert!(late.occurrences[0].to < late.attempts[2].received);
    assert!(judge(&late).duplicates.is_empty(), "too early for this one");
}

#[test]
fn a_fault_that_ends_connections_explains_no_duplicate_of_those_that_go_on() {
    for fault in [Fault::Kill(ms(10)), Fault::CutPubsub] {
        let mut evidence = repeated(Answer::MessageIds, vec![happened(fault, 310, 390)]);
        let is_explained = |evidence: &Evidence| !judge(evidence).duplicates.is_empty();
        assert!(is_explained(&evidence));
        let mut same = evidence.attempts.clone();
        same[3].peer = same[2].peer;
        let mut older = evidence.attempts.clone();
        older[1].peer = peer(2);
        let mut lives = evidence.attempts.clone();
        lives.push(Attempt {
            event_ids: [].into(),
            first_message_id: None,
            ..attempt(4, 2_000, "")
        });
        for attempts in [same, older.clone(), lives] {
            evidence.attempts = attempts;
            assert!(!is_explained(&evidence), "{:?}", evidence.attempts);
        }
        evidence.attempts = older;
        evidence.relays = 2;
        assert!(is_explained(&evidence), "by one that had served before");
    }
}

#[test]
fn a_clean_stop_and_a_terminated_session_explain_no_duplicate() {
    for gentle in [
        Fault::Stop(ms(10)),
        Fault::TerminateWalsender,
        Fault::TerminateSql,
        Fault::LockDispatch(ms(10)),
        Fault::SlotLost(Down::Running, Loss::Dropped),
        Fault::SlotLost(Down::Stopped, Loss::Recreated),
        Fault::Gap(Down::Running, Unpublished::PublicationDropped, ms(10)),
        Fault::Release,
        Fault::Publish(Action::Fail(Code::Unavailable), 1),
        Fault::Network(Side::Postgres, Trouble::Delayed(ms(5)), ms(50)),
    ] {
        assert_eq!(
            cause(Answer::MessageIds, vec![happened(gentle, 310, 390)]),
            None
        );
    }
}

#[test]
fn a_terminated_session_explains_a_duplicate_where_another_relay_takes_over() {
    let dropped = Fault::SlotLost(Down::Running, Loss::Dropped);
    for fault in [Fault::TerminateWalsender, dropped] {
        let mut evidence = repeated(Answer::MessageIds, vec![happened(fault, 310, 320)]);
        evidence.relays = 2;
        let found = judge(&evidence).duplicates;
        assert_eq!(found.keys().collect::<Vec<_>>(), [&Cause::TakenOver]);
    }
}

#[test]
fn a_session_whose_end_shows_as_a_free_slot_explains_a_duplicate_only_when_something_ended_it() {
    let terminated = happened(Fault::TerminateWalsender, 310, 320);
    let mut evidence = repeated(Answer::MessageIds, vec![terminated]);
    let causes = |evidence: &Evidence| Vec::from_iter(judge(evidence).duplicates.into_keys());
    evidence.log.given_up = vec![ms(290)];
    assert_eq!(causes(&evidence), [], "before the first copy");
    evidence.log.given_up = vec![ms(330)];
    assert_eq!(causes(&evidence), [Cause::GivenUp]);
    evidence.occurrences[0].fault = Fault::TerminateSql;
    assert_eq!(causes(&evidence), [], "nothing ended the walsender");
}

#[test]
fn each_cause_of_a_duplicate_is_told_apart() {
    let error = Answer::Error(Code::Internal);
    assert_eq!(cause(error, vec![]), Some(Cause::StoredButFailed));
    assert_eq!(
        cause(Answer::FewerIds, vec![]),
        Some(Cause::StoredButFailed)
    );
    for (fault, expected) in [
        (Fault::Server(Outage::Kill9, ms(5)), Cause::ServerDown),
        (
            Fault::Network(Side::Postgres, Trouble::Reset, ms(5)),
            Cause::ServerDown,
        ),
        (Fault::SlotLost(Down::Killed, Loss::Dropped), Cause::Killed),
        (
            Fault::Gap(Down::Killed, Unpublished::TableOut, ms(5)),
            Cause::Killed,
        ),
        (
            Fault::SlotLost(Down::Running, Loss::Recreated),
            Cause::TakenOver,
        ),
        (Fault::Freeze(ms(5)), Cause::Frozen),
        (Fault::CutPubsub, Cause::Cut),
        (
            Fault::Network(Side::Pubsub, Trouble::Swallowed, ms(5)),
            Cause::Cut,
        ),
    ] {
        let found = cause(Answer::MessageIds, vec![happened(fault, 310, 390)]);
        assert_eq!(found, Some(expected));
    }
}

#[test]
fn an_answer_that_took_longer_than_the_publish_timeout_explains_a_duplicate() {
    let mut evidence = repeated(Answer::Never, vec![]);
    evidence.attempts[2].ended = Some(ms(390));
    assert!(judge(&evidence).duplicates.is_empty());
    evidence.publish_timeout = ms(95);
    let found = judge(&evidence).duplicates;
    assert_eq!(found.keys().collect::<Vec<_>>(), [&Cause::NoAnswer]);
}

#[test]
fn the_last_answers_of_a_connection_that_pubsub_closes_may_be_lost() {
    let causes = |evidence: &Evidence| Vec::from_iter(judge(evidence).duplicates.into_keys());
    let mut evidence = repeated(Answer::MessageIds, vec![]);
    for (n, attempt) in evidence.attempts.iter_mut().enumerate() {
        let port = if n < 3 { 1_000 } else { 2_000 };
        attempt.peer = peer(port);
    }
    assert_eq!(causes(&evidence), []);
    evidence.closes_connections = true;
    assert_eq!(causes(&evidence), [Cause::Closed]);
    evidence.attempts[3].peer = evidence.attempts[2].peer;
    assert_eq!(causes(&evidence), [], "by the same connection");
}

/// e3 was sent at 300, 400 and 500 ms, with the relay killed after the first time; its record was
/// seen at `recorded_ms` and names the message of attempt `by`.
fn sent_again(recorded_ms: u64, by: u64) -> Vec<Violation> {
    let kill = happened(Fault::Kill(ms(10)), 310, 350);
    let mut evidence = repeated(Answer::MessageIds, vec![kill]);
    let life = |pid, born, died, streams| Life {
        pid,
        seat: 0,
        born: ms(born),
        died,
        streams: vec![ms(streams)],
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
fn an_event_that_was_recorded_when_a_relay_started_may_not_be_sent_by_it() {
    assert_eq!(sent_again(349, 2), [after_recorded(3), after_recorded(4)]);
    // By the connection of the one that was killed, perhaps after the other had looked.
    assert_eq!(sent_again(351, 2), []);
}

#[test]
fn an_event_that_a_relay_has_recorded_itself_may_not_be_sent_by_it_again() {
    assert_eq!(sent_again(450, 3), [after_recorded(4)]);
    assert_eq!(sent_again(501, 3), []);
}

/// A relay (port 1) sends e1 and is frozen from 310 to 390 ms; another one (port 2) sends e2 and e3
/// meanwhile. Then comes e3 from the first, at `woken_ms`.
fn sent_by_a_woken_relay(woken_ms: u64) -> Evidence {
    let mut evidence = repeated(Answer::MessageIds, vec![]);
    evidence.attempts[3] = attempt(3, woken_ms, "e3");
    for (attempt, (port, at)) in
        (evidence.attempts.iter_mut()).zip([(1, 100), (2, 320), (2, 330), (1, woken_ms)])
    {
        attempt.peer = peer(port);
        attempt.received = ms(at);
        attempt.stored = Some(ms(at + 1));
        attempt.ended = Some(ms(at + 2));
    }
    evidence.occurrences = vec![happened(Fault::Freeze(ms(80)), 310, 390)];
    evidence
}

#[test]
fn what_lay_in_a_frozen_relay_may_be_recorded_when_it_wakes_and_nothing_that_it_sends_then() {
    let complaints = |mut evidence: Evidence| {
        evidence.log.lives = vec![Life {
            pid: 2,
            seat: 1,
            born: ms(50),
            died: None,
            streams: vec![ms(315)],
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
        "of a connection that was opened after it"
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
    assert_eq!(complaints(goes_on), 1, "the second one");
    let mut unfrozen = sent_by_a_woken_relay(391);
    unfrozen.occurrences.clear();
    assert_eq!(complaints(unfrozen), 1);
}

#[test]
fn a_repetition_that_ends_in_the_middle_is_a_violation_whatever_died() {
    // e1, e2, e3, then e1 again, then e3 again.
    let mut evidence = evidence();
    evidence.attempts.push(attempt(3, 400, "e1"));
    evidence.attempts.push(attempt(4, 500, "e3"));
    evidence.occurrences = vec![happened(Fault::Kill(ms(10)), 310, 350)];
    assert_eq!(judge(&evidence).swapped(), 1);
}

#[test]
fn a_request_of_a_dead_relay_that_is_stored_behind_its_successors_copies_is_no_step_back() {
    // The first relay (port 1) dies after e1; its successor sends the rest, and between e3 and e4 a
    // second copy of e1 comes from the dead one.
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
        "it lay in the buffers of a frozen one"
    );
    evidence.occurrences[0].fault = Fault::TerminateSql;
    assert_eq!(swapped(&evidence), 1, "the first lives");
    evidence.occurrences[0].fault = Fault::Kill(ms(10));
    evidence.attempts[4].peer = peer(2);
    assert_eq!(
        swapped(&evidence),
        1,
        "the successor itself goes back and skips"
    );
    evidence.attempts[4].peer = peer(1);
    evidence.occurrences.clear();
    assert_eq!(swapped(&evidence), 1, "nobody died");
}

#[test]
fn two_requests_of_a_key_together_are_excused_only_by_the_death_of_the_first_sender() {
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
        "a frozen relay must not wake up and go on"
    );
    evidence.occurrences = vec![happened(Fault::Kill(ms(50)), 310, 390)];
    assert!(!together(&evidence));
    evidence.occurrences[0].fault = Fault::SlotLost(Down::Running, Loss::Recreated);
    assert!(together(&evidence), "a relay alone goes on");
    evidence.occurrences[0].fault = Fault::Network(Side::Pubsub, Trouble::Stalled, ms(50));
    assert!(!together(&evidence));
    evidence.attempts[3].peer = evidence.attempts[2].peer;
    assert!(together(&evidence), "both by one connection");
    let mut woken = sent_by_a_woken_relay(391);
    woken.attempts[2].ended = Some(ms(400));
    assert!(!together(&woken), "it lay in the buffers of a frozen one");
    woken.occurrences.clear();
    assert!(together(&woken));
}

#[test]
fn a_panic_in_the_log_is_a_violation_and_so_is_whatever_the_schedule_met() {
    let mut evidence = evidence();
    evidence.log.lines = vec!["thread 'main' panicked at src/x.rs:1:1:".to_owned()];
    let mut verdict = judge(&evidence);
    assert_eq!(verdict.violations.len(), 1);
    verdict.add_misbehaviour(None);
    assert_eq!(verdict.violations.len(), 1);
    verdict.add_misbehaviour(Some("relay 7 ended by itself".to_owned()));
    assert_eq!(verdict.violations.len(), 2);
}

/// Evidence of a relay that records exceptions alone.
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
fn where_exceptions_are_recorded_no_other_event_has_a_row() {
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
fn without_records_the_end_of_a_session_repeats_and_nothing_else_does() {
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
fn without_records_a_repeat_is_whole() {
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
    assert!(judge(&evidence).swapped() > 0, "e2 is left out");
}

#[test]
fn without_records_only_what_ended_after_a_gap_may_be_overtaken() {
    let overtaken = |gap| {
        let mut evidence = without_records();
        evidence.from_table = FromTable::Late;
        evidence.gaps = vec![gap];
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
fn without_records_the_position_says_nothing_during_a_recovery_and_counts_again_after_it() {
    let mut evidence = without_records();
    // Past e2 and e3 while only e1 is stored.
    evidence.samples.push(Sample {
        shard: 0,
        at: ms(180),
        confirmed: 3_040,
        records_below: 0,
    });
    assert_eq!(violations(&evidence).len(), 2);
    evidence.log.recovers = vec![ms(170)];
    evidence.log.lives = vec![Life {
        pid: 1,
        seat: 0,
        born: ms(10),
        died: None,
        streams: vec![ms(20), ms(190)],
    }];
    assert_eq!(texts(&evidence), [""; 0]);
    evidence.samples[3].at = ms(195);
    assert_eq!(violations(&evidence).len(), 2);
}

/// e1 and e3 are of one shard, e2 of the other.
fn shared_out() -> Evidence {
    let mut evidence = evidence();
    evidence.shards = 2;
    for (record, ordinal) in evidence.records.iter_mut().zip([2, 3, 2]) {
        record.ordinal = ordinal;
    }
    evidence.samples.clear();
    evidence
}

#[test]
fn the_slot_of_a_shard_stands_for_its_events_alone() {
    let at = |shard, ms_at, confirmed, records_below| Sample {
        shard,
        at: ms(ms_at),
        confirmed,
        records_below,
    };
    let mut evidence = shared_out();
    // Past e2, which is the other's and not stored yet.
    evidence.samples.push(at(0, 150, 2_040, 1));
    assert_eq!(texts(&evidence), [""; 0]);
    evidence.samples[0] = at(1, 150, 2_040, 1);
    assert_eq!(violations(&evidence).len(), 1);
    evidence.samples[0] = at(0, 350, 3_040, 1);
    assert_eq!(violations(&evidence).len(), 1, "e3 has no record by then");
}

#[test]
fn what_a_shard_had_to_know_is_not_held_against_the_other() {
    let mut evidence = shared_out();
    let life = |seat, born, streams| Life {
        pid: 1 + seat as u32,
        seat,
        born: ms(born),
        died: None,
        streams: vec![ms(streams)],
    };
    // The relay of e3 was there when it was recorded; the other one came later.
    evidence.log.lives = vec![life(0, 10, 20), life(1, 380, 390)];
    evidence.recorded_at.insert("e3".to_owned(), ms(370));
    evidence.attempts.push(attempt(3, 400, "e3"));
    evidence.records[2].message_id = Some(99);
    let is_meant = |violation: &Violation| matches!(violation, Violation::SentAfterRecorded { .. });
    assert!(!violations(&evidence).iter().any(is_meant));
    evidence.log.lives[0].born = ms(375);
    assert!(violations(&evidence).iter().any(is_meant));
}
