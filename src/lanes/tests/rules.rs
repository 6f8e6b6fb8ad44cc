//! Tests the rules of the lanes, one by one.

use super::super::limits::{WORTHWHILE_BYTES, WORTHWHILE_MESSAGES};
use super::*;

#[test]
fn a_key_has_one_request_in_flight_and_the_next_takes_all_the_rest() {
    let now = Instant::now();
    let mut lanes = Lanes::new(10);
    push(&mut lanes, "a", 1);
    let first = lanes.next_request(now, Serve::All).unwrap();
    push(&mut lanes, "a", 2);
    push(&mut lanes, "a", 3);
    assert!(lanes.next_request(now, Serve::All).is_none());
    lanes.finished(&first);
    assert_eq!(
        ordinals(&lanes.next_request(now, Serve::All).unwrap()),
        [2, 3]
    );
}

#[test]
fn a_failed_request_is_retried_unchanged_before_later_events_and_blocks_only_its_key() {
    let now = Instant::now();
    let later = now + Duration::from_secs(1);
    let mut lanes = Lanes::new(10);
    push(&mut lanes, "a", 1);
    let request = lanes.next_request(now, Serve::All).unwrap();
    lanes.failed(request, later, Load::Keep);
    push(&mut lanes, "a", 2);
    push(&mut lanes, "b", 3);
    assert_eq!(ordinals(&lanes.next_request(now, Serve::All).unwrap()), [3]);
    assert!(lanes.next_request(now, Serve::All).is_none());
    let again = lanes.next_request(later, Serve::All).unwrap();
    assert_eq!((ordinals(&again), again.failed_attempts), (vec![1], 1));
    lanes.finished(&again);
    assert_eq!(
        ordinals(&lanes.next_request(later, Serve::All).unwrap()),
        [2]
    );
}

#[test]
fn a_lane_is_removed_when_it_has_no_work() {
    let now = Instant::now();
    let mut lanes = Lanes::new(10);
    for n in 0..100_000 {
        push(&mut lanes, &format!("key-{n}"), n);
        let request = lanes.next_request(now, Serve::All).unwrap();
        lanes.finished(&request);
    }
    assert!(lanes.is_empty());
    assert!(lanes.entries.len() <= 2 && lanes.ready.len() <= 2);
}

#[test]
fn a_lane_that_is_always_full_leaves_room_for_a_small_one() {
    let now = Instant::now();
    let mut lanes = Lanes::new(1);
    (0..200).for_each(|n| push(&mut lanes, "hot", n));
    push(&mut lanes, "small", 1_000);
    let served = (0..4).any(|_| {
        let request = lanes.next_request(now, Serve::All).unwrap();
        (0..200).for_each(|n| push(&mut lanes, "hot", n));
        lanes.finished(&request);
        request.key.ordering_key == OrderingKey::from("small")
    });
    assert!(served);
}

#[test]
fn lanes_that_keep_failing_do_not_starve_another_when_one_request_is_allowed() {
    let now = Instant::now();
    let mut lanes = Lanes::new(1);
    for (key, n) in [("a", 1), ("b", 2)] {
        push(&mut lanes, key, n);
        let request = lanes.next_request(now, Serve::All).unwrap();
        lanes.failed(request, now, Load::Reduce);
    }
    push(&mut lanes, "small", 3);
    let served = (0..3).any(|_| {
        let request = lanes.next_request(now, Serve::All).unwrap();
        let is_small = request.key.ordering_key == OrderingKey::from("small");
        lanes.failed(request, now, Load::Reduce);
        is_small
    });
    assert!(served);
}

#[test]
fn while_more_input_is_available_only_worthwhile_lanes_send() {
    let now = Instant::now();
    let mut lanes = Lanes::new(10);
    push(&mut lanes, "small", 1);
    (0..WORTHWHILE_MESSAGES as u32).for_each(|n| push(&mut lanes, "large", n));
    let request = lanes.next_request(now, Serve::Worthwhile).unwrap();
    assert_eq!(request.events.len(), WORTHWHILE_MESSAGES);
    assert!(lanes.next_request(now, Serve::Worthwhile).is_none());
    assert_eq!(ordinals(&lanes.next_request(now, Serve::All).unwrap()), [1]);
}

#[test]
fn a_small_lane_lingers_at_most_a_second_while_another_is_always_worthwhile() {
    let start = Instant::now();
    let mut lanes = Lanes::new(10);
    push(&mut lanes, "small", 1_000_000);
    let mut served_after = None;
    for n in 0..200u32 {
        let now = start + Duration::from_millis(10) * n;
        for m in 0..WORTHWHILE_MESSAGES as u32 {
            push(&mut lanes, "hot", n * 1_000 + m);
        }
        while let Some(request) = lanes.next_request(now, Serve::Worthwhile) {
            if request.key.ordering_key.as_str() == "small" {
                served_after = Some(now - start);
            }
            lanes.finished(&request);
        }
    }
    assert_eq!(served_after, Some(LINGER_LIMIT));
}

#[test]
fn a_few_large_messages_are_worthwhile_and_their_bytes_count_once() {
    let now = Instant::now();
    let mut lanes = Lanes::new(10);
    for n in [1, 2] {
        assert!(lanes.next_request(now, Serve::Worthwhile).is_none());
        let mut large = event(n);
        large.message = vec![0; WORTHWHILE_BYTES / 2].into();
        lanes.push("projects/p/topics/t".into(), "a".into(), large);
    }
    let whole = lanes.next_request(now, Serve::Worthwhile).unwrap();
    assert_eq!(ordinals(&whole), [1, 2]);
    assert!(lanes.refused(whole).is_none());
    for n in [1, 2] {
        let half = lanes.next_request(now, Serve::Worthwhile).unwrap();
        assert_eq!(ordinals(&half), [n]);
        lanes.finished(&half);
    }
    assert!(lanes.is_empty());
}

#[test]
fn a_request_holds_at_most_1000_messages_and_9_mb() {
    let now = Instant::now();
    let mut lanes = Lanes::new(10);
    (0..1_500).for_each(|n| push(&mut lanes, "many", n));
    assert_eq!(
        lanes.next_request(now, Serve::All).unwrap().events.len(),
        1_000
    );
    for n in 0..4 {
        let large = Event {
            message: vec![0; 4_000_000].into(),
            ..event(n)
        };
        lanes.push("t".into(), OrderingKey::from("large"), large);
    }
    assert_eq!(lanes.next_request(now, Serve::All).unwrap().events.len(), 2);
}

#[test]
fn messages_without_a_key_are_sent_in_parallel() {
    let now = Instant::now();
    let mut lanes = Lanes::new(100);
    (0..100).for_each(|n| push(&mut lanes, "", n));
    let mut requests = 0;
    while lanes.next_request(now, Serve::All).is_some() {
        requests += 1;
    }
    assert_eq!(requests, UNORDERED_LANES);
}

#[test]
fn no_retry_is_due_while_the_limit_allows_no_request() {
    let now = Instant::now();
    let mut lanes = Lanes::new(2);
    push(&mut lanes, "a", 1);
    push(&mut lanes, "b", 2);
    let (a, b) = (
        lanes.next_request(now, Serve::All),
        lanes.next_request(now, Serve::All),
    );
    lanes.failed(a.unwrap(), now, Load::Reduce);
    assert_eq!(
        lanes.next_due(),
        None,
        "the limit is one, and one is in flight"
    );
    lanes.finished(&b.unwrap());
    assert_eq!(lanes.next_due(), Some(now));
}

#[test]
fn lanes_retry_at_once_when_their_topic_is_back() {
    let now = Instant::now();
    let mut lanes = Lanes::new(10);
    push(&mut lanes, "a", 1);
    let request = lanes.next_request(now, Serve::All).unwrap();
    lanes.failed(request, now + Duration::from_secs(60), Load::Keep);
    lanes.hasten("projects/p/topics/t", now);
    assert_eq!(lanes.next_due(), Some(now));
    assert!(lanes.next_request(now, Serve::All).is_some());
}

#[test]
fn one_bad_event_among_1000_is_found_in_about_log2_n_requests_and_the_rest_is_stored() {
    let now = Instant::now();
    for bad in [0, 1, 499, 500, 998, 999] {
        let mut lanes = Lanes::new(10);
        (0..1_000).for_each(|n| push(&mut lanes, "a", n));
        let (mut requests, mut stored, mut found) = (0, Vec::new(), None);
        while let Some(request) = lanes.next_request(now, Serve::Worthwhile) {
            requests += 1;
            if ordinals(&request).contains(&bad) {
                found = lanes.refused(request).or(found);
            } else {
                stored.extend(ordinals(&request));
                lanes.finished(&request);
            }
        }
        while let Some(request) = lanes.next_request(now, Serve::All) {
            requests += 1;
            stored.extend(ordinals(&request));
            lanes.finished(&request);
        }
        let found = found.expect("the bad event is found").origin;
        assert_eq!(found.position.ordinal, bad);
        assert!(requests <= 15, "{requests} requests for {bad}");
        assert!(found.failed_attempts >= 2 && found.failed_attempts <= 12);
        assert_eq!(stored, (0..1_000).filter(|n| *n != bad).collect::<Vec<_>>());
        assert!(lanes.is_empty());
    }
}

#[test]
fn closing_a_lane_returns_all_its_events_in_order_and_removes_it() {
    let now = Instant::now();
    let mut lanes = Lanes::new(10);
    (0..5).for_each(|n| push(&mut lanes, "a", n));
    let request = lanes.next_request(now, Serve::All).unwrap();
    let key = request.key.clone();
    assert!(lanes.refused(request).is_none());
    let half = lanes.next_request(now, Serve::All).unwrap();
    assert_eq!(ordinals(&half), [0, 1]);
    lanes.failed(half, now + Duration::from_secs(9), Load::Keep);
    let waiting: Vec<u32> = lanes
        .close(&key)
        .iter()
        .map(|e| e.origin.position.ordinal)
        .collect();
    assert_eq!(waiting, [0, 1, 2, 3, 4]);
    assert!(lanes.is_empty() && lanes.waiting() == 0);
}

#[test]
fn a_topic_over_its_quota_slows_down_alone() {
    let now = Instant::now();
    let mut lanes = Lanes::new(100);
    for n in 0..40 {
        lanes.push(
            "slow".into(),
            OrderingKey::from(format!("k{n}").as_str()),
            event(n),
        );
    }
    let mut requests = Vec::new();
    while let Some(request) = lanes.next_request(now, Serve::All) {
        requests.push(request);
    }
    for request in requests {
        lanes.failed(request, now, Load::ReduceTopic);
    }
    for n in 0..90 {
        push(&mut lanes, &format!("k{n}"), n);
    }
    let (mut slow, mut others) = (Vec::new(), 0);
    while let Some(request) = lanes.next_request(now, Serve::All) {
        match &*request.key.topic {
            "slow" => slow.push(request),
            _ => others += 1,
        }
    }
    assert_eq!((slow.len(), others), (1, 90));
    assert_eq!(lanes.waiting(), 39, "the others are parked");
    assert_eq!(lanes.next_due(), None, "parked lanes have no retry time");
    let mut served = 0;
    while let Some(request) = slow.pop() {
        served += 1;
        lanes.finished(&request);
        while let Some(request) = lanes.next_request(now, Serve::Worthwhile) {
            slow.push(request);
        }
    }
    assert_eq!(
        served, 40,
        "every lane has its turn, even while more input is available"
    );
}
