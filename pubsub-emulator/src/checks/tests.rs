//! Tests of the checks. For each kind of violation there is a journal with one error, in which the check
//! must find the violation. The journals of a correct publisher under random faults must be clean.

mod random;

use proptest::collection::vec;
use proptest::prelude::*;
use tonic::Code;

use super::*;

const TOPIC: &str = "projects/p/topics/orders";

/// Builds journals. Attempts start 10 ms apart and last 1 ms each.
#[derive(Default)]
struct Script {
    attempts: Vec<Attempt>,
    next_message_id: u64,
}

impl Script {
    fn attempt(mut self, key: &str, events: &[&str], stored: bool, answer: Answer) -> Self {
        let sequence = self.attempts.len() as u64;
        let received = Duration::from_millis(10 * sequence);
        self.attempts.push(Attempt {
            sequence,
            peer: None,
            connected: None,
            topic: TOPIC.into(),
            ordering_key: key.into(),
            other_keys: Vec::new(),
            event_ids: events.iter().map(|event| Some((*event).into())).collect(),
            received,
            stored: stored.then_some(received),
            ended: Some(received + Duration::from_millis(1)),
            first_message_id: stored.then_some(self.next_message_id),
            answer,
        });
        self.next_message_id += events.len() as u64;
        self
    }

    fn ok(self, key: &str, events: &[&str]) -> Self {
        self.attempt(key, events, true, Answer::MessageIds)
    }

    fn check(&self, key: &str, events: &[&str]) -> Report {
        check(&self.attempts, &expected(key, events))
    }
}

fn expected(key: &str, events: &[&str]) -> Expected {
    let events = events.iter().map(|event| (*event).to_owned()).collect();
    [(Stream::new(TOPIC, key), events)].into()
}

fn stream(key: &str) -> Stream {
    Stream::new(TOPIC, key)
}

#[test]
fn a_journal_in_order_is_clean() {
    let report = Script::default()
        .ok("k", &["1", "2"])
        .ok("k", &["3"])
        .check("k", &["1", "2", "3"]);
    assert!(report.is_clean(), "{report}");
    assert_eq!(
        (
            report.expected_events,
            report.stored_messages,
            report.attempts
        ),
        (3, 3, 2)
    );
}

#[test]
fn an_event_that_was_never_stored_is_missing() {
    let refused = Answer::Error(Code::Unavailable);
    let report = Script::default()
        .ok("k", &["1"])
        .attempt("k", &["2"], false, refused)
        .check("k", &["1", "2"]);
    let missing = Violation::Missing {
        stream: stream("k"),
        event_id: "2".to_owned(),
    };
    assert_eq!(report.violations, [missing]);
}

#[test]
fn a_stream_without_any_attempt_is_missing() {
    let report = Script::default().check("k", &["1"]);
    let missing = Violation::Missing {
        stream: stream("k"),
        event_id: "1".to_owned(),
    };
    assert_eq!(report.violations, [missing]);
}

#[test]
fn an_event_in_the_wrong_stream_is_unexpected_there() {
    let report = Script::default().ok("other", &["1"]).check("k", &["1"]);
    let unexpected = Violation::Unexpected {
        stream: stream("other"),
        event_id: "1".to_owned(),
        sequence: 0,
    };
    assert!(report.violations.contains(&unexpected), "{report}");
}

#[test]
fn a_message_without_an_event_id_is_unnamed() {
    let mut script = Script::default().ok("k", &["1"]);
    script.attempts[0].event_ids = [Some("1".into()), None].into();
    let report = script.check("k", &["1"]);
    assert_eq!(
        report.violations,
        [Violation::Unnamed {
            sequence: 0,
            index: 1
        }]
    );
}

#[test]
fn swapped_first_copies_are_out_of_order() {
    let report = Script::default()
        .ok("k", &["2"])
        .ok("k", &["1"])
        .check("k", &["1", "2"]);
    let out_of_order = Violation::OutOfOrder {
        stream: stream("k"),
        event_id: "1".to_owned(),
        after: "2".to_owned(),
        sequence: 1,
    };
    assert!(report.violations.contains(&out_of_order), "{report}");
}

#[test]
fn order_is_judged_by_message_ids_and_not_by_arrival() {
    let mut script = Script::default().ok("k", &["1"]).ok("k", &["2"]);
    script.attempts[0].first_message_id = Some(9);
    let report = script.check("k", &["1", "2"]);
    assert!(!report.is_clean());
}

#[test]
fn a_repeat_that_leaves_out_events_is_reported_as_skipped() {
    let report = Script::default()
        .ok("k", &["1", "2", "3", "4"])
        .ok("k", &["1", "4"])
        .check("k", &["1", "2", "3", "4"]);
    let skipped = Violation::Skipped {
        stream: stream("k"),
        event_id: "4".to_owned(),
        after: "1".to_owned(),
        sequence: 1,
    };
    assert_eq!(report.violations, [skipped]);
}

#[test]
fn a_repeat_that_goes_back_and_continues_is_allowed() {
    let report = Script::default()
        .ok("k", &["1", "2", "3"])
        .ok("k", &["2", "3", "4"])
        .ok("k", &["1", "2"])
        .ok("k", &["3", "4", "5"])
        .check("k", &["1", "2", "3", "4", "5"]);
    assert!(report.is_clean(), "{report}");
    assert_eq!(report.unexplained_duplicates(), 6);
}

#[test]
fn messages_without_ordering_key_have_no_order() {
    let report = Script::default()
        .ok("", &["3", "1"])
        .ok("", &["2"])
        .check("", &["1", "2", "3"]);
    assert!(report.is_clean(), "{report}");
    let report = Script::default()
        .ok("", &["3", "1"])
        .check("", &["1", "2", "3"]);
    assert!(!report.is_clean());
}

#[test]
fn overlapping_requests_of_one_key_are_found_and_those_of_two_keys_are_not() {
    let mut script = Script::default()
        .ok("k", &["1"])
        .ok("other", &["x"])
        .ok("k", &["2"]);
    let mut expected = expected("k", &["1", "2"]);
    expected.insert(stream("other"), vec!["x".to_owned()]);
    script.attempts[0].ended = Some(Duration::from_millis(15));
    assert!(check(&script.attempts, &expected).is_clean());
    script.attempts[0].ended = Some(Duration::from_millis(21));
    let together = Violation::InFlightTogether {
        stream: stream("k"),
        first: 0,
        second: 2,
    };
    assert_eq!(
        check(&script.attempts, &expected).violations,
        std::slice::from_ref(&together)
    );
    script.attempts[0].ended = None;
    script.attempts[0].answer = Answer::Pending;
    assert_eq!(check(&script.attempts, &expected).violations, [together]);
}

#[test]
fn a_long_request_is_compared_with_every_later_one() {
    let mut script = Script::default()
        .ok("k", &["1"])
        .ok("k", &["2"])
        .ok("k", &["3"]);
    script.attempts[0].ended = Some(Duration::from_millis(25));
    let report = script.check("k", &["1", "2", "3"]);
    let together = |second| Violation::InFlightTogether {
        stream: stream("k"),
        first: 0,
        second,
    };
    assert_eq!(report.violations, [together(1), together(2)]);
}

#[test]
fn a_cancelled_request_may_overlap_the_next_one_but_only_briefly() {
    let mut script = Script::default()
        .attempt("k", &["1"], false, Answer::Never)
        .ok("k", &["1"]);
    script.attempts[0].ended = Some(Duration::from_millis(200));
    assert!(script.check("k", &["1"]).is_clean());
    script.attempts[0].ended = Some(Duration::from_millis(300));
    assert!(!script.check("k", &["1"]).is_clean());
}

#[test]
fn mixed_keys_are_found_even_if_refused() {
    let refused = Answer::Error(Code::FailedPrecondition);
    let mut script = Script::default().attempt("a", &["1", "2"], false, refused);
    script.attempts[0].other_keys = vec!["b".to_owned()];
    let report = check(&script.attempts, &Expected::new());
    let keys = vec!["a".to_owned(), "b".to_owned()];
    assert_eq!(
        report.violations,
        [Violation::MixedKeys { sequence: 0, keys }]
    );
}

#[test]
fn only_a_duplicate_after_a_failed_attempt_is_explained() {
    let report = Script::default()
        .attempt("k", &["1"], true, Answer::Error(Code::Unavailable))
        .attempt("k", &["1"], true, Answer::Never)
        .ok("k", &["1"])
        .ok("k", &["1"])
        .check("k", &["1"]);
    let reasons: Vec<_> = report
        .duplicates
        .iter()
        .map(|duplicate| duplicate.reason)
        .collect();
    assert_eq!(
        reasons,
        [
            Reason::NotAnswered,
            Reason::NotAnswered,
            Reason::Unexplained
        ]
    );
    assert!(report.is_clean());
}

#[test]
fn a_report_shows_its_totals_and_the_first_violations() {
    let report = Script::default()
        .ok("k", &["1"])
        .ok("k", &["1"])
        .check("k", &["1", "2"]);
    assert_eq!(
        report.to_string(),
        "2 events expected, 2 messages stored by 2 attempts: 1 violations, 1 duplicates (0 after \
         a missing answer, 1 unexplained)\n  \
         missing: event 2 of projects/p/topics/orders key \"k\" was never stored\n"
    );
    let many: Vec<String> = (0..30).map(|n| n.to_string()).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let text = Script::default().check("k", &many).to_string();
    assert!(text.ends_with("… and 10 more\n"), "{text}");
}
