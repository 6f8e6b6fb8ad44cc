//! Tests of two rules: which events block a key, and what a release waits for.

use super::super::turns::MAX_RELEASES;
use super::*;
use crate::event::EventPosition;

#[test]
fn events_before_the_one_that_blocks_their_key_are_published_when_replayed() {
    let mut quarantine = Quarantine::new(OnBadEvent::QuarantineKey);
    quarantine
        .keys
        .block(group(), EventPosition::for_tests(7, 3), "x");
    let Group {
        topic,
        ordering_key,
    } = group();
    let admit = |at| quarantine.admit(&topic, &ordering_key, at);
    assert_eq!(admit(EventPosition::for_tests(7, 2)), Admission::Open);
    assert_eq!(
        admit(EventPosition::for_tests(7, 3)),
        Admission::Quarantined("waits for event x in quarantine".into())
    );
    let other = OrderingKey::from("other");
    assert_eq!(
        quarantine.admit(&topic, &other, EventPosition::for_tests(9, 1)),
        Admission::Open
    );
}

#[test]
fn only_ordered_keys_block_and_only_under_quarantine_key() {
    let origin = Event::for_tests(1).origin;
    let unordered = Group {
        ordering_key: OrderingKey::UNORDERED,
        ..group()
    };
    let unknown = Group {
        topic: "".into(),
        ..group()
    };
    let mut quarantine = Quarantine::new(OnBadEvent::QuarantineKey);
    assert!(!quarantine.set_aside(&unordered, &origin).unwrap());
    assert!(!quarantine.set_aside(&unknown, &origin).unwrap());
    assert!(quarantine.set_aside(&group(), &origin).unwrap());
    assert!(
        !quarantine.set_aside(&group(), &origin).unwrap(),
        "its key is blocked already"
    );
    let mut quarantine = Quarantine::new(OnBadEvent::QuarantineEvent);
    assert!(!quarantine.set_aside(&group(), &origin).unwrap());
    assert_eq!(quarantine.keys.count(), 0);
}

#[test]
fn an_error_is_returned_instead_of_blocking_more_than_100000_keys() {
    let mut quarantine = Quarantine::new(OnBadEvent::QuarantineKey);
    let origin = Event::for_tests(1).origin;
    let mut block = |n: usize| {
        let ordering_key = OrderingKey::from(n.to_string().as_str());
        let group = Group {
            ordering_key,
            ..group()
        };
        quarantine.set_aside(&group, &origin)
    };
    for n in 0..MAX_BLOCKED {
        block(n).unwrap();
    }
    assert_eq!(block(MAX_BLOCKED).unwrap_err().code(), Code::QuarantineFull);
    assert!(
        !block(7).unwrap(),
        "a key that is blocked already does not count again"
    );
}

#[test]
fn events_that_have_left_the_quarantine_no_longer_count_towards_its_limit() {
    let mut quarantine = Quarantine::new(OnBadEvent::QuarantineEvent);
    let origin = Event::for_tests(1).origin;
    let set_aside = |quarantine: &mut Quarantine, events: usize| {
        (0..events).try_for_each(|_| quarantine.set_aside(&group(), &origin).map(|_| ()))
    };
    set_aside(&mut quarantine, MAX_BLOCKED - 5).unwrap();
    // An operator has released or discarded all but ten events. While the relay counts the events, five
    // more go into quarantine.
    quarantine.counting();
    set_aside(&mut quarantine, 5).unwrap();
    quarantine.counted(10);
    set_aside(&mut quarantine, MAX_BLOCKED - 15).unwrap();
    quarantine.counting();
    quarantine.counted(MAX_BLOCKED);
    let full = set_aside(&mut quarantine, 1).unwrap_err();
    assert_eq!(full.code(), Code::QuarantineFull);
}

#[test]
fn stuck_releases_do_not_hold_up_others() {
    let mut quarantine = Quarantine::new(OnBadEvent::QuarantineKey);
    let nth = |n: u32| Group {
        ordering_key: OrderingKey::from(n.to_string().as_str()),
        ..group()
    };
    let groups = MAX_RELEASES as u32;
    for n in 0..groups {
        quarantine.release(nth(n), false);
    }
    quarantine.release(nth(groups), false);
    assert!(
        !quarantine.releases.by_group.contains_key(&nth(groups)),
        "no room"
    );
    // Half of the releases read all their events. The other half read a full page each, so they may have
    // more events. Pub/Sub stores no event yet.
    for n in 0..groups {
        let events = if n % 2 == 0 { 1 } else { PAGE as u32 };
        let Some(QuarantineQuery::Page(read, _)) = quarantine.command() else {
            panic!("each has its turn");
        };
        assert_eq!(read, nth(n));
        for event in 0..events {
            let at = EventPosition::for_tests(u64::from(n + 1), event + 1);
            assert!(quarantine.read(&read, at));
            quarantine.goes_to_lane(at, in_lane(&read));
        }
        assert!(quarantine.page_ended(&read, events as usize).is_none());
    }
    while let Some(QuarantineQuery::Page(read, _)) = quarantine.command() {
        if let Some(unblocked) = quarantine.page_ended(&read, 0) {
            assert!(unblocked.held.is_empty() && !unblocked.was_in_quarantine);
        }
    }
    quarantine.release(nth(groups), false);
    let page = QuarantineQuery::Page(nth(groups), EventPosition::for_tests(0, 0));
    assert_eq!(quarantine.command(), Some(page));
    // The first release is still remembered. It ends once the outcome of its event is durable.
    let record = Record {
        topic: Some(group().topic),
        ordering_key: nth(0).ordering_key,
        at: SystemTime::UNIX_EPOCH,
        events: vec![EventRef {
            position: EventPosition::for_tests(1, 1),
            ..event(1, Standing::Released).origin
        }],
        outcome: Outcome::Published(MessageIds::default()),
    };
    quarantine.handed(&record);
    assert!(quarantine.releases.by_group.contains_key(&nth(0)));
    quarantine.durable(1);
    assert!(!quarantine.releases.by_group.contains_key(&nth(0)));
}

#[test]
fn a_key_of_replayed_events_is_blocked_until_they_are_read_and_again_after_a_restart() {
    let origin = event(1, Standing::Released).origin;
    for policy in [OnBadEvent::QuarantineKey, OnBadEvent::QuarantineEvent] {
        let mut quarantine = Quarantine::new(policy);
        let Group {
            topic,
            ordering_key,
        } = group();
        let behind = "waits for earlier events that are released";
        let released = Admission::Released(behind.into());
        // Simulate a restart in the middle of a release.
        quarantine
            .keys
            .block_for_release(group(), EventPosition::for_tests(1, 1));
        assert_eq!(
            quarantine.admit(&topic, &ordering_key, EventPosition::for_tests(9, 9)),
            released
        );
        quarantine.release(group(), true);
        let held = quarantine.admit(&topic, &ordering_key, EventPosition::for_tests(9, 9));
        assert_eq!(held, Admission::Held);
        assert_eq!(quarantine.keys.count(), 0, "no event is in quarantine");
        // A replayed event that Pub/Sub refuses blocks its key only under quarantine_key.
        if quarantine.keys.blocks(&group()) {
            assert!(quarantine.set_aside(&group(), &origin).unwrap());
        }
        assert!(quarantine.fail(&group()).is_empty());
        let is_blocked = policy == OnBadEvent::QuarantineKey;
        assert_eq!(quarantine.keys.count(), usize::from(is_blocked));
        let admitted = quarantine.admit(&topic, &ordering_key, EventPosition::for_tests(9, 9));
        if is_blocked {
            assert!(
                matches!(admitted, Admission::Quarantined(_)),
                "{admitted:?}"
            );
        } else {
            assert_eq!(admitted, Admission::Held);
        }
    }
}

#[test]
fn under_halt_a_new_event_that_waited_behind_a_replay_still_ends_the_relay() {
    let mut quarantine = Quarantine::new(OnBadEvent::Halt);
    quarantine.release(group(), true);
    let origin = event(1, Standing::Released).origin;
    for is_new in [false, true] {
        let lane = InLane {
            is_new,
            ..in_lane(&group())
        };
        quarantine.goes_to_lane(origin.position, lane);
        assert_eq!(quarantine.halts_on(&origin), is_new);
    }
    assert!(quarantine.halts_on(&event(2, Standing::New).origin));
}

#[test]
fn a_page_is_read_to_its_end_even_if_its_first_event_is_recorded_in_between() {
    let mut quarantine = Quarantine::new(OnBadEvent::QuarantineKey);
    quarantine.release(group(), true);
    let record = |n| Record {
        topic: Some(group().topic),
        ordering_key: group().ordering_key,
        at: SystemTime::UNIX_EPOCH,
        events: vec![event(n, Standing::Released).origin],
        outcome: Outcome::Published(MessageIds::default()),
    };
    for first in [1, 3] {
        assert!(quarantine.command().is_some());
        // The first event of the page is recorded before the second one is read.
        for n in [first, first + 1] {
            let at = event(n, Standing::Released).origin.position;
            assert!(quarantine.read(&group(), at), "{n}");
            quarantine.goes_to_lane(at, in_lane(&group()));
            if n == 1 {
                quarantine.handed(&record(n));
                quarantine.durable(1);
            }
        }
    }
}
