//! A subscription: its settings, its backlog of messages, and the consumers that wait for them.
//!
//! [`backlog::Backlog`] selects the messages to deliver, without locks or clocks. This module adds
//! locks and clocks, and turns the backlog's tokens into ack ids.

mod ack_id;
mod backlog;
mod lane;
mod settings;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Notify;
use tonic::Status;

use self::ack_id::AckId;
pub(crate) use self::backlog::ConsumerId;
use self::backlog::{Backlog, Room, Token};
pub(crate) use self::settings::{ACK_DEADLINE_SECONDS, MUTABLE_FIELDS};
use crate::filter::Filter;
use crate::names;
use crate::proto;
use crate::topic::StoredMessage;
use crate::wire::{MessageView, ReceivedMessage};

/// Maximum number of messages in a response.
const MAX_RESPONSE_MESSAGES: usize = 1_000;
/// Maximum number of bytes of messages in a response. The last message may exceed it.
const MAX_RESPONSE_BYTES: usize = 1 << 20;

/// A subscription that exists or existed.
#[derive(Debug)]
pub(crate) struct Subscription {
    name: String,
    filter: Option<Filter>,
    /// Part of every ack id, so that ack ids of a deleted subscription with the same name have no
    /// effect.
    incarnation: u64,
    state: Mutex<State>,
    /// See [`Subscription::changed`].
    changed: Notify,
}

#[derive(Debug)]
struct State {
    resource: proto::Subscription,
    backlog: Backlog,
    next_consumer: u64,
    clients: HashMap<String, Client>,
    gone: Option<Gone>,
    /// Messages published before this time are not kept (see [`Subscription::seek`]).
    discard_before: Option<SystemTime>,
}

/// A client that sent its own client id.
#[derive(Debug)]
struct Client {
    consumer: ConsumerId,
    connected: bool,
}

/// Why a subscription delivers no more messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    Deleted,
    Detached,
}

/// How many unacknowledged messages and bytes one consumer may hold. `None` means no limit.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FlowControl {
    pub(crate) max_messages: Option<usize>,
    pub(crate) max_bytes: Option<usize>,
}

/// The messages that a consumer got from a call of [`Subscription::take`].
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) messages: Vec<ReceivedMessage>,
    /// When the next ack deadline ends, which makes messages available again. `None` if no message is
    /// leased.
    pub(crate) next_expiry: Option<Instant>,
}

impl Subscription {
    pub(crate) fn new(resource: proto::Subscription, incarnation: u64) -> Result<Self, Status> {
        let (resource, filter) = settings::accept(resource)?;
        let state = State {
            backlog: Backlog::new(resource.enable_message_ordering),
            next_consumer: 0,
            clients: HashMap::new(),
            gone: None,
            discard_before: None,
            resource,
        };
        Ok(Self {
            name: state.resource.name.clone(),
            filter,
            incarnation,
            state: Mutex::new(state),
            changed: Notify::new(),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn resource(&self) -> proto::Subscription {
        self.state().resource.clone()
    }

    pub(crate) fn change(
        &self,
        change: impl FnOnce(&mut proto::Subscription),
    ) -> proto::Subscription {
        let mut state = self.state();
        change(&mut state.resource);
        state.resource.clone()
    }

    /// Sets the fields that an update mask names. The caller must have checked the mask against
    /// `MUTABLE_FIELDS`.
    pub(crate) fn update(
        &self,
        wanted: &proto::Subscription,
        paths: &[String],
    ) -> Result<proto::Subscription, Status> {
        let mut state = self.state();
        settings::update(&mut state.resource, wanted, paths)?;
        Ok(state.resource.clone())
    }

    /// Notified when there might be messages to take, and when the subscription is gone.
    pub(crate) fn changed(&self) -> &Notify {
        &self.changed
    }

    /// Adds those newly published messages that match the filter, in the order of their ids.
    pub(crate) fn push<'a>(
        &self,
        published: SystemTime,
        messages: impl Iterator<Item = (MessageView<'a>, &'a Arc<StoredMessage>)>,
    ) {
        let mut state = self.state();
        if state
            .discard_before
            .is_some_and(|before| published < before)
        {
            return;
        }
        for (view, message) in messages {
            if self
                .filter
                .as_ref()
                .is_none_or(|filter| filter.matches(view))
            {
                state.backlog.push(Arc::clone(message));
            }
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// Registers a consumer. A client that reconnects with the same client id keeps the messages
    /// that it holds.
    pub(crate) fn connect(&self, client_id: &str) -> ConsumerId {
        let mut state = self.state();
        let State {
            clients,
            backlog,
            next_consumer,
            ..
        } = &mut *state;
        clients.retain(|_, client| client.connected || backlog.held(client.consumer).messages > 0);
        let consumer = ConsumerId(*next_consumer);
        *next_consumer += 1;
        if client_id.is_empty() {
            return consumer;
        }
        // While the client's first stream is open, each other stream of the client counts as a
        // separate consumer.
        let client = clients.entry(client_id.to_owned());
        let client = client.or_insert(Client {
            consumer,
            connected: false,
        });
        if client.connected {
            return consumer;
        }
        client.connected = true;
        client.consumer
    }

    /// Notes that a consumer is gone. The messages it holds stay leased until their ack deadlines
    /// end.
    pub(crate) fn disconnect(&self, consumer: ConsumerId) {
        let mut state = self.state();
        for client in state
            .clients
            .values_mut()
            .filter(|client| client.consumer == consumer)
        {
            client.connected = false;
        }
    }

    /// Leases available messages to a consumer until the ack deadline, up to the consumer's
    /// flow-control limits.
    pub(crate) fn take(
        &self,
        consumer: ConsumerId,
        ack_deadline: Duration,
        flow_control: FlowControl,
    ) -> Result<Taken, Status> {
        let mut state = self.state();
        self.check_present(&state)?;
        let now = Instant::now();
        state.backlog.expire(now);
        let held = state.backlog.held(consumer);
        let left =
            |limit: Option<usize>, held: usize| limit.map_or(usize::MAX, |l| l - held.min(l));
        let room = Room {
            messages: left(flow_control.max_messages, held.messages).min(MAX_RESPONSE_MESSAGES),
            bytes: left(flow_control.max_bytes, held.bytes).min(MAX_RESPONSE_BYTES),
        };
        let leased = state.backlog.take(consumer, now + ack_deadline, room);
        let next_expiry = state.backlog.next_expiry();
        drop(state);
        let messages = leased
            .into_iter()
            .map(|(token, message)| ReceivedMessage {
                ack_id: AckId {
                    incarnation: self.incarnation,
                    token,
                }
                .to_string(),
                message: message.encoded.clone(),
            })
            .collect();
        Ok(Taken {
            messages,
            next_expiry,
        })
    }

    /// Acknowledges messages. An ack id whose ack deadline has passed has no effect. A malformed
    /// ack id is an error.
    pub(crate) fn acknowledge(&self, ack_ids: &[String]) -> Result<(), Status> {
        let tokens = self.tokens(ack_ids)?;
        let mut state = self.state();
        self.check_present(&state)?;
        state.backlog.expire(Instant::now());
        for token in tokens.into_iter().flatten() {
            state.backlog.acknowledge(token);
        }
        drop(state);
        self.changed.notify_waiters();
        Ok(())
    }

    /// Sets new ack deadlines, counted from now. A deadline of 0 seconds makes the message available for another
    /// delivery at once.
    pub(crate) fn modify_ack_deadline(
        &self,
        ack_ids: &[String],
        seconds: impl Iterator<Item = i32> + Clone,
    ) -> Result<(), Status> {
        for seconds in seconds.clone() {
            settings::check_modified_deadline(seconds)?;
        }
        let tokens = self.tokens(ack_ids)?;
        let now = Instant::now();
        let mut state = self.state();
        self.check_present(&state)?;
        state.backlog.expire(now);
        for (token, seconds) in tokens.into_iter().zip(seconds) {
            match (token, u64::try_from(seconds)) {
                (None, _) => {}
                (Some(token), Ok(0) | Err(_)) => state.backlog.nack(token),
                (Some(token), Ok(seconds)) => {
                    state
                        .backlog
                        .extend(token, now + Duration::from_secs(seconds));
                }
            }
        }
        drop(state);
        self.changed.notify_waiters();
        Ok(())
    }

    /// Drops the backlog. If `time` is in the future, also drops every message that is published before `time`. The
    /// caller refuses a `time` in the past, because the emulator keeps no acknowledged messages to deliver again.
    pub(crate) fn seek(&self, time: SystemTime) -> Result<(), Status> {
        let mut state = self.state();
        self.check_present(&state)?;
        state.backlog.clear();
        state.discard_before = Some(time);
        Ok(())
    }

    /// Ends the delivery of messages, and wakes all waiting consumers.
    pub(crate) fn end(&self, gone: Gone) {
        let mut state = self.state();
        state.gone = Some(gone);
        state.backlog.clear();
        drop(state);
        self.changed.notify_waiters();
    }

    fn check_present(&self, state: &State) -> Result<(), Status> {
        match state.gone {
            None => Ok(()),
            Some(Gone::Deleted) => Err(names::not_found(&self.name)),
            Some(Gone::Detached) => Err(Status::failed_precondition(format!(
                "Subscription is detached (resource={}).",
                names::short(&self.name)
            ))),
        }
    }

    /// Returns the token of each ack id, or `None` for an ack id of an earlier subscription with
    /// the same name.
    fn tokens(&self, ack_ids: &[String]) -> Result<Vec<Option<Token>>, Status> {
        let token = |ack_id: &String| {
            let AckId { incarnation, token } = ack_id.parse()?;
            Ok((incarnation == self.incarnation).then_some(token))
        };
        ack_ids.iter().map(token).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
