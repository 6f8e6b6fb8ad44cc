//! Tests of the memory budget: when the relay stops reading, and when lanes linger.

use super::memory::{LANE, RECORD};
use super::*;

fn after_much(limit: usize) -> FlowControl {
    FlowControl {
        backlog_bytes: usize::MAX,
        ..FlowControl::new(limit)
    }
}

#[test]
fn a_spent_budget_stays_spent_until_a_third_of_it_is_free() {
    let mut flow = FlowControl::new(1_000);
    flow.memory.message_bytes = 900;
    flow.take(&Event::for_tests(0));
    assert!(flow.stops_reading());
    flow.give_back_records(2);
    assert!(flow.stops_reading());
    flow.give_back_messages(1, 200);
    assert!(flow.stops_reading());
    flow.give_back_messages(0, 100);
    assert!(!flow.stops_reading());
}

#[test]
fn a_full_budget_sends_one_third_and_keeps_the_rest_queued() {
    let event = Event::for_tests(0);
    let mut flow = after_much(96 * weight(&event));
    let some = |n| (0..n).map(Event::for_tests).collect::<Vec<_>>();
    flow.weigh_lanes(1);
    (0..90).for_each(|_| flow.take(&event));
    flow.sent(&some(10));
    (0..6).for_each(|_| flow.take(&event));
    assert!(flow.queue_is_full() && !flow.may_linger(true));
    flow.sent(&some(26));
    assert!(!flow.may_linger(true), "the lane itself counts, too");
    flow.sent(&some(1));
    assert!(flow.may_linger(true) && flow.stops_reading());
    flow.answered(&some(2));
    assert!(!flow.may_linger(true), "failed events wait again");
    flow.sent(&some(2));
    flow.take(&event);
    assert!(!flow.may_linger(true));
    flow.sent(&some(1));
    assert!(flow.may_linger(true));
    flow.answered(&some(34));
    flow.give_back_messages(34, 34 * event.message.len());
    assert!(
        !flow.stops_reading(),
        "a third is free while four answers are missing"
    );
}

#[test]
fn above_a_quarter_of_the_budget_three_eighths_of_the_queue_are_sent() {
    let event = Event::for_tests(0);
    let mut flow = FlowControl::new(400 * weight(&event));
    let take = |flow: &mut FlowControl, n| (0..n).for_each(|_| flow.take(&event));
    let sent = |flow: &mut FlowControl, n| {
        flow.sent(&(0..n).map(Event::for_tests).collect::<Vec<_>>());
        flow.weigh_lanes(0);
    };
    take(&mut flow, 100);
    assert!(flow.may_linger(true), "a quarter of the budget");
    take(&mut flow, 1);
    assert!(!flow.may_linger(true));
    assert!(flow.may_linger(false), "waiting for a retry, lanes linger");
    sent(&mut flow, 38);
    assert!(!flow.may_linger(true));
    sent(&mut flow, 1);
    assert!(flow.may_linger(true) && !flow.stops_reading());
    for _ in 0..2_000 {
        take(&mut flow, 1);
        sent(&mut flow, 1);
    }
    take(&mut flow, 73);
    assert!(flow.may_linger(true), "135 wait of 2,174");
    flow.answered(&[Event::for_tests(0), Event::for_tests(1)]);
    flow.give_back_messages(2, 2 * event.message.len());
    assert!(flow.may_linger(true), "stored events no longer wait");
    take(&mut flow, 2);
    assert!(!flow.may_linger(true), "137 of 2,176");
    sent(&mut flow, 51);
    assert!(!flow.may_linger(true), "86 wait");
    sent(&mut flow, 1);
    assert!(flow.may_linger(true), "five eighths of 136 wait");
    flow.caught_up();
    take(&mut flow, 15);
    assert!(flow.may_linger(true), "100 wait again");
    take(&mut flow, 1);
    assert!(!flow.may_linger(true));
}

#[test]
fn after_the_queue_is_empty_only_records_decide_whether_reading_stops() {
    let mut flow = FlowControl::new(80 * RECORD);
    let event = Event::for_tests(0);
    (0..80).for_each(|_| flow.take(&event));
    flow.give_back_messages(80, 80 * event.message.len());
    assert!(!flow.queue_is_full() && flow.stops_reading());
    flow.give_back_records(70);
    assert!(flow.stops_reading(), "an eighth is unrecorded");
    flow.give_back_records(1);
    assert!(!flow.stops_reading());
    (0..5).for_each(|_| flow.take_record());
    assert!(!flow.stops_reading(), "less than a quarter is unrecorded");
}

#[test]
fn records_stop_reading_at_a_quarter_of_the_budget_until_they_use_under_an_eighth() {
    let mut flow = FlowControl::new(80 * RECORD);
    (0..20).for_each(|_| flow.take_record());
    assert!(flow.stops_reading());
    assert!(flow.may_linger(true), "messages have room");
    flow.give_back_records(10);
    assert!(flow.stops_reading());
    flow.give_back_records(1);
    assert!(!flow.stops_reading());
}

#[test]
fn messages_that_arrive_while_records_have_spent_the_budget_can_spend_it_too() {
    let mut flow = after_much(80 * RECORD);
    (0..20).for_each(|_| flow.take_record());
    assert!(flow.stops_reading() && !flow.queue_is_full());
    (flow.memory.messages, flow.memory.message_bytes) = (10, flow.budget);
    flow.update();
    flow.give_back_records(20);
    assert!(flow.queue_is_full() && !flow.may_linger(true));
}

#[test]
fn above_half_of_the_budget_lanes_linger_only_if_events_share_lanes() {
    let event = Event::for_tests(0);
    let mut flow = after_much(100 * (weight(&event) + LANE - RECORD));
    let mut take = |events, lanes| {
        for _ in 0..events {
            flow.take(&event);
        }
        flow.weigh_lanes(lanes);
        flow.may_linger(true)
    };
    assert!(take(49, 49), "there is room");
    assert!(!take(11, 60), "each has a lane of its own");
    assert!(take(0, 50), "a few lanes are shared");
    assert!(!take(100, 50), "spent");
    flow.give_back_messages(160, 160 * event.message.len());
    flow.give_back_records(160);
    flow.weigh_lanes(0);
    flow.memory.records = flow.budget / 5 / RECORD;
    flow.update();
    assert!(flow.may_linger(true), "records do not count as messages");
}

#[test]
fn texts_waiting_to_be_written_spend_the_budget_as_records_do() {
    let mut flow = FlowControl::new(80 * RECORD);
    flow.take_record();
    flow.take_texts(20 * RECORD);
    assert!(flow.stops_reading() && !flow.queue_is_full());
    flow.give_back_texts(20 * RECORD);
    flow.give_back_records(1);
    assert_eq!((flow.used(), flow.stops_reading()), (0, false));
}

#[test]
fn a_lane_counts_against_the_budget_only_while_it_has_work() {
    let mut flow = FlowControl::new(10 * LANE);
    flow.weigh_lanes(10);
    assert!(flow.stops_reading());
    flow.weigh_lanes(7);
    assert!(flow.stops_reading());
    flow.weigh_lanes(2);
    assert_eq!((flow.used(), flow.stops_reading()), (2 * LANE, false));
}
