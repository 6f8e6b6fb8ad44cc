use super::*;

fn after_much(limit: usize) -> Budget {
    Budget {
        taken: usize::MAX,
        ..Budget::new(limit)
    }
}

#[test]
fn a_spent_budget_stays_spent_until_a_third_of_it_is_free() {
    let mut budget = Budget::new(1_000);
    budget.message_bytes = 900;
    budget.take(&Event::for_tests(0));
    assert!(budget.is_spent());
    budget.give_back_records(2);
    assert!(budget.is_spent());
    budget.give_back_messages(1, 200);
    assert!(budget.is_spent());
    budget.give_back_messages(0, 100);
    assert!(!budget.is_spent());
}

#[test]
fn a_full_budget_sends_one_third_and_keeps_the_rest_queued() {
    let event = Event::for_tests(0);
    let mut budget = after_much(96 * weight(&event));
    let some = |n| (0..n).map(Event::for_tests).collect::<Vec<_>>();
    budget.weigh_lanes(1);
    (0..90).for_each(|_| budget.take(&event));
    budget.sent(&some(10));
    (0..6).for_each(|_| budget.take(&event));
    assert!(budget.is_spent_by_messages() && !budget.fills_requests(true));
    budget.sent(&some(26));
    assert!(!budget.fills_requests(true), "the lane itself counts, too");
    budget.sent(&some(1));
    assert!(budget.fills_requests(true) && budget.is_spent());
    budget.answered(&some(2));
    assert!(!budget.fills_requests(true), "failed events wait again");
    budget.sent(&some(2));
    budget.take(&event);
    assert!(!budget.fills_requests(true));
    budget.sent(&some(1));
    assert!(budget.fills_requests(true));
    budget.answered(&some(34));
    budget.give_back_messages(34, 34 * event.message.len());
    assert!(
        !budget.is_spent(),
        "a third is free while four answers are missing"
    );
}

#[test]
fn when_too_much_waits_three_eighths_of_it_are_sent() {
    let event = Event::for_tests(0);
    let mut budget = Budget::new(400 * weight(&event));
    let take = |budget: &mut Budget, n| (0..n).for_each(|_| budget.take(&event));
    let sent = |budget: &mut Budget, n| {
        budget.sent(&(0..n).map(Event::for_tests).collect::<Vec<_>>());
        budget.weigh_lanes(0);
    };
    take(&mut budget, 100);
    assert!(budget.fills_requests(true), "a quarter of the budget");
    take(&mut budget, 1);
    assert!(!budget.fills_requests(true));
    assert!(
        budget.fills_requests(false),
        "waiting for a retry, lanes linger"
    );
    sent(&mut budget, 38);
    assert!(!budget.fills_requests(true));
    sent(&mut budget, 1);
    assert!(budget.fills_requests(true) && !budget.is_spent());
    for _ in 0..2_000 {
        take(&mut budget, 1);
        sent(&mut budget, 1);
    }
    take(&mut budget, 73);
    assert!(budget.fills_requests(true), "135 wait of 2,174");
    budget.answered(&[Event::for_tests(0), Event::for_tests(1)]);
    budget.give_back_messages(2, 2 * event.message.len());
    assert!(budget.fills_requests(true), "stored events no longer wait");
    take(&mut budget, 2);
    assert!(!budget.fills_requests(true), "137 of 2,176");
    sent(&mut budget, 51);
    assert!(!budget.fills_requests(true), "86 wait");
    sent(&mut budget, 1);
    assert!(budget.fills_requests(true), "five eighths of 136 wait");
    budget.caught_up();
    take(&mut budget, 15);
    assert!(budget.fills_requests(true), "100 wait again");
    take(&mut budget, 1);
    assert!(!budget.fills_requests(true));
}

#[test]
fn a_budget_spent_by_messages_stays_spent_until_records_take_under_three_sixteenths() {
    let mut budget = Budget::new(80 * RECORD);
    let event = Event::for_tests(0);
    (0..80).for_each(|_| budget.take(&event));
    budget.give_back_messages(80, 80 * event.message.len());
    budget.give_back_records(65);
    assert!(budget.used() < budget.limit() / 2 && budget.is_spent());
    budget.give_back_records(1);
    assert!(!budget.is_spent());
    (0..5).for_each(|_| budget.take_record());
    assert!(!budget.is_spent(), "the budget is not spent again");
}

#[test]
fn records_spend_the_budget_at_a_quarter_until_they_take_under_an_eighth() {
    let mut budget = Budget::new(80 * RECORD);
    (0..20).for_each(|_| budget.take_record());
    assert!(budget.is_spent());
    assert!(budget.fills_requests(true), "messages have room");
    budget.give_back_records(10);
    assert!(budget.is_spent());
    budget.give_back_records(1);
    assert!(!budget.is_spent());
}

#[test]
fn messages_that_arrive_while_records_have_spent_the_budget_can_spend_it_too() {
    let mut budget = after_much(80 * RECORD);
    (0..20).for_each(|_| budget.take_record());
    assert!(budget.is_spent() && !budget.is_spent_by_messages());
    (budget.messages, budget.message_bytes) = (10, budget.limit);
    budget.changed();
    budget.give_back_records(20);
    assert!(budget.is_spent_by_messages() && !budget.fills_requests(true));
}

#[test]
fn beyond_half_of_the_budget_requests_fill_up_only_if_lanes_are_shared() {
    let event = Event::for_tests(0);
    let mut budget = after_much(100 * (weight(&event) + LANE - RECORD));
    let mut take = |events, lanes| {
        for _ in 0..events {
            budget.take(&event);
        }
        budget.weigh_lanes(lanes);
        budget.fills_requests(true)
    };
    assert!(take(49, 49), "there is room");
    assert!(!take(11, 60), "each has a lane of its own");
    assert!(take(0, 50), "a few lanes are shared");
    assert!(!take(100, 50), "spent");
    budget.give_back_messages(160, 160 * event.message.len());
    budget.weigh_lanes(0);
    budget.records = 2 * budget.limit / 3 / RECORD;
    budget.changed();
    budget.spent = None;
    assert!(
        budget.fills_requests(true),
        "records do not count as messages"
    );
}

#[test]
fn texts_waiting_to_be_written_spend_the_budget_as_records_do() {
    let mut budget = Budget::new(80 * RECORD);
    budget.take_record();
    budget.take_texts(20 * RECORD);
    assert!(budget.is_spent() && !budget.is_spent_by_messages());
    budget.give_back_texts(20 * RECORD);
    budget.give_back_records(1);
    assert_eq!((budget.used(), budget.is_spent()), (0, false));
}

#[test]
fn a_lane_counts_as_long_as_it_has_work() {
    let mut budget = Budget::new(10 * LANE);
    budget.weigh_lanes(10);
    assert!(budget.is_spent());
    budget.weigh_lanes(7);
    assert!(budget.is_spent());
    budget.weigh_lanes(2);
    assert_eq!((budget.used(), budget.is_spent()), (2 * LANE, false));
}
