//! Tests the state that follows from each health of the slot and each condition of the relay.

use slot_manager::health::{Headroom, Lag};

use super::*;
use crate::condition::TopicCondition;

fn said(state: State, code: Option<&str>) -> Condition {
    Condition {
        state,
        for_seconds: 20.0,
        code: code.map(str::to_owned),
        what: code.map(|_| "it failed".to_owned()),
        hint: code.map(|_| "mend it".to_owned()),
        unchecked: code.and_then(|_| (state == State::Streaming).then_some(Unchecked::Publication)),
        caught_up_in_seconds: (state == State::CatchingUp).then_some(42.0),
        oldest_seconds: None,
        topics: Vec::new(),
        failing_topics: 0,
    }
}

fn blocked() -> Condition {
    Condition {
        topics: vec![TopicCondition {
            topic: "projects/p/topics/a".to_owned(),
            code: "topic-missing".to_owned(),
            error: "topic a is missing".to_owned(),
            hint: "create the topic".to_owned(),
            for_seconds: 20.0,
            failures: 3,
            waiting_events: 5,
            oldest_seconds: None,
            keys: Vec::new(),
        }],
        failing_topics: 1,
        ..said(State::BlockedOnPubsub, Some("topic-missing"))
    }
}

fn lag(severity: Severity) -> Lag {
    Lag {
        bytes: 0,
        time: None,
        severity,
    }
}

fn room(left: i64, is_read: bool) -> Headroom {
    Headroom {
        bytes: Some(left),
        kept: Some(100),
        is_read,
        lag: Severity::Ok,
    }
}

fn judged(verdict: &Verdict) -> (State, Severity) {
    (verdict.state, verdict.severity)
}

fn decided(health: &Health, condition: Option<&Condition>) -> Verdict {
    decide(StateFacts {
        health: Some(health),
        condition,
        ..StateFacts::default()
    })
}

#[test]
fn a_relay_that_reads_its_slot_shows_its_own_state() {
    for state in [
        State::Streaming,
        State::CatchingUp,
        State::Recovering,
        State::BlockedOnPubsub,
        State::BlockedOnDatabase,
        State::Broken,
    ] {
        let condition = said(state, state_code(state));
        for health in [Health::Active, Health::Lagging(lag(Severity::Warning))] {
            assert_eq!(decided(&health, Some(&condition)).state, state);
        }
    }
    for state in [State::Starting, State::Standby, State::Broken] {
        let condition = said(state, state_code(state));
        let verdict = decide(StateFacts {
            condition: Some(&condition),
            ..StateFacts::default()
        });
        assert_eq!(verdict.state, state);
    }
}

fn state_code(state: State) -> Option<&'static str> {
    match state {
        State::BlockedOnPubsub => Some("topic-missing"),
        State::BlockedOnDatabase => Some("disk-full"),
        State::Broken => Some("publication-missing"),
        _ => None,
    }
}

#[test]
fn without_a_reported_condition_the_state_follows_from_the_other_facts() {
    let seen = |seen: StateFacts<'_>| judged(&decide(seen));
    let active = StateFacts {
        health: Some(&Health::Active),
        ..StateFacts::default()
    };
    assert_eq!(seen(active), (State::Streaming, Severity::Ok));
    let recovering = StateFacts {
        is_recovering: true,
        ..active
    };
    assert_eq!(seen(recovering), (State::Recovering, Severity::Info));
    for behind in [
        StateFacts {
            oldest: Some(Duration::from_secs(10)),
            ..active
        },
        StateFacts {
            lag_bytes: Some(64 << 20),
            ..active
        },
    ] {
        assert_eq!(seen(behind), (State::CatchingUp, Severity::Info));
    }
    let drifted = StateFacts {
        publication: Some(("a table is left out", "add it")),
        ..active
    };
    assert_eq!(decide(drifted).remedy.as_deref(), Some("add it"));
    assert_eq!(seen(drifted), (State::Broken, Severity::Error));
}

#[test]
fn every_verdict_on_a_relay_that_catches_up_has_the_estimate() {
    let condition = said(State::CatchingUp, None);
    let full = Health::Extended(room(20, true));
    for health in [
        &Health::Active,
        &Health::Lagging(lag(Severity::Error)),
        &full,
    ] {
        let verdict = decided(health, Some(&condition));
        assert_eq!(verdict.caught_up_in, Some(Duration::from_secs(42)));
    }
    let down = decided(&Health::Inactive(lag(Severity::Ok)), Some(&condition));
    assert_eq!((down.state, down.caught_up_in), (State::Down, None));
}

#[test]
fn a_relay_that_is_held_up_is_not_called_streaming() {
    let verdict = decided(&Health::Active, Some(&blocked()));
    assert_eq!(
        judged(&verdict),
        (State::BlockedOnPubsub, Severity::Warning)
    );
    assert!(verdict.meaning.contains("topic a"), "{}", verdict.meaning);
    assert_eq!(verdict.remedy.as_deref(), Some("mend it"));
    let late = decided(&Health::Lagging(lag(Severity::Error)), Some(&blocked()));
    assert_eq!(late.severity, Severity::Error);
}

#[test]
fn a_stopped_relay_that_was_blocked_on_pubsub_or_catching_up_is_down() {
    for severity in [Severity::Ok, Severity::Error] {
        let left = Health::Inactive(lag(severity));
        for condition in [blocked(), said(State::CatchingUp, None)] {
            let verdict = decided(&left, Some(&condition));
            assert_eq!(verdict.state, State::Down);
            assert_eq!(verdict.severity, severity.max(Severity::Warning));
        }
        let away = said(State::BlockedOnDatabase, Some("disk-full"));
        assert_eq!(
            decided(&left, Some(&away)).state,
            State::BlockedOnDatabase,
            "a relay without a session may still run"
        );
    }
}

#[test]
fn a_slot_in_danger_comes_before_a_relay_that_is_held_up_by_pubsub() {
    for (health, state) in [
        (Health::Lost, State::Lost),
        (Health::Missing, State::Missing),
        (Health::Unreserved(room(-5, true)), State::Unreserved),
    ] {
        assert_eq!(decided(&health, Some(&blocked())).state, state);
    }
}

#[test]
fn a_slot_that_is_nearly_full_raises_the_severity_of_every_state() {
    for (left, severity) in [(20, Severity::Warning), (5, Severity::Error)] {
        for is_read in [true, false] {
            for health in [
                Health::Reserved(room(left, is_read)),
                Health::Extended(room(left, is_read)),
            ] {
                let quiet = decided(&health, None);
                assert_eq!(judged(&quiet), (State::NearlyFull, severity));
                assert_eq!(quiet.meaning.contains("no relay reads it"), !is_read);
                let held_up = said(State::BlockedOnDatabase, Some("disk-full"));
                let verdict = decided(&health, Some(&held_up));
                assert_eq!(verdict.state, State::BlockedOnDatabase);
                assert!(verdict.severity >= severity);
                assert!(verdict.meaning.contains("max_slot_wal_keep_size"));
            }
        }
    }
}

#[test]
fn a_relay_that_recovers_or_reports_why_it_cannot_comes_before_its_slot() {
    let recovering = said(State::Recovering, None);
    assert_eq!(
        decided(&Health::Lost, Some(&recovering)).state,
        State::Recovering
    );
    let refused = said(State::Broken, Some("publication-missing"));
    assert_eq!(
        decided(&Health::Missing, Some(&refused)).state,
        State::Broken
    );
    let stopped = said(State::Broken, Some("slot-lost"));
    assert_eq!(decided(&Health::Lost, Some(&stopped)).state, State::Lost);
}

#[test]
fn events_in_quarantine_are_at_least_a_warning() {
    let verdict = decide(StateFacts {
        health: Some(&Health::Active),
        has_quarantine: true,
        ..StateFacts::default()
    });
    assert_eq!(judged(&verdict), (State::Streaming, Severity::Warning));
    assert!(verdict.meaning.contains("except those in quarantine"));
    let behind = said(State::CatchingUp, None);
    let verdict = decide(StateFacts {
        health: Some(&Health::Active),
        condition: Some(&behind),
        has_quarantine: true,
        ..StateFacts::default()
    });
    assert_eq!(verdict.state, State::CatchingUp);
    assert!(
        verdict
            .meaning
            .ends_with("behind; and events are in quarantine"),
        "{}",
        verdict.meaning
    );
}

#[test]
fn the_public_condition_has_the_shown_state_and_no_message_of_the_database() {
    let away = said(State::BlockedOnDatabase, Some("disk-full"));
    let verdict = decided(&Health::Active, Some(&away));
    let public = verdict.public(away);
    assert_eq!(public.state, State::BlockedOnDatabase);
    assert_eq!(
        public.what.as_deref(),
        Some("PostgreSQL has no room on its disk.")
    );
    assert!(public.hint.is_some_and(|hint| hint != "mend it"));
    let streaming = said(State::Streaming, None);
    let verdict = decided(&Health::Unreserved(room(-5, true)), Some(&streaming));
    let public = verdict.public(streaming);
    assert_eq!(public.state, State::Unreserved);
    assert!(public.hint.is_some());
    let shown = decided(&Health::Active, Some(&blocked())).public(blocked());
    assert_eq!(shown.what.as_deref(), Some("it failed"));
}

#[test]
fn a_relay_that_does_not_answer_is_down_whatever_it_said_before() {
    let holder = slot_manager::Holder {
        pid: 42,
        application_name: Some("postrider a/1:2".to_owned()),
        client_addr: None,
        user: None,
        since: None,
        silent: Some(Duration::from_secs(20)),
    };
    let silent = Health::HeldBySilentRelay {
        lag: lag(Severity::Ok),
        holder: Box::new(holder),
        silent: Duration::from_secs(20),
    };
    for condition in [blocked(), said(State::CatchingUp, None)] {
        let verdict = decided(&silent, Some(&condition));
        assert_eq!(judged(&verdict), (State::Down, Severity::Warning));
        assert!(verdict.meaning.contains("has not answered for 20 s"));
    }
}

#[test]
fn a_missing_row_of_the_relay_is_a_warning_and_not_called_a_recreated_slot() {
    let streaming = decide(StateFacts {
        health: Some(&Health::Active),
        lacks_row: true,
        ..StateFacts::default()
    });
    assert_eq!(judged(&streaming), (State::Streaming, Severity::Warning));
    let (recorded, found) = (1.into(), 2.into());
    let left = decide(StateFacts {
        health: Some(&Health::Recreated { recorded, found }),
        lacks_row: true,
        ..StateFacts::default()
    });
    assert_eq!(judged(&left), (State::Recreated, Severity::Error));
    for verdict in [streaming, left] {
        assert!(verdict.meaning.contains("has no row for this slot"));
        assert!(verdict.remedy.unwrap().contains("it writes the row"));
    }
}

/// While a relay opens its session, `outbox.relay` may still have the last report of the previous relay, for example
/// that it was catching up, or that Pub/Sub blocked it. Such a report no longer counts.
#[test]
fn a_relay_that_opens_its_session_is_starting() {
    let opening = |condition| {
        decide(StateFacts {
            health: Some(&Health::Active),
            condition,
            is_opening: true,
            oldest: Some(Duration::from_secs(100)),
            ..StateFacts::default()
        })
    };
    let (late, blocked) = (said(State::CatchingUp, None), blocked());
    for condition in [None, Some(&late), Some(&blocked)] {
        assert_eq!(opening(condition).state, State::Starting);
    }
    let waits = said(State::BlockedOnDatabase, Some("lock-wait"));
    assert_eq!(opening(Some(&waits)).state, State::BlockedOnDatabase);
}

#[test]
fn without_a_stream_the_relays_condition_counts_only_while_it_is_fresh() {
    let seconds = Duration::from_secs;
    for (health, gone) in [
        (Health::Inactive(lag(Severity::Warning)), State::Down),
        (Health::Missing, State::Missing),
    ] {
        for (state, limit) in [
            (State::Recovering, 15),
            (State::BlockedOnDatabase, 15),
            (State::Broken, 75),
        ] {
            let condition = said(state, state_code(state));
            let after = |age| {
                let facts = StateFacts {
                    health: Some(&health),
                    condition: Some(&condition),
                    condition_age: age,
                    is_recovering: true,
                    ..StateFacts::default()
                };
                decide(facts).state
            };
            assert_eq!(after(seconds(limit - 1)), state, "{health:?}");
            if limit == 15 {
                assert_eq!(after(seconds(limit)), gone, "{health:?}");
            }
        }
    }
}

#[test]
fn a_relay_that_cannot_check_its_publication_says_so_in_every_state_of_its_slot() {
    let condition = said(State::Streaming, Some("postgres-authentication"));
    for (health, state) in [
        (Health::Active, State::Streaming),
        (Health::Reserved(room(20, true)), State::NearlyFull),
    ] {
        let verdict = decided(&health, Some(&condition));
        assert_eq!(judged(&verdict), (state, Severity::Warning));
        let says = "for 20 s the relay could not check its publication and its slot \
                    (postgres-authentication): it failed";
        assert!(verdict.meaning.contains(says), "{verdict:?}");
        assert!(verdict.remedy.is_some());
    }
}
