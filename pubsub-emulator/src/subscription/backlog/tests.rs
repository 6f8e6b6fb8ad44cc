//! Tests the backlog with examples, and against a simple model of its rules.

mod model;

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const ALICE: ConsumerId = ConsumerId(1);
const BOB: ConsumerId = ConsumerId(2);
const EVERYTHING: Room = Room {
    messages: usize::MAX,
    bytes: usize::MAX,
};
const ACK_DEADLINE: Duration = Duration::from_secs(10);

fn message(id: u64, key: &str) -> Arc<StoredMessage> {
    Arc::new(StoredMessage {
        id,
        ordering_key: key.into(),
        encoded: vec![0; 10].into(),
    })
}

fn backlog(ordered: bool, messages: &[(u64, &str)]) -> Backlog {
    let mut backlog = Backlog::new(ordered);
    for (id, key) in messages {
        backlog.push(message(*id, key));
    }
    backlog
}

/// Takes all available messages. Returns message ids and tokens.
fn take(backlog: &mut Backlog, consumer: ConsumerId, now: Instant) -> Vec<(u64, Token)> {
    let taken = backlog.take(consumer, now + ACK_DEADLINE, EVERYTHING);
    taken
        .into_iter()
        .map(|(token, message)| (message.id, token))
        .collect()
}

fn ids(taken: &[(u64, Token)]) -> Vec<u64> {
    taken.iter().map(|(id, _)| *id).collect()
}

fn token(taken: &[(u64, Token)], id: u64) -> Token {
    taken
        .iter()
        .find(|(taken, _)| *taken == id)
        .expect("taken")
        .1
}

fn holds_nothing(backlog: &Backlog) -> bool {
    backlog.lanes.is_empty()
        && backlog.queue.is_empty()
        && backlog.leases.is_empty()
        && backlog.deadlines.is_empty()
        && backlog.held.is_empty()
}

#[test]
fn a_key_is_delivered_in_order_and_forgotten_once_acknowledged() {
    let now = Instant::now();
    let mut backlog = backlog(true, &[(1, "k"), (2, "k"), (3, "k")]);
    let taken = take(&mut backlog, ALICE, now);
    assert_eq!(ids(&taken), [1, 2, 3]);
    for id in [3, 1, 2] {
        backlog.acknowledge(token(&taken, id));
    }
    assert!(holds_nothing(&backlog));
}

#[test]
fn a_nack_redelivers_all_later_messages_of_its_key() {
    let now = Instant::now();
    let mut backlog = backlog(true, &[(1, "k"), (2, "k"), (3, "k"), (4, "other")]);
    let taken = take(&mut backlog, ALICE, now);
    backlog.acknowledge(token(&taken, 3));
    backlog.nack(token(&taken, 2));
    assert_eq!(ids(&take(&mut backlog, ALICE, now)), [2, 3]);
}

#[test]
fn acknowledgements_from_before_a_rewind_have_no_effect() {
    let now = Instant::now();
    let mut backlog = backlog(true, &[(1, "k"), (2, "k")]);
    let taken = take(&mut backlog, ALICE, now);
    backlog.nack(token(&taken, 1));
    backlog.acknowledge(token(&taken, 2));
    assert_eq!(ids(&take(&mut backlog, ALICE, now)), [1, 2]);
}

#[test]
fn an_expired_deadline_redelivers_all_later_messages_of_its_key() {
    let now = Instant::now();
    let mut backlog = backlog(true, &[(1, "k"), (2, "k"), (3, "k")]);
    let taken = take(&mut backlog, ALICE, now);
    backlog.acknowledge(token(&taken, 1));
    backlog.extend(token(&taken, 3), now + Duration::from_secs(60));
    assert_eq!(backlog.next_expiry(), Some(now + ACK_DEADLINE));
    backlog.expire(now + ACK_DEADLINE - Duration::from_millis(1));
    assert_eq!(take(&mut backlog, ALICE, now), []);
    backlog.expire(now + ACK_DEADLINE);
    assert_eq!(ids(&take(&mut backlog, ALICE, now)), [2, 3]);
}

#[test]
fn an_extended_deadline_keeps_the_message() {
    let now = Instant::now();
    let mut backlog = backlog(true, &[(1, "k")]);
    let taken = take(&mut backlog, ALICE, now);
    backlog.extend(token(&taken, 1), now + Duration::from_secs(60));
    backlog.expire(now + Duration::from_secs(59));
    assert_eq!(take(&mut backlog, ALICE, now), []);
    backlog.acknowledge(token(&taken, 1));
    assert!(holds_nothing(&backlog));
}

#[test]
fn a_key_stays_with_the_consumer_that_holds_some_of_it() {
    let now = Instant::now();
    let mut backlog = backlog(true, &[(1, "k")]);
    let taken = take(&mut backlog, ALICE, now);
    backlog.push(message(2, "k"));
    backlog.push(message(3, "other"));
    assert_eq!(ids(&take(&mut backlog, BOB, now)), [3]);
    backlog.acknowledge(token(&taken, 1));
    assert_eq!(ids(&take(&mut backlog, BOB, now)), [2]);
}

#[test]
fn without_order_a_nack_redelivers_only_its_message() {
    let now = Instant::now();
    for (ordered, key) in [(false, "k"), (true, "")] {
        let mut backlog = backlog(ordered, &[(1, key), (2, key), (3, key)]);
        let taken = take(&mut backlog, ALICE, now);
        assert_eq!(ids(&taken), [1, 2, 3]);
        backlog.nack(token(&taken, 2));
        assert_eq!(ids(&take(&mut backlog, BOB, now)), [2]);
    }
}

#[test]
fn take_stops_when_the_room_is_used_up_and_serves_lanes_in_turn() {
    let now = Instant::now();
    let mut backlog = backlog(true, &[(1, "a"), (2, "a"), (3, "a"), (4, "b")]);
    let mut next = |room| -> Vec<u64> {
        let taken = backlog.take(ALICE, now + ACK_DEADLINE, room);
        taken.iter().map(|(_, message)| message.id).collect()
    };
    assert_eq!(
        next(Room {
            messages: 2,
            bytes: usize::MAX
        }),
        [1, 2]
    );
    assert_eq!(
        next(Room {
            messages: 0,
            bytes: usize::MAX
        }),
        [] as [u64; 0]
    );
    // Each message has ten bytes, and the last message may exceed the room.
    assert_eq!(
        next(Room {
            messages: usize::MAX,
            bytes: 11
        }),
        [4, 3]
    );
}

#[test]
fn the_messages_that_a_consumer_holds_are_counted() {
    let now = Instant::now();
    let mut backlog = backlog(true, &[(1, "k"), (2, "k"), (3, "k")]);
    let taken = take(&mut backlog, ALICE, now);
    assert_eq!(
        backlog.held(ALICE),
        Held {
            messages: 3,
            bytes: 30
        }
    );
    backlog.acknowledge(token(&taken, 1));
    assert_eq!(
        backlog.held(ALICE),
        Held {
            messages: 2,
            bytes: 20
        }
    );
    backlog.nack(token(&taken, 2));
    assert_eq!(backlog.held(ALICE), Held::default());
}

#[test]
fn clearing_drops_everything_and_ends_all_leases() {
    let now = Instant::now();
    let mut backlog = backlog(true, &[(1, "k"), (2, "k")]);
    let taken = take(&mut backlog, ALICE, now);
    backlog.clear();
    assert!(holds_nothing(&backlog));
    backlog.push(message(3, "k"));
    backlog.acknowledge(token(&taken, 1));
    assert_eq!(ids(&take(&mut backlog, ALICE, now)), [3]);
}
