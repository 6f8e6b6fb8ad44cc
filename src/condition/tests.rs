//! Tests [`judge`]: which [`Condition`] it derives from which [`RelayFacts`].

use super::*;
use crate::error::Error;

fn ago(now: Instant, seconds: u64) -> Instant {
    now.checked_sub(Duration::from_secs(seconds)).unwrap()
}

fn trouble(code: Code, since: Instant) -> Trouble {
    Trouble::of(&Error::new(code, "it failed"), since)
}

fn topic(name: &str, since: Instant) -> FailingTopic {
    FailingTopic {
        topic: format!("projects/p/topics/{name}").into(),
        trouble: trouble(Code::TopicMissing, since),
        failures: 7,
        waiting_events: 5,
        oldest_commit: Some(1_000_000),
        keys: vec![WaitingKey {
            ordering_key: "k".repeat(500).into(),
            waiting_events: 3,
            oldest_commit: 1_000_000,
        }],
    }
}

/// A relay that has streamed for an hour, without any trouble.
fn streaming(now: Instant) -> RelayFacts {
    RelayFacts {
        phase: (Phase::Streaming, ago(now, 3_600)),
        topics: Vec::new(),
        recording: None,
        publication: None,
        stream: None,
        auditing: None,
        opening: None,
        lag_bytes: Some(100),
        oldest: Some(Duration::ZERO),
        caught_up_in: None,
        server_micros: 21_000_000,
    }
}

fn now() -> Instant {
    // Far enough from the clock's origin that the tests can go back in time.
    Instant::now() + Duration::from_secs(86_400)
}

#[test]
fn each_set_of_relay_facts_gives_the_expected_state() {
    use State::*;
    let now = now();
    let change = |change: &dyn Fn(&mut RelayFacts)| {
        let mut facts = streaming(now);
        change(&mut facts);
        judge(&facts, now).state
    };
    let broken = |code| Phase::Broken(trouble(code, ago(now, 5)));
    type Case<'a> = (State, &'a dyn Fn(&mut RelayFacts));
    let cases: [Case<'_>; 21] = [
        (Streaming, &|_| {}),
        (Starting, &|facts| facts.phase.0 = Phase::Connecting),
        (Standby, &|facts| facts.phase.0 = Phase::Standby("x".into())),
        (Recovering, &|facts| facts.phase.0 = Phase::Recovering),
        (Down, &|facts| {
            facts.phase.0 = Phase::HeldByStranger(trouble(Code::SlotHeld, ago(now, 5)))
        }),
        (BlockedOnDatabase, &|facts| {
            facts.phase.0 = Phase::Connecting;
            facts.opening = Some(trouble(Code::LockWait, ago(now, 5)));
        }),
        (BlockedOnDatabase, &|facts| {
            facts.phase.0 = Phase::Recovering;
            facts.opening = Some(trouble(Code::SlotBusy, ago(now, 5)));
        }),
        (Broken, &|facts| {
            facts.phase.0 = broken(Code::PublicationMissing)
        }),
        (Broken, &|facts| facts.phase.0 = broken(Code::Internal)),
        (BlockedOnDatabase, &|facts| {
            facts.phase.0 = broken(Code::PostgresUnreachable)
        }),
        (BlockedOnDatabase, &|facts| {
            facts.phase.0 = broken(Code::WalSendersUsedUp)
        }),
        (CatchingUp, &|facts| facts.oldest = Some(BEHIND_AFTER)),
        (CatchingUp, &|facts| facts.lag_bytes = Some(BEHIND_BYTES)),
        (Streaming, &|facts| {
            facts.topics = vec![topic("a", ago(now, 1))]
        }),
        (BlockedOnPubsub, &|facts| {
            facts.topics = vec![topic("a", ago(now, 20))]
        }),
        (BlockedOnPubsub, &|facts| {
            facts.phase.0 = Phase::Recovering;
            facts.topics = vec![topic("a", ago(now, 20))];
        }),
        (Standby, &|facts| {
            facts.phase.0 = Phase::Standby("x".into());
            facts.topics = vec![topic("a", ago(now, 20))];
        }),
        (BlockedOnDatabase, &|facts| {
            facts.recording = Some(trouble(Code::PostgresConnectionLost, ago(now, 9)));
            facts.topics = vec![topic("a", ago(now, 20))];
        }),
        (Streaming, &|facts| {
            facts.recording = Some(trouble(Code::PostgresConnectionLost, ago(now, 1)));
        }),
        (BlockedOnDatabase, &|facts| {
            facts.stream = Some(trouble(Code::StandbySlotsStalled, ago(now, 1)));
            facts.oldest = Some(BEHIND_AFTER);
        }),
        (Broken, &|facts| {
            facts.publication = Some(trouble(Code::PublicationDrift, ago(now, 5)))
        }),
    ];
    for (i, (expected, case)) in cases.into_iter().enumerate() {
        assert_eq!(change(case), expected, "case {i}");
    }
}

#[test]
fn a_blocked_relay_names_its_topics_and_becomes_urgent() {
    let now = now();
    let mut facts = streaming(now);
    facts.topics = (0..30)
        .map(|i| topic(&format!("t{i:02}"), ago(now, 20 + i)))
        .collect();
    let condition = judge(&facts, now);
    assert_eq!(
        (condition.failing_topics, condition.topics.len()),
        (30, TOPICS_NAMED)
    );
    assert_eq!(
        condition.for_seconds, 49.0,
        "since the first topic began to fail"
    );
    assert_eq!(condition.code.as_deref(), Some("topic-missing"));
    assert_eq!(condition.severity(), Severity::Warning);
    let first = &condition.topics[0];
    assert_eq!(
        (first.short_name(), first.oldest_seconds),
        ("t00", Some(20.0))
    );
    let later = judge(&facts, now + URGENT_AFTER);
    assert_eq!(later.severity(), Severity::Error);
    assert!(later.is_like(&condition) && later.is_held_up());
    facts.topics.pop();
    assert!(!judge(&facts, now).is_like(&condition));
}

#[test]
fn a_publication_that_cannot_be_checked_does_not_stop_the_relay() {
    use State::*;
    let now = now();
    for (code, phase, oldest, expected) in [
        (Code::PostgresAuthentication, Phase::Streaming, 0, Streaming),
        (Code::RoleConnectionLimit, Phase::Streaming, 0, Streaming),
        (Code::PrivilegeMissing, Phase::Streaming, 10, CatchingUp),
        (
            Code::PostgresAuthentication,
            Phase::Recovering,
            0,
            Recovering,
        ),
        (
            Code::PostgresConnectionLost,
            Phase::Streaming,
            0,
            BlockedOnDatabase,
        ),
        (
            Code::PostgresTimeout,
            Phase::Recovering,
            0,
            BlockedOnDatabase,
        ),
        (Code::PublicationMissing, Phase::Streaming, 0, Broken),
    ] {
        let mut facts = streaming(now);
        facts.phase.0 = phase;
        facts.oldest = Some(Duration::from_secs(oldest));
        facts.publication = Some(trouble(code, ago(now, 5)));
        assert_eq!(judge(&facts, now).state, expected, "{code:?}");
    }
}

#[test]
fn a_delivering_relay_that_cannot_check_its_publication_warns_and_stays_ready() {
    let now = now();
    let mut facts = streaming(now);
    facts.publication = Some(trouble(Code::PostgresAuthentication, ago(now, 12)));
    let condition = judge(&facts, now);
    assert_eq!(condition.code.as_deref(), Some("postgres-authentication"));
    assert_eq!(condition.for_seconds, 12.0);
    assert_eq!(condition.severity(), Severity::Warning);
    assert!(condition.is_written() && !condition.is_held_up() && condition.is_ready(None));
}

#[test]
fn a_relay_whose_audits_fail_is_a_warning_and_a_possible_gap_comes_first() {
    let now = now();
    let mut facts = streaming(now);
    let mut audit = AuditTrouble {
        trouble: trouble(Code::PrivilegeMissing, ago(now, 12)),
        has_gap: false,
    };
    facts.auditing = Some(audit.clone());
    let condition = judge(&facts, now);
    assert_eq!(condition.code.as_deref(), Some("privilege-missing"));
    assert_eq!(condition.unchecked, Some(Unchecked::Tables));
    assert_eq!(condition.severity(), Severity::Warning);
    assert!(condition.is_written() && !condition.is_held_up() && condition.is_ready(None));
    facts.publication = Some(trouble(Code::PostgresAuthentication, ago(now, 12)));
    assert_eq!(judge(&facts, now).unchecked, Some(Unchecked::Publication));
    audit.has_gap = true;
    facts.auditing = Some(audit);
    let condition = judge(&facts, now);
    assert_eq!(condition.unchecked, Some(Unchecked::Gap));
    assert_eq!(condition.code.as_deref(), Some("privilege-missing"));
    facts.phase.0 = Phase::Recovering;
    assert_eq!(judge(&facts, now).severity(), Severity::Warning);
}

#[test]
fn a_possible_gap_is_named_while_a_topic_fails_and_does_not_lower_the_severity() {
    let now = now();
    let mut facts = streaming(now);
    facts.topics = vec![topic("a", ago(now, 90))];
    let mut audit = AuditTrouble {
        trouble: trouble(Code::PublicationGap, ago(now, 12)),
        has_gap: true,
    };
    facts.auditing = Some(audit.clone());
    let condition = judge(&facts, now);
    assert_eq!(condition.unchecked, Some(Unchecked::Gap));
    assert_eq!(condition.code.as_deref(), Some("topic-missing"));
    assert_eq!(condition.severity(), Severity::Error);
    audit.trouble.since = ago(now, 1);
    facts.auditing = Some(audit);
    assert_eq!(
        judge(&facts, now).unchecked,
        None,
        "an audit usually follows at once"
    );
}

#[test]
fn the_estimate_is_shown_only_while_the_relay_catches_up() {
    let now = now();
    let mut facts = streaming(now);
    facts.caught_up_in = Some(Duration::from_secs(90));
    assert_eq!(judge(&facts, now).caught_up_in_seconds, None);
    facts.oldest = Some(Duration::from_secs(600));
    assert_eq!(judge(&facts, now).caught_up_in_seconds, Some(90.0));
}

#[test]
fn a_condition_is_read_back_from_its_json() {
    let now = now();
    let mut facts = streaming(now);
    facts.topics = vec![topic("a", ago(now, 20))];
    let condition = judge(&facts, now);
    let json = serde_json::to_string(&condition).unwrap();
    assert_eq!(serde_json::from_str::<Condition>(&json).unwrap(), condition);
}
