//! Random steps on the backlog, compared with a simple model of the rules.

use super::*;

#[derive(Debug, Clone)]
enum Step {
    /// Adds a message with this ordering key. 0 means no ordering key.
    Push(u8),
    Take {
        consumer: u64,
        messages: usize,
    },
    /// The index selects one of all tokens ever given, including the tokens of ended leases.
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

/// The rules of the backlog in a simple form: one list of all messages in the order of publication.
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
        // An acknowledged message is removed once all earlier messages of its lane are
        // acknowledged.
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
        one_consumer_takes_the_rest(backlog, model, now)?;
    }
}

/// Lets all leases expire and one consumer take and acknowledge the rest. The backlog must then be
/// empty.
fn one_consumer_takes_the_rest(
    mut backlog: Backlog,
    mut model: Model,
    now: Instant,
) -> Result<(), TestCaseError> {
    backlog.expire(now + Duration::from_secs(3_600));
    model.expire(now + Duration::from_secs(3_600));
    let waits = |message: &&ModelMessage| message.state == ModelState::Waiting;
    let left = model.messages.iter().filter(waits).count();
    let taken = take(&mut backlog, ALICE, now);
    prop_assert_eq!(taken.len(), left);
    for (_, token) in taken {
        backlog.acknowledge(token);
    }
    prop_assert!(holds_nothing(&backlog));
    Ok(())
}
