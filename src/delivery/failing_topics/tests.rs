//! Tests when a topic counts as failing and when it works again.

use super::*;
use crate::error::Code;
use crate::event::Event;
use crate::lanes::{Load, Serve};

fn error() -> Error {
    Error::new(Code::TopicMissing, "the topic is missing")
}

/// Sends one request per key of a topic, and lets all of them fail. Returns the topic.
fn outage(failing: &mut FailingTopics, lanes: &mut Lanes, now: Instant) -> Arc<str> {
    let topic: Arc<str> = "projects/p/topics/t".into();
    for key in ["a", "b", "c"] {
        lanes.push(topic.clone(), OrderingKey::from(key), Event::for_tests(1));
    }
    for _ in 0..3 {
        let request = lanes.next_request(now, Serve::All).unwrap();
        failing.failed(&topic, &error(), now, false);
        lanes.failed(request, now, Load::Keep);
    }
    failing.survey(lanes);
    failing.survey_due = now;
    topic
}

#[test]
fn a_topic_works_again_after_an_outage_although_failed_requests_still_wait() {
    let (troubles, now) = (Troubles::default(), Instant::now());
    let mut failing = FailingTopics::new(troubles.clone(), EarlierFailures::default());
    let mut lanes = Lanes::new(8);
    let topic = outage(&mut failing, &mut lanes, now);
    let shown = troubles.topics();
    assert_eq!((shown[0].failures, shown[0].waiting_events), (3, 3));
    let again = lanes.next_request(now, Serve::All).unwrap();
    failing.survey(&lanes);
    assert_eq!(troubles.topics().len(), 1, "the retry is in flight");
    failing.survey_due = now;
    lanes.finished(&again);
    failing.published(&topic);
    failing.survey(&lanes);
    assert!(troubles.topics().is_empty());
}

#[test]
fn a_topic_counts_as_failing_until_none_of_its_requests_fails() {
    let (troubles, now) = (Troubles::default(), Instant::now());
    let mut failing = FailingTopics::new(troubles.clone(), EarlierFailures::default());
    let mut lanes = Lanes::new(8);
    let topic = outage(&mut failing, &mut lanes, now);
    for _ in 0..2 {
        let again = lanes.next_request(now, Serve::All).unwrap();
        lanes.finished(&again);
        failing.published(&topic);
        let bad = lanes.next_request(now, Serve::All).unwrap();
        failing.failed(&topic, &error(), Instant::now(), false);
        lanes.failed(bad, now, Load::Keep);
        failing.survey_due = now;
        failing.survey(&lanes);
        assert_eq!(troubles.topics().len(), 1);
    }
    let last = lanes.next_request(now, Serve::All).unwrap();
    lanes.push(topic.clone(), OrderingKey::from("d"), Event::for_tests(1));
    let other = lanes.next_request(now, Serve::All).unwrap();
    lanes.finished(&other);
    failing.published(&topic);
    failing.survey_due = now;
    failing.survey(&lanes);
    assert_eq!(troubles.topics().len(), 1, "one request still fails");
    lanes.finished(&last);
    failing.published(&topic);
    failing.survey_due = now;
    failing.survey(&lanes);
    assert!(troubles.topics().is_empty());
}

#[test]
fn a_topic_whose_last_event_is_refused_fails_no_longer() {
    let (troubles, now) = (Troubles::default(), Instant::now());
    let mut failing = FailingTopics::new(troubles.clone(), EarlierFailures::default());
    let mut lanes = Lanes::new(8);
    let topic: Arc<str> = "projects/p/topics/t".into();
    lanes.push(topic.clone(), OrderingKey::from("a"), Event::for_tests(1));
    let first = lanes.next_request(now, Serve::All).unwrap();
    failing.failed(&topic, &error(), now, false);
    lanes.failed(first, now, Load::Keep);
    failing.survey(&lanes);
    assert_eq!(troubles.topics().len(), 1);
    let again = lanes.next_request(now, Serve::All).unwrap();
    assert!(lanes.refused(again).is_some());
    failing.survey_due = now;
    failing.survey(&lanes);
    assert!(troubles.topics().is_empty());
}

#[test]
fn the_next_session_continues_the_count_and_the_duration_of_a_failure() {
    let (troubles, now) = (Troubles::default(), Instant::now());
    let earlier = EarlierFailures::default();
    let mut failing = FailingTopics::new(troubles.clone(), earlier.clone());
    let topic = outage(&mut failing, &mut Lanes::new(8), now);
    for session in 1..=2 {
        drop(failing);
        failing = FailingTopics::new(troubles.clone(), earlier.clone());
        let later = now + Duration::from_secs(session);
        failing.failed(&topic, &error(), later, false);
        let shown = troubles.topics();
        assert_eq!(shown[0].failures, 3 + session);
        assert_eq!(shown[0].trouble.since, now);
    }
    drop(failing);
    failing = FailingTopics::new(troubles.clone(), earlier);
    failing.published(&topic);
    failing.survey(&Lanes::new(8));
    assert!(troubles.topics().is_empty());
}
