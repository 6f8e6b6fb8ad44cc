//! Handles an event that can never be published: sets it aside by policy, after sending a dead letter
//! if there is a topic for it.
//!
//! Without a dead letter, the bad event is recorded first, and then the events that wait behind it. With
//! a dead letter, the bad event is recorded once the letter is stored or refused. After a crash at any
//! point, the events that are not recorded arrive again in order.

use std::sync::Arc;

use bytes::Bytes;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
use prost::Message;
use publisher::{Failure, MessageIds};

use super::Delivery;
use super::quarantine::{Letter, letter};
use crate::capture::unrecorded::stays_published;
use crate::error::{Code, Error, Result};
use crate::event::{Event, EventRef, Group, OrderingKey, Standing};
use crate::lanes::{LaneKey, Request};
use crate::mapping::{EventError, MapError};
use crate::metrics::KindLabel;
use crate::settings::OnBadEvent;
use crate::store::dispatch::{Outcome, Record};
use crate::traces::Destination;

/// Maximum length of a reason in the dispatch table, in characters.
const REASON_CHARS: usize = 500;

/// The hint of an error under `on_bad_event = halt`.
const HALTED: &str = "neither it nor any later event is confirmed. Fix the cause and restart the \
    relay, or set on_bad_event = quarantine_key to set the event aside and continue";

impl Delivery {
    /// Takes over a row that cannot become a message.
    ///
    /// # Errors
    /// The row's own error under `halt`; `quarantine-full`.
    pub(crate) fn take_unmappable(&mut self, error: Box<EventError>, payload: Bytes) -> Result<()> {
        let known = error.known.clone();
        let is_hashed = known.event_id.source_id.is_some();
        let source_id = error.event_id.clone().filter(|_| is_hashed);
        let source_id = source_id.map(|id| ("source_id".to_owned(), id));
        let origin = EventRef::new(error.at, known.event_id);
        // The text leaves out the event's id and position, because the record has them already.
        let why = format!("{} (table {})", error.fault, error.table);
        let error = Error::from(MapError::Event(error));
        if self.quarantine.keys.policy() == OnBadEvent::Halt {
            return Err(error);
        }
        self.metrics.events_read.inc();
        self.flow.take_record();
        let group = Group {
            topic: known.topic.unwrap_or_default(),
            ordering_key: known.ordering_key,
        };
        let reason = reason(error.code(), &why);
        self.block(&group, &origin, &error)?;
        let message = PubsubMessage {
            data: payload,
            attributes: source_id.into_iter().collect(),
            ..PubsubMessage::default()
        };
        self.set_aside(group, origin, reason, error.code(), message);
        Ok(())
    }

    /// Handles an event that Pub/Sub refused when the event was alone in its request.
    pub(super) fn on_refused(
        &mut self,
        key: &LaneKey,
        event: Event,
        error: Error,
        failure: &Failure,
    ) -> Result<()> {
        if let Some(letter) = self.take_letter(&key.topic, &event.origin) {
            self.flow.give_back_messages(1, event.message.len());
            tracing::warn!(
                code = %Code::EventRefused, event = letter.origin.event_id.shown(),
                "Pub/Sub refuses the dead letter, too: setting the event aside without one"
            );
            self.letter_ended(letter);
            return Ok(());
        }
        if event.origin.standing == Standing::Repeated {
            self.leave_published(&event, &error);
            return Ok(());
        }
        let Event { origin, message } = event;
        if self.quarantine.halts_on(&origin) {
            return Err(error.hint(format!(
                "the event is {} ({}), key {:?}; {HALTED}",
                origin.event_id.shown(),
                origin.position,
                key.ordering_key,
            )));
        }
        let group = Group {
            topic: key.topic.clone(),
            ordering_key: key.ordering_key.clone(),
        };
        self.block(&group, &origin, &error)?;
        self.flow.give_back_messages(1, message.len());
        let behind = if self.quarantine.keys.blocks(&group) {
            self.lanes.close(key)
        } else {
            Vec::new()
        };
        let reason = reason(error.code(), &failure.to_string());
        let message = PubsubMessage::decode(message).unwrap_or_default();
        let source = self.quarantine.in_lanes.source(origin.position);
        self.set_aside(group.clone(), origin, reason, error.code(), message);
        self.fail_release(&group);
        if let Some(source) = source {
            self.fail_release(&source);
        }
        for event in behind {
            self.set_aside_waiting(&group, event);
        }
        Ok(())
    }

    /// Registers a bad event, which blocks its key if the policy says so, and logs the error.
    fn block(&mut self, group: &Group, origin: &EventRef, error: &Error) -> Result<()> {
        let newly = match origin.standing {
            Standing::New => self.quarantine.set_aside(group, origin)?,
            // A released event was counted when it first arrived. Block its key again, for the events
            // behind it.
            Standing::Released if self.quarantine.keys.blocks(group) => {
                self.quarantine.set_aside(group, origin)?
            }
            Standing::Released | Standing::Repeated => false,
        };
        if let Some(more) = self.log.due(error.code()) {
            tracing::error!(
                code = %error.code(),
                event = origin.event_id.shown(),
                topic = &*group.topic,
                key = group.ordering_key.as_str(),
                key_blocked = newly,
                blocked_keys = self.quarantine.keys.count(),
                since_last = more,
                hint = "run `postrider quarantine list`; fix the cause and release the event, or \
                        discard it",
                "set aside in quarantine: {error}"
            );
        }
        Ok(())
    }

    /// Sets a bad event aside: sends its dead letter, if there is a topic for it, and then records the
    /// event.
    fn set_aside(
        &mut self,
        group: Group,
        origin: EventRef,
        error: Arc<str>,
        code: Code,
        message: PubsubMessage,
    ) {
        let kind = code.name();
        let quarantined = &self.metrics.events_quarantined;
        quarantined.get_or_create(&KindLabel { kind }).inc();
        let to = Destination {
            topic: &group.topic,
            ordering_key: group.ordering_key.as_str(),
        };
        let at = self.metrics.server_clock.now();
        self.traces.set_aside(to, &origin, &message, code, at);
        let about = Letter {
            group,
            origin,
            error,
        };
        if self.joins_a_release(&about) {
            // Record the held events first, because they may come before this event.
            self.unhold();
        }
        match self.letters.topic_for(&about.origin) {
            Some(topic) => self.send_letter(topic, about, message),
            None => self.record_aside(about),
        }
    }

    /// Whether the bad event joins a release of its key. If it does, the event is recorded as
    /// released, to keep the order of the key.
    fn joins_a_release(&self, about: &Letter) -> bool {
        about.origin.standing == Standing::New
            && self.quarantine.keys.blocks(&about.group)
            && self.quarantine.releases.is_releasing(&about.group)
    }

    fn send_letter(&mut self, topic: Arc<str>, about: Letter, message: PubsubMessage) {
        let event = Event {
            message: letter(&about, message),
            origin: about.origin.clone(),
        };
        self.flow.take_message(&event);
        self.flow.take_texts(about.origin.event_id.text_bytes());
        self.quarantine.letter_sent(&about.group);
        self.letters.sent(about);
        self.lanes.push(topic, OrderingKey::UNORDERED, event);
    }

    /// Records the events whose dead letters were just stored, and removes those letters from the
    /// request.
    pub(super) fn letters_published(&mut self, request: &mut Request, ids: &mut MessageIds) {
        let events = std::mem::take(&mut request.events);
        let mut others = Vec::new();
        for (n, event) in events.into_iter().enumerate() {
            match self.take_letter(&request.key.topic, &event.origin) {
                Some(letter) => self.letter_ended(letter),
                None => {
                    request.events.push(event);
                    others.push(n);
                }
            }
        }
        *ids = ids.of(&others);
    }

    fn take_letter(&mut self, topic: &Arc<str>, origin: &EventRef) -> Option<Letter> {
        let letter = self.letters.take(topic, origin)?;
        self.flow
            .give_back_texts(letter.origin.event_id.text_bytes());
        Some(letter)
    }

    fn letter_ended(&mut self, letter: Letter) {
        let group = letter.group.clone();
        self.record_aside(letter);
        self.quarantine.letter_ended(&group);
    }

    fn record_aside(&mut self, about: Letter) {
        let outcome = if self.joins_a_release(&about) {
            Outcome::Released
        } else {
            Outcome::Quarantined
        };
        let Letter {
            group,
            origin,
            error,
        } = about;
        self.record(Record {
            topic: Some(group.topic).filter(|topic| !topic.is_empty()),
            ordering_key: group.ordering_key,
            at: self.metrics.server_clock.now(),
            events: vec![origin],
            outcome: outcome(error),
        });
    }

    /// Sets aside an event that waited in its lane when its key was blocked.
    fn set_aside_waiting(&mut self, group: &Group, event: Event) {
        if event.origin.standing == Standing::Released {
            self.drop_released(&event);
            return;
        }
        let why = self.quarantine.keys.waits_for(group);
        let Group {
            topic,
            ordering_key,
        } = group.clone();
        self.set_aside_behind(topic, ordering_key, event, Outcome::Quarantined(why));
    }

    /// Records an event of a blocked key, so that it waits in quarantine or behind the released
    /// events of the key. If the event was published before, drops it without a record.
    pub(super) fn set_aside_behind(
        &mut self,
        topic: Arc<str>,
        ordering_key: OrderingKey,
        event: Event,
        outcome: Outcome,
    ) {
        if event.origin.standing == Standing::Repeated {
            self.leave_published(&event, &"an event before it is in quarantine");
            return;
        }
        let quarantined = &self.metrics.events_quarantined;
        quarantined
            .get_or_create(&KindLabel { kind: "waits" })
            .inc();
        self.flow.give_back_messages(1, event.message.len());
        self.record(Record {
            topic: Some(topic),
            ordering_key,
            at: self.metrics.server_clock.now(),
            events: vec![event.origin],
            outcome,
        });
    }

    /// Drops an event that was published before and cannot be published again now. The event's row
    /// stays as it is.
    fn leave_published(&mut self, event: &Event, why: &dyn std::fmt::Display) {
        stays_published(&event.origin.event_id, why);
        self.flow.give_back_messages(1, event.message.len());
        self.flow.give_back_records(1);
        self.recorder.resolve(event.origin.position.commit);
    }

    /// Records all events that are held in memory while their keys are being released. This frees their
    /// memory.
    pub(super) fn unhold(&mut self) {
        for (group, why, events) in self.quarantine.unhold() {
            for event in events {
                let Group {
                    topic,
                    ordering_key,
                } = group.clone();
                self.set_aside_behind(topic, ordering_key, event, Outcome::Released(why.clone()));
            }
        }
    }

    /// Fails the release of the group, if there is one, because an event of the group is bad.
    pub(super) fn fail_release(&mut self, group: &Group) {
        for event in self.quarantine.fail(group) {
            self.set_aside_waiting(group, event);
        }
    }

    /// Drops a released event that was in a lane, without a new outcome. The event's row stays as it
    /// is.
    fn drop_released(&mut self, event: &Event) {
        self.flow.give_back_messages(1, event.message.len());
        self.flow.give_back_records(1);
        if let Some(group) = self.quarantine.left_lane(event.origin.position) {
            self.fail_release(&group);
        }
    }
}

/// Code and text of an error, shortened for the table.
pub(super) fn reason(code: Code, text: &str) -> Arc<str> {
    let text = text.chars().filter(|c| *c != '\0').take(REASON_CHARS);
    format!("{code}: {}", text.collect::<String>()).into()
}
