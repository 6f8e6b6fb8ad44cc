//! Tests of an outage in which nothing reaches Pub/Sub: attempts are rare, and one success frees all lanes.

use super::*;

/// 5,000 lanes of one topic, with one event each.
fn many_lanes() -> Lanes {
    let mut lanes = Lanes::new(500);
    for n in 0..5_000 {
        push(&mut lanes, &format!("key-{n}"), n);
    }
    lanes
}

/// Fails every attempt of ten simulated seconds. Returns the number of attempts, and when the next attempt is due.
fn ten_seconds_of(load: Load, lanes: &mut Lanes) -> (u32, Instant) {
    let start = Instant::now();
    let (mut now, mut failures) = (start, 0);
    while now < start + Duration::from_secs(10) {
        while let Some(request) = lanes.next_request(now, Serve::All) {
            failures += 1;
            lanes.failed(request, now, load);
        }
        let due = lanes.next_due().unwrap();
        assert!(due > now, "the caller would never sleep");
        now = due;
    }
    (failures, now)
}

#[test]
fn while_requests_cannot_be_sent_all_lanes_pause_together_and_one_success_frees_them() {
    let mut lanes = many_lanes();
    let (failures, now) = ten_seconds_of(Load::NotSent, &mut lanes);
    assert!(failures <= 20, "{failures} failed attempts in ten seconds");
    let first = lanes.next_request(now, Serve::All).unwrap();
    assert_eq!(first.failed_attempts, 0, "nothing was sent");
    lanes.finished(&first);
    while let Some(request) = lanes.next_request(now, Serve::All) {
        lanes.finished(&request);
    }
    assert!(lanes.is_empty(), "no lane has to wait after a success");
}

#[test]
fn broken_connections_are_probed_slowly_and_each_probe_counts_as_an_attempt() {
    let mut lanes = many_lanes();
    let (failures, now) = ten_seconds_of(Load::Broken, &mut lanes);
    assert!(failures <= 20, "{failures} failed attempts in ten seconds");
    let mut attempts = 0;
    while let Some(request) = lanes.next_request(now, Serve::All) {
        attempts += request.failed_attempts;
        lanes.finished(&request);
    }
    assert_eq!(attempts, failures);
}

#[test]
fn a_topic_that_fails_alone_makes_no_other_topic_pause() {
    let now = Instant::now();
    for load in [Load::Reduce, Load::ReduceTopic, Load::Keep] {
        let mut lanes = Lanes::new(4);
        push(&mut lanes, "a", 1);
        push(&mut lanes, "b", 2);
        let request = lanes.next_request(now, Serve::All).unwrap();
        lanes.failed(request, now + Duration::from_secs(60), load);
        assert!(lanes.next_request(now, Serve::All).is_some(), "{load:?}");
    }
}

/// After an outage, the lanes that are due first may all belong to a missing topic. Pub/Sub's answers about
/// this topic show that Pub/Sub is reachable, so no other lane has to wait.
#[test]
fn an_answer_about_one_topic_ends_the_pause_of_the_others() {
    for load in [Load::ReduceTopic, Load::Keep] {
        let mut lanes = many_lanes();
        let (_, now) = ten_seconds_of(Load::NotSent, &mut lanes);
        let later = now + Duration::from_secs(60);
        let mut attempts = 0;
        while let Some(request) = lanes.next_request(now, Serve::All) {
            attempts += 1;
            lanes.failed(request, later, load);
        }
        assert!(
            attempts > 100,
            "{load:?}: {attempts} attempts without a pause"
        );
    }
}

/// A refusal of a request because of its content is an answer too, so it ends the pause.
#[test]
fn a_refused_event_ends_the_pause_of_the_others() {
    let mut lanes = many_lanes();
    let (_, now) = ten_seconds_of(Load::Broken, &mut lanes);
    let bad = lanes.next_request(now, Serve::All).unwrap();
    assert!(lanes.next_request(now, Serve::All).is_none(), "one probe");
    assert!(lanes.refused(bad).is_some());
    assert!(lanes.next_request(now, Serve::All).is_some());
}
