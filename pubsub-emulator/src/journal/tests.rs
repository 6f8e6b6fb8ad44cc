use prost::Message;
use tonic::Code;

use super::*;
use crate::proto::PubsubMessage;

fn message(key: &str, attribute: &str, id: &str) -> Vec<u8> {
    PubsubMessage {
        ordering_key: key.to_owned(),
        attributes: [(attribute.to_owned(), id.to_owned())].into(),
        ..Default::default()
    }
    .encode_to_vec()
}

fn enter(journal: &Journal, messages: &[Vec<u8>]) -> Entry {
    let views: Vec<_> = messages
        .iter()
        .map(|bytes| MessageView::parse(bytes).expect("valid"))
        .collect();
    journal.enter(None, "projects/p/topics/abc", &views)
}

#[test]
fn an_attempt_is_kept_with_its_request_and_its_outcome() {
    let journal = Journal::new(Recording::Attempts);
    let mut entry = enter(
        &journal,
        &[message("k", "event_id", "e1"), message("k", "ce-id", "e2")],
    );
    assert_eq!(journal.attempts()[0].answer, Answer::Pending);
    entry.stored(7);
    entry.answered(Answer::MessageIds);

    let attempt = journal.attempts().remove(0);
    assert_eq!(&*attempt.ordering_key, "k");
    assert_eq!(&*attempt.event_ids, &[Some("e1".into()), Some("e2".into())]);
    assert_eq!(attempt.first_message_id, Some(7));
    assert!(attempt.received <= attempt.stored.expect("stored") && attempt.stored <= attempt.ended);
    assert!(attempt.ended <= Some(journal.now()));
    assert_eq!(attempt.answer, Answer::MessageIds);
    assert!(attempt.ended >= Some(attempt.received));
    let counts = journal.counts();
    assert_eq!((counts.stored_messages, counts.answered_messages), (2, 2));
}

#[test]
fn an_entry_that_is_dropped_was_never_answered() {
    let journal = Journal::new(Recording::Attempts);
    drop(enter(&journal, &[message("k", "event_id", "e1")]));
    assert_eq!(journal.attempts()[0].answer, Answer::Never);
    assert_eq!(journal.counts().withheld_answers, 1);
}

#[test]
fn other_keys_of_a_mixed_request_are_kept() {
    let journal = Journal::new(Recording::Attempts);
    enter(&journal, &[message("a", "x", ""), message("b", "x", "")])
        .answered(Answer::Error(Code::FailedPrecondition));
    let attempt = journal.attempts().remove(0);
    assert_eq!(
        (&*attempt.ordering_key, attempt.other_keys),
        ("a", vec!["b".to_owned()])
    );
}

#[test]
fn a_journal_that_only_counts_keeps_totals_and_no_attempts() {
    let journal = Journal::new(Recording::Counts);
    let mut entry = enter(&journal, &[message("k", "event_id", "e1")]);
    entry.stored(1);
    entry.answered(Answer::MessageIds);
    assert_eq!(journal.attempts(), []);
    assert_eq!(journal.counts().answered_messages, 1);
}

#[test]
fn an_answer_after_a_clear_changes_no_later_attempt() {
    let journal = Journal::new(Recording::Attempts);
    let before = enter(&journal, &[message("k", "event_id", "e1")]);
    journal.clear();
    let after = enter(&journal, &[message("k", "event_id", "e2")]);
    before.answered(Answer::MessageIds);
    let attempts = journal.attempts();
    assert_eq!((attempts.len(), attempts[0].sequence), (1, 1));
    assert_eq!(attempts[0].answer, Answer::Pending);
    drop(after);
}
