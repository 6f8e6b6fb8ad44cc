//! Tests that the judges find the cause of each duplicate.

use super::*;

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
    // The kill happens too late to explain this duplicate.
    assert_eq!(cause(Answer::MessageIds, vec![kill(401, 500)]), None);
    let mut late = repeated(Answer::MessageIds, vec![kill(10, 20)]);
    for attempt in &mut late.attempts[2..] {
        attempt.received += Duration::from_secs(2);
    }
    assert!(late.occurrences[0].to < late.attempts[2].received);
    assert!(judge(&late).duplicates.is_empty(), "the kill is too early");
}

#[test]
fn a_later_connection_from_the_same_port_does_not_keep_the_first_one_alive() {
    let kill = happened(Fault::Kill(ms(10)), 310, 390);
    let mut evidence = repeated(Answer::MessageIds, vec![kill]);
    evidence.attempts.push(Attempt {
        event_ids: [].into(),
        first_message_id: None,
        ..attempt(4, 2_000, "")
    });
    assert!(judge(&evidence).duplicates.is_empty(), "the sender lives");
    evidence.attempts[4].connected = Some(ms(1_900));
    assert!(!judge(&evidence).duplicates.is_empty());
}

#[test]
fn a_fault_that_ends_connections_explains_no_duplicate_over_surviving_ones() {
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
        // The emulator reads the first copy after the fault. The fault explains the duplicate only if the
        // connection of this copy was opened before the fault ended.
        evidence.attempts[2].peer = peer(5);
        (evidence.attempts[2].received, evidence.attempts[3].received) = (ms(391), ms(392));
        assert!(!is_explained(&evidence), "opened after the fault");
        evidence.attempts[2].connected = Some(ms(389));
        assert!(is_explained(&evidence), "read late");
        evidence.attempts = older;
        evidence.relays = 2;
        assert!(is_explained(&evidence), "by a relay that had served before");
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
    // The standby was killed, and the other relay, which loses its slot, continues for a moment.
    let dropped = happened(Fault::SlotLost(Down::Killed, Loss::Dropped), 280, 290);
    let mut evidence = repeated(Answer::MessageIds, vec![dropped]);
    evidence.attempts[2].peer = peer(3);
    let causes = |evidence: &Evidence| Vec::from_iter(judge(evidence).duplicates.into_keys());
    assert_eq!(causes(&evidence), [], "there is no other relay");
    evidence.relays = 2;
    assert_eq!(causes(&evidence), [Cause::TakenOver]);
}

#[test]
fn a_slot_found_free_explains_a_duplicate_only_if_a_fault_ended_the_session() {
    let terminated = happened(Fault::TerminateWalsender, 310, 320);
    let mut evidence = repeated(Answer::MessageIds, vec![terminated]);
    let causes = |evidence: &Evidence| Vec::from_iter(judge(evidence).duplicates.into_keys());
    evidence.log.given_up = vec![ms(290)];
    assert_eq!(causes(&evidence), [], "before the first copy");
    evidence.log.given_up = vec![ms(330)];
    assert_eq!(causes(&evidence), [Cause::GivenUp]);
    evidence.occurrences[0].fault = Fault::TerminateSql;
    assert_eq!(causes(&evidence), [], "nothing ended the walsender");
    let dropped = Fault::Gap(Down::Stopped, Unpublished::PublicationDropped, ms(5));
    evidence.occurrences = vec![happened(dropped, 335, 340)];
    assert_eq!(
        causes(&evidence),
        [],
        "the fault came after the session ended"
    );
    evidence.occurrences[0].from = ms(0);
    evidence.occurrences[0].to = ms(5);
    assert_eq!(causes(&evidence), [Cause::GivenUp]);
    for attempt in &mut evidence.attempts[2..] {
        attempt.received += Duration::from_secs(2);
    }
    evidence.log.given_up = vec![ms(2_330)];
    assert_eq!(
        causes(&evidence),
        [Cause::GivenUp],
        "the walsender got there late"
    );
}

#[test]
fn a_recreated_slot_explains_a_duplicate_only_if_the_relay_noticed_its_owner() {
    let recreated = Fault::SlotLost(Down::Running, Loss::Recreated);
    let mut evidence = repeated(Answer::MessageIds, vec![happened(recreated, 280, 320)]);
    let causes = |evidence: &Evidence| Vec::from_iter(judge(evidence).duplicates.into_keys());
    assert_eq!(causes(&evidence), []);
    for too_early_or_late in [279, 401] {
        evidence.log.succeeded = vec![ms(too_early_or_late)];
        assert_eq!(causes(&evidence), [], "{too_early_or_late}");
    }
    evidence.log.succeeded = vec![ms(290)];
    assert_eq!(causes(&evidence), [Cause::Succeeded]);
    evidence.occurrences[0].fault = Fault::TerminateSql;
    assert_eq!(causes(&evidence), [], "nothing ended the walsender");
}

#[test]
fn each_cause_of_a_duplicate_is_recognised() {
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
