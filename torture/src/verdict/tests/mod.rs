//! Every judge must be able to find errors: the tests take correct evidence and make one thing
//! wrong.

mod buckets;
mod duplicates;
mod exceptions;
mod from_table;
mod positions;
mod quarantine;
mod records;
mod senders;
mod stragglers;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use pubsub_emulator::{Action, Answer, Code};

use super::*;
use crate::fault::{Down, Fault, Loss, Outage, Side, Trouble, Unpublished};
use crate::log::Life;
use crate::plan::Release;

const TOPIC: &str = "projects/torture/topics/order.events";
const KEY: &str = "k";

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// Evidence without an error: the transactions t1, t2 and t3 with one event each (e1, e2 and e3). For transaction
/// `n`:
///
/// - At 100 n ms, Pub/Sub receives the event.
/// - At 100 n + 15 ms, the event certainly has a dispatch row.
/// - At 100 n + 20 ms, the slot has confirmed the event.
/// - The commit record begins at the WAL position 1000 n. The slot confirms the position 1000 n + 10. When the writer
///   asks for the WAL position after its COMMIT, the answer is 1000 n + 30.
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

/// A connection, identified by its port.
fn peer(port: u16) -> Option<SocketAddr> {
    Some(([127, 0, 0, 1], port).into())
}

/// A request with one event. It takes 2 ms, and its message id is its sequence number.
fn attempt(sequence: u64, received_ms: u64, event_id: &str) -> Attempt {
    Attempt {
        sequence,
        peer: peer(1),
        connected: None,
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
fn a_correct_schedule_has_no_violations() {
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
fn events_of_a_key_out_of_version_order_are_swapped() {
    let mut evidence = evidence();
    for (attempt, id) in evidence.attempts.iter_mut().zip(["e2", "e1", "e3"]) {
        attempt.event_ids = [Some(id.into())].into();
    }
    assert!(judge(&evidence).swapped() >= 1);
}

fn texts(evidence: &Evidence) -> Vec<String> {
    let found = violations(evidence).into_iter();
    found.map(|violation| violation.to_string()).collect()
}

/// Evidence in which e3 is stored a second time, at 400 ms and over another connection. `answer` is
/// the answer to the first copy of e3, and `occurrences` are the faults of the schedule.
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

/// A relay (port 1) sends e1 and is frozen from 310 to 390 ms, while another relay (port 2) sends
/// e2 and e3. Then the first relay sends e3, which arrives at `woken_ms`.
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
fn an_incomplete_repeat_is_a_violation_no_matter_what_died() {
    // The relay sends e1, e2, e3, then e1 again and e3 again, without e2.
    let mut evidence = evidence();
    evidence.attempts.push(attempt(3, 400, "e1"));
    evidence.attempts.push(attempt(4, 500, "e3"));
    evidence.occurrences = vec![happened(Fault::Kill(ms(10)), 310, 350)];
    assert_eq!(judge(&evidence).swapped(), 1);
}

#[test]
fn a_panic_in_the_log_and_misbehaviour_during_the_schedule_are_violations() {
    let mut evidence = evidence();
    evidence.log.lines = vec!["thread 'main' panicked at src/x.rs:1:1:".to_owned()];
    let mut verdict = judge(&evidence);
    assert_eq!(verdict.violations.len(), 1);
    verdict.add_misbehaviour(None);
    assert_eq!(verdict.violations.len(), 1);
    verdict.add_misbehaviour(Some("relay 7 ended on its own".to_owned()));
    assert_eq!(verdict.violations.len(), 2);
}
