//! Handles the outcomes of events. An event is published, set aside in quarantine, or keeps its earlier outcome.
//!
//! [`EventOutcomes`] owns everything that an outcome changes: the flow control, the quarantine, the writer of the
//! dispatch rows, and the metrics. It sends nothing to Pub/Sub itself.
//!
//! Not here: the time at which an event is sent (`lanes`, `requests`), and the treatment of bad events
//! (`bad_events`).

use std::sync::Arc;

use super::flow_control::FlowControl;
use super::quarantine::{DeadLetters, Quarantine};
use super::records::Recorder;
use crate::capture::unrecorded::stays_published;
use crate::error::{Code, Result};
use crate::event::{Event, EventRef, Group, OrderingKey, Standing};
use crate::lanes::Request;
use crate::metrics::{KindLabel, Metrics};
use crate::store::dispatch::{Outcome, Record, WriterEvent, Written};
use crate::throttled_log::ThrottledLog;
use crate::traces::{Destination, Traces};
use publisher::MessageIds;

/// The outcomes of one session's events, and everything that an outcome changes.
pub(super) struct EventOutcomes {
    pub(super) flow: FlowControl,
    pub(super) recorder: Recorder,
    pub(super) quarantine: Quarantine,
    pub(super) letters: DeadLetters,
    pub(super) metrics: Metrics,
    pub(super) traces: Traces,
    /// Limits repeated log lines. Lines with the same name and error code count as repeated.
    pub(super) log: ThrottledLog<(&'static str, Code)>,
}

impl EventOutcomes {
    /// Handles a request that Pub/Sub has stored: returns its memory to the budget, updates metrics and traces, and
    /// records its events.
    pub(super) fn published(&mut self, mut request: Request, mut message_ids: MessageIds) {
        let at = self.metrics.server_clock.now();
        self.metrics.publish_requests.inc();
        self.metrics
            .batch_events
            .observe(request.events.len() as f64);
        self.metrics.last_published.now();
        let bytes = request.events.iter().map(|event| event.message.len()).sum();
        self.flow.give_back_messages(request.events.len(), bytes);
        if !self.letters.none_in_flight() {
            self.letters_published(&mut request, &mut message_ids);
        }
        let Some(first) = request.events.first() else {
            return;
        };
        self.metrics
            .events_published
            .inc_by(request.events.len() as u64);
        if first.origin.standing == Standing::New
            && let Some(committed) = first.origin.commit_time.to_system_time()
        {
            let latency = at.duration_since(committed).unwrap_or_default();
            self.metrics.latency.observe(latency.as_secs_f64());
            self.metrics.recent_latency.add(latency);
        }
        let to = Destination {
            topic: &request.key.topic,
            ordering_key: request.key.ordering_key.as_str(),
        };
        self.traces.published(to, &request.events, &message_ids, at);
        let events = request.events.into_iter().map(|event| event.origin);
        let mut events: Vec<EventRef> = events.collect();
        if !self.recorder.keeping.records_published() {
            leave_without_rows(&mut events);
            if self.resolves_at_once(&events) {
                for event in &events {
                    self.recorder.resolve(event.position);
                }
                self.flow.give_back_records(events.len());
                return;
            }
        }
        self.record(Record {
            topic: Some(request.key.topic),
            ordering_key: request.key.ordering_key,
            at,
            events,
            outcome: Outcome::Published(message_ids),
        });
    }

    /// Whether events that get no dispatch row may be resolved at once. They must not be resolved while any record is
    /// not durable yet, because such a record may belong to a released event that comes before them. If a crash lost
    /// this record, the next session would publish the released event again, after these events.
    pub(super) fn resolves_at_once(&self, events: &[EventRef]) -> bool {
        let is_released = |event: &EventRef| event.standing == Standing::Released;
        self.quarantine.is_settled() && !events.iter().any(is_released)
    }

    /// Passes an outcome to the writer of the dispatch rows. The outcome is durable when the writer answers
    /// ([`Self::on_written`]).
    pub(super) fn record(&mut self, record: Record) {
        self.quarantine.handed(&record);
        self.flow.take_texts(record.text_bytes());
        self.recorder.writer.record(record);
    }

    /// Handles an answer of the writer of the dispatch rows.
    ///
    /// # Errors
    /// The error with which the writer failed. It ends the session.
    pub(super) fn on_written(&mut self, event: WriterEvent) -> Result<()> {
        match event {
            WriterEvent::Recorded(Written {
                resolved,
                events,
                text_bytes,
                records,
            }) => {
                self.flow.give_back_records(events);
                self.flow.give_back_texts(text_bytes);
                self.metrics.events_recorded.inc_by(events as u64);
                self.quarantine.durable(records);
                self.recorder.resolved.extend(resolved);
                if std::mem::take(&mut self.recorder.cannot_record) {
                    self.metrics.troubles.can_record();
                    if std::mem::take(&mut self.recorder.log_says_failing) {
                        tracing::info!("outcomes are recorded again");
                    }
                }
                Ok(())
            }
            WriterEvent::Retrying(error) => {
                self.recorder.cannot_record = true;
                self.metrics.troubles.cannot_record(&error);
                if let Some(since_last) = self.log.due(("cannot record", error.code())) {
                    self.recorder.log_says_failing = true;
                    tracing::warn!(
                        code = %error.code(), hint = error.hint_text(), since_last,
                        "cannot write outbox.dispatch, retrying: {error}"
                    );
                }
                Ok(())
            }
            WriterEvent::Failed(error) => Err(error),
        }
    }

    /// Records an event of a blocked key. The event then waits in quarantine, or behind the released events
    /// of the key. If the event was published before, this method drops it without a new record.
    pub(super) fn set_aside_behind(
        &mut self,
        topic: Arc<str>,
        ordering_key: OrderingKey,
        event: Event,
        outcome: Outcome,
    ) {
        if event.origin.standing == Standing::NeedsNoRow {
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

    /// Drops an event that was published before and cannot be published again now. Does not change the
    /// event's row, if there is one, so the event still counts as published.
    pub(super) fn leave_published(&mut self, event: &Event, why: &dyn std::fmt::Display) {
        stays_published(&event.origin.event_id, why);
        self.flow.give_back_messages(1, event.message.len());
        self.flow.give_back_records(1);
        self.recorder.resolve(event.origin.position);
    }

    /// Sets aside an event that was waiting in its lane when its key became blocked.
    pub(super) fn set_aside_waiting(&mut self, group: &Group, event: Event) {
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

    /// Drops a released event that was in a lane. Records no new outcome, so the event's row still says that
    /// the event is released. Then fails the release of the event's key, which puts the row back into
    /// quarantine.
    pub(super) fn drop_released(&mut self, event: &Event) {
        self.flow.give_back_messages(1, event.message.len());
        self.flow.give_back_records(1);
        if let Some(group) = self.quarantine.left_lane(event.origin.position) {
            self.fail_release(&group);
        }
    }

    /// Records all events that wait in memory while their keys are being released. This frees the memory. The
    /// relay reads the events from the tables again when their turn comes.
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

    /// Ends the release of the group, if one is running, because an event of the group is bad. Sets aside the events
    /// that waited for the release.
    pub(super) fn fail_release(&mut self, group: &Group) {
        for event in self.quarantine.fail(group) {
            self.set_aside_waiting(group, event);
        }
    }
}

/// Marks new events so that they get no dispatch row, because this session records no published events. A released
/// event keeps its row.
fn leave_without_rows(events: &mut [EventRef]) {
    for event in events {
        if event.standing == Standing::New {
            event.standing = Standing::NeedsNoRow;
        }
    }
}
