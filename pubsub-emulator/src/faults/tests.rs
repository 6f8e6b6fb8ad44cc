use super::script::topic_matches;
use super::*;

const TOPIC: &str = "projects/p/topics/orders.events";

fn judge(faults: &Faults, ordering_key: &str) -> Verdict {
    judge_at(faults, ordering_key, 1, Instant::now())
}

fn judge_at(faults: &Faults, ordering_key: &str, messages: usize, now: Instant) -> Verdict {
    let has_event = |event_id: &str| event_id == "e1";
    faults.judge(
        &Request {
            topic: TOPIC,
            ordering_key,
            messages,
            has_event: &has_event,
        },
        now,
    )
}

#[test]
fn without_faults_every_publish_proceeds() {
    assert_eq!(judge(&Faults::default(), "k"), Verdict::Proceed);
}

#[test]
fn a_fault_ends_after_its_uses() {
    let faults = Faults::default();
    let id = faults.inject(Fault::new(Action::Fail(Code::Unavailable)).times(2));
    assert_eq!(judge(&faults, "k"), Verdict::Fail(Code::Unavailable));
    assert_eq!(faults.uses_left(id), Some(1));
    assert_eq!(judge(&faults, "k"), Verdict::Fail(Code::Unavailable));
    assert_eq!(judge(&faults, "k"), Verdict::Proceed);
    assert_eq!(faults.uses_left(id), Some(0));
}

#[test]
fn a_fault_without_a_limit_applies_until_it_is_lifted() {
    let faults = Faults::default();
    let id = faults.inject(Fault::new(Action::NeverAnswer));
    assert_eq!(judge(&faults, "k"), Verdict::NeverAnswer);
    assert_eq!(faults.uses_left(id), None);
    faults.lift(id);
    assert_eq!(judge(&faults, "k"), Verdict::Proceed);
}

#[test]
fn a_fault_meets_only_its_key_and_topic() {
    let faults = Faults::default();
    let delay = Duration::from_secs(1);
    faults.inject(
        Fault::new(Action::Delay(delay))
            .on_ordering_key("a")
            .on_topic("orders.*"),
    );
    faults.inject(Fault::new(Action::NeverAnswer).on_topic("other"));
    assert_eq!(judge(&faults, "a"), Verdict::Delay(delay));
    assert_eq!(judge(&faults, "b"), Verdict::Proceed);
}

#[test]
fn the_first_fault_that_applies_is_used() {
    let faults = Faults::default();
    faults.inject(Fault::new(Action::Fail(Code::Internal)).times(1));
    faults.inject(Fault::new(Action::StoreThenFail(Code::Aborted)).times(1));
    assert_eq!(judge(&faults, "k"), Verdict::Fail(Code::Internal));
    assert_eq!(judge(&faults, "k"), Verdict::StoreThenFail(Code::Aborted));
}

#[test]
fn poison_meets_only_requests_with_the_event() {
    let faults = Faults::default();
    faults.inject(Fault::new(Action::Poison {
        event_id: "e2".to_owned(),
    }));
    assert_eq!(judge(&faults, "k"), Verdict::Proceed);
    faults.inject(Fault::new(Action::Poison {
        event_id: "e1".to_owned(),
    }));
    assert_eq!(judge(&faults, "k"), Verdict::Fail(Code::InvalidArgument));
}

#[test]
fn a_throttle_lets_its_rate_pass() {
    let faults = Faults::default();
    faults.inject(Fault::new(Action::Throttle {
        messages_per_second: 100,
    }));
    let start = Instant::now();
    let throttled = Verdict::Fail(Code::ResourceExhausted);
    assert_eq!(judge_at(&faults, "k", 60, start), Verdict::Proceed);
    assert_eq!(judge_at(&faults, "k", 60, start), Verdict::Proceed);
    assert_eq!(judge_at(&faults, "k", 60, start), throttled);
    assert_eq!(
        judge_at(&faults, "k", 60, start + Duration::from_millis(150)),
        throttled
    );
    assert_eq!(
        judge_at(&faults, "k", 1, start + Duration::from_millis(250)),
        Verdict::Proceed
    );
    // During a pause the throttle collects the tokens of one second, and no more.
    let later = start + Duration::from_secs(60);
    assert_eq!(judge_at(&faults, "k", 100, later), Verdict::Proceed);
    assert_eq!(judge_at(&faults, "k", 1, later), throttled);
}

#[test]
fn removed_topics_can_be_restored() {
    let faults = Faults::default();
    faults.remove_topic(TOPIC);
    assert!(faults.is_removed(TOPIC));
    assert!(faults.restore_topic(TOPIC));
    assert!(!faults.restore_topic(TOPIC));
    faults.remove_topic(TOPIC);
    faults.lift_all();
    assert!(!faults.is_removed(TOPIC));
}

#[test]
fn topic_patterns_are_full_names_or_ids_with_stars() {
    for pattern in [
        TOPIC,
        "orders.events",
        "*",
        "orders*",
        "*events",
        "o*s.e*s",
        "projects/*",
    ] {
        assert!(topic_matches(pattern, TOPIC), "{pattern}");
    }
    for pattern in [
        "orders",
        "events",
        "*orders",
        "orders.events*x",
        "x*",
        "projects/q/*",
    ] {
        assert!(!topic_matches(pattern, TOPIC), "{pattern}");
    }
}
