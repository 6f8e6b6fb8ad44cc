//! Handles an event that can never be published: sets it aside according to `on_bad_event`, and first
//! sends a dead letter if there is a topic for it.
//!
//! Without a dead letter, the relay records the bad event before the events that wait behind it.
//!
//! With a dead letter, the relay records the bad event only after Pub/Sub has stored or refused the letter. The events
//! behind it may be recorded earlier. If the relay crashes before it has recorded the bad event, no event is lost:
//! PostgreSQL sends the bad event again, because its position is not confirmed.

use std::sync::Arc;

use bytes::Bytes;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
use prost::Message;
use publisher::{Failure, MessageIds};

use super::Delivery;
use super::outcomes::EventOutcomes;
use super::quarantine::{Letter, letter};
use crate::error::{Code, Error, Result};
use crate::event::{Event, EventRef, Group, OrderingKey, Standing};
use crate::lanes::{LaneKey, Lanes, Request};
use crate::mapping::{EventError, MapError};
use crate::metrics::KindLabel;
use crate::settings::OnBadEvent;
use crate::store::dispatch::{Outcome, Record};
use crate::traces::Destination;

/// Maximum length of an error's text in the dispatch table, in characters, so that the rows stay small. The
/// error's code comes before the text and does not count.
const REASON_CHARS: usize = 500;

/// What to do about an event in quarantine that can be released.
const RELEASE: &str = "fix the cause and release the event, or discard it";

/// The hint of an error under `on_bad_event = halt`.
const HALTED: &str = "neither it nor any later event is confirmed. Fix the cause and restart the \
    relay, or set on_bad_event = quarantine_key to set the event aside and continue";

impl Delivery {
    /// Sets aside an event whose row cannot become a message, and blocks the event's key if `on_bad_event` says
    /// so.
    ///
    /// # Errors
    /// The given `error` under `on_bad_event = halt`; `quarantine-full`.
    pub(crate) fn take_unmappable(&mut self, error: Box<EventError>, payload: Bytes) -> Result<()> {
        let known = error.known.clone();
        let is_hashed = known.event_id.source_id.is_some();
        let source_id = error.event_id.clone().filter(|_| is_hashed);
        let source_id = source_id.map(|id| ("source_id".to_owned(), id));
        let origin = EventRef::new(error.at, known.event_id);
        let why = error.without_id();
        // The relay cannot find the row of an event without a readable id, so nobody can release the event. The
        // error's own hint says what to do instead.
        let is_releasable = error.event_id.is_some();
        let error = Error::from(MapError::Event(error));
        if self.outcomes.quarantine.keys.policy() == OnBadEvent::Halt {
            return Err(error);
        }
        self.outcomes.metrics.events_read.inc();
        self.outcomes.flow.take_record();
        let group = Group {
            topic: known.topic.unwrap_or_default(),
            ordering_key: known.ordering_key,
        };
        let reason = reason(error.code(), &why);
        let remedy = if is_releasable {
            RELEASE
        } else {
            error.hint_text()
        };
        self.outcomes.block(&group, &origin, &error, remedy)?;
        let message = PubsubMessage {
            data: payload,
            attributes: source_id.into_iter().collect(),
            ..PubsubMessage::default()
        };
        self.outcomes.set_aside(
            group,
            origin,
            (error.code(), reason),
            message,
            &mut self.lanes,
        );
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
        if let Some(letter) = self.outcomes.take_letter(&key.topic, &event.origin) {
            self.outcomes
                .flow
                .give_back_messages(1, event.message.len());
            let code = Code::EventRefused;
            if let Some(since_last) = self.outcomes.log.due(("dead letter", code)) {
                tracing::warn!(
                    %code, event = letter.origin.event_id.shown(), since_last,
                    "Pub/Sub refuses the dead letter, too: setting the event aside without one"
                );
            }
            self.outcomes.letter_ended(letter);
            return Ok(());
        }
        if event.origin.standing == Standing::NeedsNoRow {
            self.outcomes.leave_published(&event, &error);
            return Ok(());
        }
        let Event { origin, message } = event;
        if self.outcomes.quarantine.halts_on(&origin) {
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
        self.outcomes.block(&group, &origin, &error, RELEASE)?;
        self.outcomes.flow.give_back_messages(1, message.len());
        let behind = if self.outcomes.quarantine.keys.blocks(&group) {
            self.lanes.close(key)
        } else {
            Vec::new()
        };
        let reason = reason(error.code(), &failure.to_string());
        let message = PubsubMessage::decode(message).unwrap_or_default();
        let source = self.outcomes.quarantine.in_lanes.source(origin.position);
        self.outcomes.set_aside(
            group.clone(),
            origin,
            (error.code(), reason),
            message,
            &mut self.lanes,
        );
        self.outcomes.fail_release(&group);
        if let Some(source) = source {
            self.outcomes.fail_release(&source);
        }
        for event in behind {
            self.outcomes.set_aside_waiting(&group, event);
        }
        Ok(())
    }
}

impl EventOutcomes {
    /// Registers a bad event and logs the error and its `remedy`. Blocks the event's key if `on_bad_event` says
    /// so.
    pub(super) fn block(
        &mut self,
        group: &Group,
        origin: &EventRef,
        error: &Error,
        remedy: &str,
    ) -> Result<()> {
        let newly = match origin.standing {
            Standing::New => self.quarantine.set_aside(group, origin)?,
            // A released event was counted when it was first set aside, so do not count it again. But block
            // its key again, so that the events behind it wait.
            Standing::Released if self.quarantine.keys.blocks(group) => {
                self.quarantine.set_aside(group, origin)?
            }
            Standing::Released | Standing::NeedsNoRow => false,
        };
        if let Some(more) = self.log.due(("set aside", error.code())) {
            tracing::error!(
                code = %error.code(),
                event = origin.event_id.shown(),
                topic = &*group.topic,
                key = group.ordering_key.as_str(),
                key_blocked = newly,
                blocked_keys = self.quarantine.keys.count(),
                since_last = more,
                hint = format!("run `postrider quarantine list`; {remedy}"),
                "set aside in quarantine: {error}"
            );
        }
        Ok(())
    }

    /// Sets a bad event aside: sends its dead letter, if there is a topic for it, and then records the
    /// event.
    pub(super) fn set_aside(
        &mut self,
        group: Group,
        origin: EventRef,
        (code, reason): (Code, Arc<str>),
        message: PubsubMessage,
        lanes: &mut Lanes,
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
            error: reason,
        };
        if self.joins_a_release(&about) {
            // While a key is being released, the relay may hold new events of the key in memory. They may come before
            // the bad event in commit order, so record them first.
            self.unhold();
        }
        match self.letters.topic_for(&about.origin) {
            Some(topic) => self.send_letter(topic, about, message, lanes),
            None => self.record_aside(about),
        }
    }

    /// Whether the bad event arrived while its key was being released. If so, the relay records the bad event
    /// as released. The release tries this event again after the earlier events of the key.
    fn joins_a_release(&self, about: &Letter) -> bool {
        about.origin.standing == Standing::New
            && self.quarantine.keys.blocks(&about.group)
            && self.quarantine.releases.is_releasing(&about.group)
    }

    fn send_letter(
        &mut self,
        topic: Arc<str>,
        about: Letter,
        message: PubsubMessage,
        lanes: &mut Lanes,
    ) {
        let event = Event {
            message: letter(&about, message),
            origin: about.origin.clone(),
        };
        self.flow.take_message(&event);
        self.flow.take_texts(about.origin.event_id.text_bytes());
        self.quarantine.letter_sent(&about.group);
        self.letters.sent(about);
        lanes.push(topic, OrderingKey::UNORDERED, event);
    }

    /// Records the events whose dead letters were just stored. Removes the letters from the request, and
    /// their message ids from `ids`, so that only ordinary events remain.
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

    pub(super) fn take_letter(&mut self, topic: &Arc<str>, origin: &EventRef) -> Option<Letter> {
        let letter = self.letters.take(topic, origin)?;
        self.flow
            .give_back_texts(letter.origin.event_id.text_bytes());
        Some(letter)
    }

    pub(super) fn letter_ended(&mut self, letter: Letter) {
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
}

/// Code and text of an error for the dispatch table; the text is shortened to [`REASON_CHARS`].
pub(super) fn reason(code: Code, text: &str) -> Arc<str> {
    let text = text.chars().filter(|c| *c != '\0').take(REASON_CHARS);
    format!("{code}: {}", text.collect::<String>()).into()
}
