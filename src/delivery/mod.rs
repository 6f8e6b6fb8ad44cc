//! Delivers events: puts each event into a lane, sends it to Pub/Sub, handles the answer, and records the outcome
//! in a dispatch row.
//!
//! This part of a session works in the same way for events from the stream and for events from a table.
//! [`Delivery::progress`] returns the resolved events. From these events, the caller computes the confirmed position.
//!
//! `requests` sends the requests that the lanes choose and decides what follows from each answer. `outcomes` handles
//! the outcome of each event, and `records` has the writer of the dispatch rows. `failing_topics` knows which topics
//! fail. [`flow_control`] limits the memory of events, and says when lanes linger. `bad_events` handles events that
//! can never be published, [`quarantine`] makes the later events of their keys wait, and `released` publishes events
//! that are released from quarantine. [`topic_maker`] creates missing topics. `census` lists the unresolved events.
//!
//! **Invariants.** An event is resolved only when its dispatch row is durable, or when it needs no row. A
//! key has at most one request in flight. All events in memory count against one budget.
//!
//! Not here: the order within a key (`lanes`), one publish attempt (the crate `publisher`), the SQL of
//! the rows (`store`), and positions of the stream (`watermark`).

mod bad_events;
mod census;
mod failing_topics;
pub(crate) mod flow_control;
mod outcomes;
pub(crate) mod quarantine;
mod records;
mod released;
mod requests;
pub(crate) mod topic_maker;

use std::sync::Arc;
use std::time::Instant;

use census::Census;
pub(crate) use failing_topics::EarlierFailures;
use failing_topics::FailingTopics;
use flow_control::FlowControl;
use outcomes::EventOutcomes;
use quarantine::{Admission, DeadLetters, Quarantine, Releaser};
use records::Recorder;
use released::Releases;
pub(crate) use requests::Attempts;
use topic_maker::TopicMaker;

use crate::error::Result;
use crate::event::{Event, OrderingKey};
use crate::lanes::Lanes;
use crate::metrics::Metrics;
use crate::settings::Settings;
use crate::store::dispatch::{Outcome, ResolvedEvents, SlotReader};
use crate::throttled_log::ThrottledLog;
use crate::traces::Traces;

/// Delivers the events of one session.
pub(crate) struct Delivery {
    lanes: Lanes,
    attempts: Attempts,
    topic_maker: TopicMaker,
    failing: FailingTopics,
    releases: Releases,
    outcomes: EventOutcomes,
    /// The running census. `None` if none was requested.
    census: Option<Census>,
}

impl Delivery {
    /// Creates the delivery of a new session. It has no events yet.
    pub(crate) fn new(
        settings: &Settings,
        attempts: Attempts,
        topic_maker: TopicMaker,
        quarantine: Quarantine,
        metrics: Metrics,
        traces: Traces,
        reader: SlotReader,
    ) -> Result<Self> {
        let project = Arc::from(settings.project()?);
        let releaser = Releaser::start(
            reader.target().clone(),
            settings.slot.clone(),
            settings.tables.clone(),
            project,
        );
        Ok(Self {
            lanes: Lanes::new(settings.in_flight_requests),
            attempts,
            topic_maker,
            failing: FailingTopics::new(metrics.troubles.clone(), EarlierFailures::default()),
            releases: Releases::new(releaser),
            census: None,
            outcomes: EventOutcomes {
                flow: FlowControl::new(settings.in_flight_bytes),
                recorder: Recorder::start(settings, reader, &metrics.troubles),
                quarantine,
                letters: DeadLetters::new(settings.dead_letter_topic()?),
                metrics,
                traces,
                log: ThrottledLog::default(),
            },
        })
    }

    /// Continues the list of the topics that failed in earlier sessions.
    pub(crate) fn continuing(mut self, earlier: EarlierFailures) -> Self {
        let shared = self.outcomes.metrics.troubles.clone();
        self.failing = FailingTopics::new(shared, earlier);
        self
    }

    /// Takes over an event. It is published after all earlier events of its key, or set aside if its key
    /// is blocked.
    pub(crate) fn take(&mut self, topic: Arc<str>, ordering_key: OrderingKey, event: Event) {
        self.outcomes.flow.take(&event);
        self.outcomes.metrics.events_read.inc();
        let at = event.origin.position;
        let admission = self.outcomes.quarantine.admit(&topic, &ordering_key, at);
        self.put(admission, topic, ordering_key, event);
    }

    /// Puts an event into its lane or into quarantine, or holds it in memory while its key is being released.
    fn put(
        &mut self,
        admission: Admission,
        topic: Arc<str>,
        ordering_key: OrderingKey,
        event: Event,
    ) {
        match admission {
            Admission::Open => self.lanes.push(topic, ordering_key, event),
            Admission::Quarantined(why) => {
                self.outcomes.set_aside_behind(
                    topic,
                    ordering_key,
                    event,
                    Outcome::Quarantined(why),
                );
            }
            Admission::Released(why) => {
                self.outcomes
                    .set_aside_behind(topic, ordering_key, event, Outcome::Released(why));
            }
            Admission::Held => {
                self.outcomes
                    .quarantine
                    .releases
                    .hold(topic, ordering_key, event);
            }
        }
    }

    /// Whether the session may read more events. Usually it stops reading while a gate of `flow_control` is closed.
    /// While lanes wait for a retry or for a throttled topic, it reads on until the budget is full, because otherwise
    /// the waiting events would hold up other keys.
    pub(crate) fn takes_events(&self) -> bool {
        !self.outcomes.flow.stops_reading()
            || (self.outcomes.flow.has_room() && self.lanes.waiting() > 0)
    }

    /// Sets the number of bytes of the moved rows that still wait in `capture::moved`. These bytes count
    /// against the budget although the rows have not entered the delivery yet.
    pub(crate) fn weigh_waiting(&mut self, bytes: usize) {
        self.outcomes.flow.weigh_waiting(bytes);
    }

    /// Notes that the stream has caught up, so the backlog has ended.
    pub(crate) fn caught_up(&mut self) {
        self.outcomes.flow.caught_up();
    }

    /// Whether lanes should linger for more events.
    fn may_linger(&mut self) -> bool {
        self.outcomes.flow.weigh_lanes(self.lanes.len());
        self.outcomes.flow.may_linger(self.lanes.waiting() == 0)
    }

    /// Waits for an answer or for the next due time, and handles it. Returns the newly resolved events; often
    /// there are none. Cancel-safe.
    ///
    /// # Errors
    /// An error that must end the session.
    pub(crate) async fn progress(&mut self) -> Result<ResolvedEvents> {
        let resolved = self.outcomes.recorder.take_resolved();
        if !resolved.is_empty() {
            return Ok(resolved);
        }
        if self.outcomes.flow.queue_is_full() || !self.outcomes.flow.has_room() {
            // Record the held events to free their memory. They are not in lanes, so sending cannot free it.
            self.outcomes.unhold();
        }
        self.ask();
        let next_due = self.lanes.next_due();
        let queued = self.outcomes.quarantine.in_lanes.bytes();
        let has_room = self.takes_events() && self.outcomes.flow.may_release(queued);
        tokio::select! {
            biased;
            // Poll the answers about releases first. They are so rare that they never delay other branches.
            found = self.releases.woken(has_room) => {
                if let Some(found) = found {
                    self.on_found(found)?;
                }
            }
            event = self.outcomes.recorder.written() => self.outcomes.on_written(event?)?,
            Some(answer) = self.attempts.answer() => {
                self.on_answer(answer)?;
                while let Some(answer) = self.attempts.try_answer() {
                    self.on_answer(answer)?;
                }
            }
            topic = self.topic_maker.made() => self.lanes.hasten(&topic, Instant::now()),
            () = until(next_due), if next_due.is_some() => {}
        }
        self.finish_census();
        Ok(self.outcomes.recorder.take_resolved())
    }

    /// Number of events in memory, which are not resolved yet.
    pub(crate) fn events_in_memory(&self) -> usize {
        self.outcomes.flow.events()
    }

    /// Sets the gauges of the delivery, and surveys the failing topics if a survey is due.
    pub(crate) fn measure(&mut self) {
        self.failing.survey(&self.lanes);
        self.outcomes
            .metrics
            .in_flight_bytes
            .set(self.outcomes.flow.used() as i64);
        self.outcomes
            .metrics
            .in_flight_requests
            .set(self.lanes.in_flight() as i64);
        self.outcomes.metrics.lanes.set(self.lanes.len() as i64);
        self.outcomes
            .metrics
            .lanes_waiting
            .set(self.lanes.waiting() as i64);
        let blocked = self.outcomes.quarantine.keys.count();
        self.outcomes.metrics.blocked_keys.set(Some(blocked as f64));
    }
}

/// Sleeps until `due`, or forever if `due` is `None`.
pub(crate) async fn until(due: Option<Instant>) {
    match due {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
