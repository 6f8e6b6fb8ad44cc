//! Every judge must be able to fail: evidence that is right in all, then wrong in one way.

use std::time::Duration;

use pubsub_emulator::{Action, Answer, Code};

use super::super::fault::{Fault, Outage, Side, Trouble};
use super::super::log::Life;
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
            at: ms(100 * n + 20),
            confirmed: 1_000 * n + 10,
            records_below: n,
        });
    }
    evidence
}

/// A request of one event that took 2 ms; its message id is its sequence number.
fn attempt(sequence: u64, received_ms: u64, event_id: &str) -> Attempt {
    Attempt {
        sequence,
        peer: None,
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

#[test]
fn an_event_that_is_set_aside_without_a_reason_is_a_violation() {
    let mut evidence = evidence();
    evidence.attempts.pop();
    evidence.records[2].state = "quarantined".to_owned();
    evidence.records[2].message_id = None;
    let expected = Violation::Record {
        event_id: "e3".to_owned(),
        what: "it is quarantined, and no fault of the plan refuses it".to_owned(),
    };
    assert_eq!(violations(&evidence), [expected]);
}

/// Evidence with a second copy of e3 at 400 ms, and what happened.
fn repeated(answer: Answer, occurrences: Vec<Occurrence>) -> Evidence {
    let mut evidence = evidence();
    evidence.attempts[2].answer = answer;
    evidence.attempts.push(attempt(3, 400, "e3"));
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
fn a_clean_stop_and_a_terminated_session_explain_no_duplicate() {
    for gentle in [
        Fault::Stop(ms(10)),
        Fault::TerminateWalsender,
        Fault::TerminateSql,
        Fault::LockDispatch(ms(10)),
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
    let terminated = vec![happened(Fault::TerminateWalsender, 310, 320)];
    let mut evidence = repeated(Answer::MessageIds, terminated);
    evidence.relays = 2;
    let found = judge(&evidence).duplicates;
    assert_eq!(found.keys().collect::<Vec<_>>(), [&Cause::TakenOver]);
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

/// e3 was sent at 300, 400 and 500 ms, with the relay killed after the first time; its record was
/// seen at `recorded_ms` and names the message of attempt `by`.
fn sent_again(recorded_ms: u64, by: u64) -> Vec<Violation> {
    let kill = happened(Fault::Kill(ms(10)), 310, 350);
    let mut evidence = repeated(Answer::MessageIds, vec![kill]);
    let life = |pid, born, died, streams| Life {
        pid,
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
