//! Takes an event to its recorded outcome, through lanes, requests, answers and dispatch rows.
//!
//! This part of a session does not depend on where an event came from. [`Delivery::progress`] returns
//! how many events are resolved; the caller decides what that means for the position in the log.
//!
//! `requests` sends what the lanes choose and decides what follows from each answer. `records` hands
//! outcomes to the writer, and `failing_topics` knows which topics fail. [`flow_control`] bounds the
//! memory of events, and says when lanes linger. `bad_events` handles events that
//! can never be published, [`quarantine`] keeps their keys waiting, and `released` handles events that are
//! released from quarantine. [`topic_maker`] creates missing topics.
//!
//! **Invariants.** An event is resolved only when its dispatch row is durable, or when it needs no row. A
//! key has at most one request in flight. Events in memory count against one budget.
//!
//! Not here: the order within a key (`lanes`), one publish attempt (the crate `publisher`), the rows
//! themselves (`store`), and positions of the stream (`watermark`).

mod bad_events;
mod failing_topics;
pub(crate) mod flow_control;
pub(crate) mod quarantine;
mod records;
mod released;
mod requests;
pub(crate) mod topic_maker;

use std::sync::Arc;
use std::time::Instant;

use replication::CommitLsn;

use failing_topics::FailingTopics;
use flow_control::FlowControl;
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
use crate::store::dispatch::{Outcome, SlotReader};
use crate::throttled_log::ThrottledLog;
use crate::traces::Traces;

/// Delivers the events of one session.
pub(crate) struct Delivery {
    lanes: Lanes,
    flow: FlowControl,
    attempts: Attempts,
    topic_maker: TopicMaker,
    failing: FailingTopics,
    recorder: Recorder,
    quarantine: Quarantine,
    releases: Releases,
    letters: DeadLetters,
    metrics: Metrics,
    traces: Traces,
    /// Limits log lines that repeat.
    log: ThrottledLog,
}

impl Delivery {
    /// Creates a delivery without events.
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
            flow: FlowControl::new(settings.in_flight_bytes),
            attempts,
            topic_maker,
            failing: FailingTopics::new(metrics.troubles.clone()),
            recorder: Recorder::start(settings, reader),
            quarantine,
            releases: Releases::new(releaser),
            letters: DeadLetters::new(settings.dead_letter_topic()?),
            metrics,
            traces,
            log: ThrottledLog::default(),
        })
    }

    /// Takes over an event, behind all others of its key.
    pub(crate) fn take(&mut self, topic: Arc<str>, ordering_key: OrderingKey, event: Event) {
        self.flow.take(&event);
        self.metrics.events_read.inc();
        let at = event.origin.position;
        match self.quarantine.admit(&topic, &ordering_key, at) {
            Admission::Open => self.lanes.push(topic, ordering_key, event),
            Admission::Quarantined(why) => {
                self.set_aside_behind(topic, ordering_key, event, Outcome::Quarantined(why));
            }
            Admission::Released(why) => {
                self.set_aside_behind(topic, ordering_key, event, Outcome::Released(why));
            }
            Admission::Held => {
                self.quarantine.releases.hold(topic, ordering_key, event);
            }
        }
    }

    /// Whether more events may be read. While lanes wait for a retry or for their topic, reading continues
    /// until the budget has no room at all, so that the waiting events do not hold up other keys.
    pub(crate) fn takes_events(&self) -> bool {
        !self.flow.stops_reading() || (self.flow.has_room() && self.lanes.waiting() > 0)
    }

    /// Sets the memory of the moved rows that wait outside the delivery.
    pub(crate) fn weigh_waiting(&mut self, bytes: usize) {
        self.flow.weigh_waiting(bytes);
    }

    /// Notes that the stream has caught up: the backlog has ended.
    pub(crate) fn caught_up(&mut self) {
        self.flow.caught_up();
    }

    /// Whether lanes should linger for more events.
    fn may_linger(&mut self) -> bool {
        self.flow.weigh_lanes(self.lanes.len());
        self.flow.may_linger(self.lanes.waiting() == 0)
    }

    /// Waits until something happens, and returns the number of newly resolved events per transaction;
    /// the list is often empty. Cancel-safe.
    ///
    /// # Errors
    /// Errors that only a person can fix.
    pub(crate) async fn progress(&mut self) -> Result<Vec<(CommitLsn, u64)>> {
        let resolved = self.recorder.take_resolved();
        if !resolved.is_empty() {
            return Ok(resolved);
        }
        if self.flow.queue_is_full() || !self.flow.has_room() {
            // Held events are not sent, so they would keep the budget spent.
            self.unhold();
        }
        self.ask();
        let next_due = self.lanes.next_due();
        let queued = self.quarantine.in_lanes.bytes();
        let has_room = self.takes_events() && self.flow.may_release(queued);
        tokio::select! {
            biased;
            // Poll these answers first. They arrive so rarely that they never hold up the other branches.
            found = self.releases.woken(has_room) => {
                if let Some(found) = found {
                    self.on_found(found)?;
                }
            }
            event = self.recorder.written() => self.on_written(event?)?,
            Some(answer) = self.attempts.answer() => {
                self.on_answer(answer)?;
                while let Some(answer) = self.attempts.try_answer() {
                    self.on_answer(answer)?;
                }
            }
            topic = self.topic_maker.made() => self.lanes.hasten(&topic, Instant::now()),
            () = until(next_due), if next_due.is_some() => {}
        }
        Ok(self.recorder.take_resolved())
    }

    /// Sets the gauges.
    pub(crate) fn measure(&mut self) {
        self.failing.survey(&self.lanes);
        self.metrics.in_flight_bytes.set(self.flow.used() as i64);
        self.metrics
            .in_flight_requests
            .set(self.lanes.in_flight() as i64);
        self.metrics.lanes.set(self.lanes.len() as i64);
        self.metrics.lanes_waiting.set(self.lanes.waiting() as i64);
        let blocked = self.quarantine.keys.count();
        self.metrics.blocked_keys.set(Some(blocked as f64));
    }
}

/// Sleeps until `due`, or forever if `due` is `None`.
pub(crate) async fn until(due: Option<Instant>) {
    match due {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
