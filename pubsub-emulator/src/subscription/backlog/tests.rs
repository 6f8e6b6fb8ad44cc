//! Tests the backlog against its promises, and against a plain model of the rules.

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

/// Takes everything available. Returns message ids and tokens.
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
fn room_limits_the_messages_taken_and_lanes_take_turns() {
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
    // Messages have ten bytes, and the last one may exceed the room.
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

#[derive(Debug, Clone)]
enum Step {
    /// 0 means no ordering key.
    Push(u8),
    Take {
        consumer: u64,
        messages: usize,
    },
    /// The index picks among all tokens ever given, including ended ones.
    Acknowledge(prop::sample::Index),
    Nack(prop::sample::Index),
    Extend(prop::sample::Index, u64),
    Advance(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = any::<prop::sample::Index>;
    let step = prop_oneof![
        4 => (0..3_u8).prop_map(Step::Push),
        4 => (1..3_u64, 1..4_usize).prop_map(|(consumer, messages)| Step::Take { consumer, messages }),
        4 => index().prop_map(Step::Acknowledge),
        1 => index().prop_map(Step::Nack),
        1 => (index(), 1..20_u64).prop_map(|(index, seconds)| Step::Extend(index, seconds)),
        1 => (1..8_u64).prop_map(Step::Advance),
    ];
    vec(step, 1..120)
}

/// The rules, written out over one list of messages in the order of publication.
#[derive(Default)]
struct Model {
    messages: Vec<ModelMessage>,
}

struct ModelMessage {
    id: u64,
    lane: String,
    state: ModelState,
}

#[derive(PartialEq)]
enum ModelState {
    Waiting,
    Leased {
        token: Token,
        consumer: ConsumerId,
        deadline: Instant,
    },
    Acknowledged,
}

impl Model {
    fn next_of(&mut self, lane: &str) -> Option<&mut ModelMessage> {
        self.messages
            .iter_mut()
            .find(|m| m.lane == lane && m.state == ModelState::Waiting)
    }

    fn is_open(&self, lane: &str, taker: ConsumerId) -> bool {
        !self.messages.iter().any(|m| {
            m.lane == lane
                && matches!(m.state, ModelState::Leased { consumer, .. } if consumer != taker)
        })
    }

    fn can_take(&self, consumer: ConsumerId) -> bool {
        self.messages
            .iter()
            .any(|m| m.state == ModelState::Waiting && self.is_open(&m.lane, consumer))
    }

    fn lease(&mut self, wanted: Token) -> Option<&mut ModelMessage> {
        self.messages
            .iter_mut()
            .find(|m| matches!(m.state, ModelState::Leased { token, .. } if token == wanted))
    }

    fn acknowledge(&mut self, token: Token) {
        let Some(message) = self.lease(token) else {
            return;
        };
        message.state = ModelState::Acknowledged;
        // An acknowledged message is gone for good once no message before it in its lane is
        // unacknowledged.
        let mut open = std::collections::HashSet::new();
        self.messages.retain(|m| {
            if m.state != ModelState::Acknowledged {
                open.insert(m.lane.clone());
            }
            m.state != ModelState::Acknowledged || open.contains(&m.lane)
        });
    }

    fn nack(&mut self, token: Token) {
        let Some((id, lane)) = self.lease(token).map(|m| (m.id, m.lane.clone())) else {
            return;
        };
        for message in self
            .messages
            .iter_mut()
            .filter(|m| m.lane == lane && m.id >= id)
        {
            message.state = ModelState::Waiting;
        }
    }

    fn expire(&mut self, now: Instant) {
        let mut expired: Vec<(Instant, Token)> = Vec::new();
        for message in &self.messages {
            if let ModelState::Leased {
                token, deadline, ..
            } = message.state
                && deadline <= now
            {
                expired.push((deadline, token));
            }
        }
        for (_, token) in expired {
            self.nack(token);
        }
    }
}

proptest! {
    #[test]
    fn the_backlog_does_what_the_model_says(ordered in any::<bool>(), steps in steps()) {
        let mut now = Instant::now();
        let mut backlog = Backlog::new(ordered);
        let mut model = Model::default();
        let mut tokens: Vec<Token> = Vec::new();
        let mut next_id = 1;
        for step in steps {
            let pick = |index: prop::sample::Index| {
                if tokens.is_empty() { None } else { Some(*index.get(&tokens)) }
            };
            match step {
                Step::Push(key) => {
                    let key = if key == 0 { String::new() } else { key.to_string() };
                    backlog.push(message(next_id, &key));
                    let lane = if ordered && !key.is_empty() { key } else { format!("#{next_id}") };
                    let state = ModelState::Waiting;
                    model.messages.push(ModelMessage { id: next_id, lane, state });
                    next_id += 1;
                }
                Step::Take { consumer, messages } => {
                    let consumer = ConsumerId(consumer);
                    let deadline = now + ACK_DEADLINE;
                    let room = Room { messages, bytes: usize::MAX };
                    let taken = backlog.take(consumer, deadline, room);
                    for (token, message) in &taken {
                        let lane = model.messages.iter().find(|m| m.id == message.id)
                            .map(|m| m.lane.clone()).expect("known and not acknowledged");
                        prop_assert!(model.is_open(&lane, consumer));
                        let next = model.next_of(&lane).expect("something waits");
                        prop_assert_eq!(next.id, message.id, "in order within the lane");
                        next.state = ModelState::Leased { token: *token, consumer, deadline };
                        tokens.push(*token);
                    }
                    prop_assert!(taken.len() == messages || !model.can_take(consumer));
                }
                Step::Acknowledge(index) => if let Some(token) = pick(index) {
                    backlog.acknowledge(token);
                    model.acknowledge(token);
                },
                Step::Nack(index) => if let Some(token) = pick(index) {
                    backlog.nack(token);
                    model.nack(token);
                },
                Step::Extend(index, seconds) => if let Some(token) = pick(index) {
                    let until = now + Duration::from_secs(seconds);
                    backlog.extend(token, until);
                    if let Some(ModelState::Leased { deadline, .. }) =
                        model.lease(token).map(|m| &mut m.state)
                    {
                        *deadline = until;
                    }
                },
                Step::Advance(seconds) => {
                    now += Duration::from_secs(seconds);
                    backlog.expire(now);
                    model.expire(now);
                }
            }
            for consumer in [ALICE, BOB] {
                let leased = model.messages.iter().filter(|m| {
                    matches!(m.state, ModelState::Leased { consumer: by, .. } if by == consumer)
                });
                prop_assert_eq!(backlog.held(consumer).messages, leased.count());
            }
        }
        // In the end one consumer gets all remaining messages, and nothing is kept.
        backlog.expire(now + Duration::from_secs(3_600));
        model.expire(now + Duration::from_secs(3_600));
        let left = model.messages.iter().filter(|m| m.state == ModelState::Waiting).count();
        let taken = take(&mut backlog, ALICE, now);
        prop_assert_eq!(taken.len(), left);
        for (_, token) in taken {
            backlog.acknowledge(token);
        }
        prop_assert!(holds_nothing(&backlog));
    }
}
