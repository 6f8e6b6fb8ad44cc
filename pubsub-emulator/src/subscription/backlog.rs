//! The backlog of a subscription: which messages wait, and which are leased, to which consumer and
//! until when.
//!
//! The backlog is a plain state machine without IO, locks or a clock: the caller passes the time.
//! Messages live in lanes (`lane.rs`). Each lease has a token, and tokens are never reused. A lane
//! is removed as soon as all its messages are acknowledged.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::lane::Lane;
use crate::topic::StoredMessage;

/// Identifies a lease.
pub(crate) type Token = u64;

/// Identifies a consumer: a stream or a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ConsumerId(pub(super) u64);

/// How much a consumer may still take. It gets messages while both numbers are above 0, so its last message
/// may be larger than the remaining bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub(super) messages: usize,
    pub(super) bytes: usize,
}

/// The unacknowledged messages that a consumer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Held {
    pub(super) messages: usize,
    pub(super) bytes: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum LaneKey {
    OrderingKey(Arc<str>),
    Message(u64),
}

#[derive(Debug)]
struct Lease {
    lane: LaneKey,
    message_id: u64,
    bytes: usize,
    consumer: ConsumerId,
    deadline: Instant,
}

#[derive(Debug)]
pub(super) struct Backlog {
    ordered: bool,
    lanes: HashMap<LaneKey, Lane>,
    /// The lanes that have waiting messages, each lane once.
    queue: VecDeque<LaneKey>,
    leases: HashMap<Token, Lease>,
    deadlines: BTreeSet<(Instant, Token)>,
    next_token: Token,
    held: HashMap<ConsumerId, Held>,
}

impl Backlog {
    /// Creates an empty backlog. With `ordered`, the messages of each ordering key stay in order.
    pub(super) fn new(ordered: bool) -> Self {
        Self {
            ordered,
            lanes: HashMap::new(),
            queue: VecDeque::new(),
            leases: HashMap::new(),
            deadlines: BTreeSet::new(),
            next_token: 0,
            held: HashMap::new(),
        }
    }

    /// Adds a message. Its id must be greater than the ids of all earlier messages.
    pub(super) fn push(&mut self, message: Arc<StoredMessage>) {
        let key = if self.ordered && !message.ordering_key.is_empty() {
            LaneKey::OrderingKey(Arc::clone(&message.ordering_key))
        } else {
            LaneKey::Message(message.id)
        };
        let lane = self.lanes.entry(key.clone()).or_default();
        lane.push(message);
        if !lane.queued {
            lane.queued = true;
            self.queue.push_back(key);
        }
    }

    /// Leases waiting messages to a consumer. Lanes take turns, and each lane gives as many
    /// messages as fit into `room`. A lane is skipped while another consumer holds some of its
    /// messages.
    pub(super) fn take(
        &mut self,
        consumer: ConsumerId,
        deadline: Instant,
        room: Room,
    ) -> Vec<(Token, Arc<StoredMessage>)> {
        let mut taken = Vec::new();
        let mut bytes = 0;
        for _ in 0..self.queue.len() {
            if taken.len() >= room.messages || bytes >= room.bytes {
                break;
            }
            let Some(key) = self.queue.pop_front() else {
                break;
            };
            let Some(lane) = self.lanes.get_mut(&key) else {
                continue;
            };
            while !lane.is_held_by_another(consumer)
                && taken.len() < room.messages
                && bytes < room.bytes
            {
                let token = self.next_token;
                let Some(message) = lane.lease_next(consumer, token) else {
                    break;
                };
                self.next_token += 1;
                let lease = Lease {
                    lane: key.clone(),
                    message_id: message.id,
                    bytes: message.encoded.len(),
                    consumer,
                    deadline,
                };
                bytes += lease.bytes;
                let held = self.held.entry(consumer).or_default();
                held.messages += 1;
                held.bytes += lease.bytes;
                self.leases.insert(token, lease);
                self.deadlines.insert((deadline, token));
                taken.push((token, message));
            }
            lane.queued = lane.has_waiting();
            if lane.queued {
                self.queue.push_back(key);
            }
        }
        taken
    }

    /// Acknowledges a leased message. Does nothing if the lease has ended.
    pub(super) fn acknowledge(&mut self, token: Token) {
        let Some(lease) = self.end_lease(token) else {
            return;
        };
        let Some(lane) = self.lanes.get_mut(&lease.lane) else {
            return;
        };
        lane.acknowledge(lease.message_id);
        if lane.is_empty() {
            self.lanes.remove(&lease.lane);
        }
    }

    /// Makes a leased message and all later messages of its lane wait again, so that they are
    /// redelivered.
    pub(super) fn nack(&mut self, token: Token) {
        let Some(lease) = self.leases.get(&token) else {
            return;
        };
        let (key, message_id) = (lease.lane.clone(), lease.message_id);
        let Some(lane) = self.lanes.get_mut(&key) else {
            return;
        };
        let ended = lane.rewind(message_id);
        if !lane.queued {
            lane.queued = true;
            self.queue.push_front(key);
        }
        for token in ended {
            self.end_lease(token);
        }
    }

    /// Sets the deadline of a lease. Does nothing if the lease has ended.
    pub(super) fn extend(&mut self, token: Token, deadline: Instant) {
        let Some(lease) = self.leases.get_mut(&token) else {
            return;
        };
        self.deadlines.remove(&(lease.deadline, token));
        lease.deadline = deadline;
        self.deadlines.insert((deadline, token));
    }

    /// Ends the leases whose deadline has passed at the time `now`. Their messages wait again, together with all
    /// later messages of their lanes.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(&(deadline, token)) = self.deadlines.first()
            && deadline <= now
        {
            self.nack(token);
        }
    }

    /// When the next lease ends, unless its message is acknowledged or its deadline extended.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    pub(super) fn held(&self, consumer: ConsumerId) -> Held {
        self.held.get(&consumer).copied().unwrap_or_default()
    }

    /// Drops all messages and leases.
    pub(super) fn clear(&mut self) {
        let emptied = Self {
            next_token: self.next_token,
            ..Self::new(self.ordered)
        };
        *self = emptied;
    }

    fn end_lease(&mut self, token: Token) -> Option<Lease> {
        let lease = self.leases.remove(&token)?;
        self.deadlines.remove(&(lease.deadline, token));
        if let Some(held) = self.held.get_mut(&lease.consumer) {
            held.messages -= 1;
            held.bytes -= lease.bytes;
            if held.messages == 0 {
                self.held.remove(&lease.consumer);
            }
        }
        Some(lease)
    }
}

#[cfg(test)]
mod tests;
