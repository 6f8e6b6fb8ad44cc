//! A topic: assigns message ids to stored messages and passes the messages to its subscriptions.
//!
//! One lock protects both steps, so every subscription gets the messages of a topic in the order of
//! their ids. Other modules check names and requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use prost_types::Timestamp;

use crate::proto;
use crate::subscription::Subscription;
use crate::wire::MessageView;

/// A stored message, in the form in which subscribers get it.
#[derive(Debug)]
pub(crate) struct StoredMessage {
    pub(crate) id: u64,
    pub(crate) ordering_key: Arc<str>,
    /// The `PubsubMessage` with its id and publish time, encoded.
    pub(crate) encoded: Bytes,
}

/// A topic that exists.
#[derive(Debug)]
pub(crate) struct Topic {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    resource: proto::Topic,
    subscriptions: Vec<Arc<Subscription>>,
}

impl Topic {
    pub(crate) fn new(resource: proto::Topic) -> Self {
        Self {
            state: Mutex::new(State {
                resource,
                subscriptions: Vec::new(),
            }),
        }
    }

    pub(crate) fn resource(&self) -> proto::Topic {
        self.state().resource.clone()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut proto::Topic)) -> proto::Topic {
        let mut state = self.state();
        change(&mut state.resource);
        state.resource.clone()
    }

    pub(crate) fn attach(&self, subscription: Arc<Subscription>) {
        self.state().subscriptions.push(subscription);
    }

    pub(crate) fn detach(&self, name: &str) {
        self.state()
            .subscriptions
            .retain(|subscription| subscription.name() != name);
    }

    pub(crate) fn subscriptions(&self) -> Vec<Arc<Subscription>> {
        self.state().subscriptions.clone()
    }

    /// Stores the messages of a request, which all have the same ordering key. If the topic has no
    /// subscription, keeps nothing. Returns the id of the first message. The other messages have the
    /// following ids, without a gap.
    pub(crate) fn publish(&self, ids: &AtomicU64, messages: &[MessageView<'_>]) -> u64 {
        let state = self.state();
        let first_id = ids.fetch_add(messages.len() as u64, Ordering::Relaxed);
        if state.subscriptions.is_empty() {
            return first_id;
        }
        let now = SystemTime::now();
        let publish_time = Timestamp::from(now);
        let ordering_key: Arc<str> = messages
            .first()
            .map_or("", |first| first.ordering_key)
            .into();
        let stored: Vec<_> = (first_id..)
            .zip(messages)
            .map(|(id, message)| {
                let encoded = message.stored(id, &publish_time);
                Arc::new(StoredMessage {
                    id,
                    ordering_key: Arc::clone(&ordering_key),
                    encoded,
                })
            })
            .collect();
        for subscription in &state.subscriptions {
            subscription.push(now, messages.iter().copied().zip(&stored));
        }
        first_id
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
