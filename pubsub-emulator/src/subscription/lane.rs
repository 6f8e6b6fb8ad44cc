//! A lane: messages that must be delivered in order.
//!
//! A lane holds all messages of one ordering key, or a single message without an ordering key. The
//! messages at the front of a lane have been sent, and all others wait. A message is dropped only
//! when it and all earlier messages of the lane are acknowledged. When a message is redelivered,
//! all later messages are redelivered too, even acknowledged ones, as in the service:
//! <https://cloud.google.com/pubsub/docs/ordering#considerations>.

use std::collections::VecDeque;
use std::sync::Arc;

use super::backlog::{ConsumerId, Token};
use crate::topic::StoredMessage;

#[derive(Debug, Default)]
pub(super) struct Lane {
    entries: VecDeque<Entry>,
    /// The number of entries at the front that are not [`Delivery::Waiting`].
    sent: usize,
    /// The number of entries that are [`Delivery::Leased`].
    leased: usize,
    /// The consumer that got the latest message. While this consumer holds any message of the lane,
    /// no other consumer gets the next message.
    holder: Option<ConsumerId>,
    /// Whether the backlog has this lane in its queue.
    pub(super) queued: bool,
}

#[derive(Debug)]
struct Entry {
    message: Arc<StoredMessage>,
    delivery: Delivery,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivery {
    Waiting,
    Leased(Token),
    Acknowledged,
}

impl Lane {
    pub(super) fn push(&mut self, message: Arc<StoredMessage>) {
        self.entries.push_back(Entry {
            message,
            delivery: Delivery::Waiting,
        });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn has_waiting(&self) -> bool {
        self.sent < self.entries.len()
    }

    pub(super) fn is_held_by_another(&self, consumer: ConsumerId) -> bool {
        self.leased > 0 && self.holder != Some(consumer)
    }

    /// Leases the next waiting message, if there is one.
    pub(super) fn lease_next(
        &mut self,
        consumer: ConsumerId,
        token: Token,
    ) -> Option<Arc<StoredMessage>> {
        let entry = self.entries.get_mut(self.sent)?;
        entry.delivery = Delivery::Leased(token);
        self.sent += 1;
        self.leased += 1;
        self.holder = Some(consumer);
        Some(Arc::clone(&entry.message))
    }

    /// Marks a leased message as acknowledged, and drops the acknowledged messages at the front.
    pub(super) fn acknowledge(&mut self, message_id: u64) {
        let Some(index) = self.find(message_id) else {
            return;
        };
        self.entries[index].delivery = Delivery::Acknowledged;
        self.leased -= 1;
        while self
            .entries
            .front()
            .is_some_and(|first| first.delivery == Delivery::Acknowledged)
        {
            self.entries.pop_front();
            self.sent -= 1;
        }
    }

    /// Makes this message and all later messages wait again. Returns the tokens of the leases that
    /// end.
    pub(super) fn rewind(&mut self, message_id: u64) -> Vec<Token> {
        let Some(index) = self.find(message_id) else {
            return Vec::new();
        };
        let mut ended = Vec::new();
        for entry in self.entries.range_mut(index..self.sent) {
            if let Delivery::Leased(token) = entry.delivery {
                ended.push(token);
            }
            entry.delivery = Delivery::Waiting;
        }
        self.sent = index;
        self.leased -= ended.len();
        ended
    }

    fn find(&self, message_id: u64) -> Option<usize> {
        self.entries
            .binary_search_by_key(&message_id, |entry| entry.message.id)
            .ok()
    }
}
