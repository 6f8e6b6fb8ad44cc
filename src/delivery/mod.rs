//! Takes an event to its recorded outcome: lanes, requests, answers, dispatch rows.
//!
//! This part of a session does not depend on where an event came from. [`Delivery::progress`] returns
//! which events have their outcome; the caller decides what that means for the position.
//!
//! `requests` sends what the lanes choose and decides what follows from each answer. `records` hands
//! outcomes to the writer, and `failing_topics` knows which topics fail. [`backlog`] and
//! `budget` say when lanes may send, and how much may be in memory. `bad_events` handles events that
//! can never be published, [`quarantine`] keeps their keys waiting, and `released` handles events that
//! return from there. [`topic_maker`] creates missing topics.
//!
//! **Invariants.** An event is resolved only when its row is durable, or when it needs none. A key has
//! at most one request in flight. Events in memory count against one budget.
//!
//! Not here: the order within a key (`lanes`), one publish attempt (`publish`), the rows themselves
//! (`store`), and positions of the stream (`watermark`).

pub(crate) mod backlog;
mod bad_events;
mod budget;
mod failing_topics;
pub(crate) mod quarantine;
mod records;
mod released;
mod requests;
pub(crate) mod topic_maker;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use replication::CommitLsn;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use budget::Budget;
use failing_topics::FailingTopics;
use quarantine::{Admission, EventPlace, Letter, Quarantine, Releaser};
use released::Releases;
use requests::Answer;
use topic_maker::TopicMaker;

use crate::error::{Code, Error, Result};
use crate::event::{Event, OrderingKey};
use crate::lanes::Lanes;
use crate::metrics::Metrics;
use crate::publish::{Backoff, Publisher};
use crate::settings::{Dispatch, Settings};
use crate::store::dispatch::{DispatchWriter, Outcome, SlotReader, WriterEvent, Written};
use crate::throttled_log::ThrottledLog;

/// Minimum time for writing dispatch rows when a session ends. So one answer that never comes does
/// not cost the records of those that came.
const WRITER_LIMIT: Duration = Duration::from_secs(3);

/// Delivers the events of one session.
pub(crate) struct Delivery {
    lanes: Lanes,
    writer: DispatchWriter,
    written: mpsc::UnboundedReceiver<WriterEvent>,
    publisher: Publisher,
    topic_maker: TopicMaker,
    budget: Budget,
    backoff: Backoff,
    metrics: Metrics,
    failing: FailingTopics,
    /// Limits the lines about records that cannot be written.
    log: ThrottledLog,
    publishing: JoinSet<Answer>,
    quarantine: Quarantine,
    releases: Releases,
    /// Full name of the topic for copies of bad events.
    dead_letter_topic: Option<Arc<str>>,
    /// Dead letters in flight, by the place of their event.
    letters: HashMap<EventPlace, Letter>,
    /// Whether published events get a row.
    dispatch: Dispatch,
    /// Events that are resolved without a row.
    resolved: Written,
    /// Whether the writer's last attempt has failed.
    cannot_record: bool,
}

impl Delivery {
    /// A delivery without events. `seed` makes the pauses of this session differ from another's.
    pub(crate) fn new(
        settings: &Settings,
        publisher: Publisher,
        topic_maker: TopicMaker,
        quarantine: Quarantine,
        metrics: Metrics,
        reader: SlotReader,
        seed: u64,
    ) -> Result<Self> {
        let (written_sender, written) = mpsc::unbounded_channel();
        let target = settings.database()?.clone();
        let project = Arc::from(settings.project()?);
        let releaser = Releaser::start(
            target.clone(),
            settings.slot.clone(),
            settings.tables.clone(),
            project,
        );
        Ok(Self {
            lanes: Lanes::new(settings.in_flight_requests),
            writer: DispatchWriter::start(target, &settings.slot, reader, written_sender),
            written,
            publisher,
            topic_maker,
            budget: Budget::new(settings.in_flight_bytes),
            backoff: Backoff::new(seed),
            failing: FailingTopics::new(metrics.troubles.clone()),
            metrics,
            log: ThrottledLog::default(),
            publishing: JoinSet::new(),
            quarantine,
            releases: Releases::new(releaser),
            dead_letter_topic: settings.dead_letter_topic()?,
            letters: HashMap::new(),
            dispatch: settings.dispatch,
            resolved: Written::default(),
            cannot_record: false,
        })
    }

    /// Takes over an event, behind all others of its key.
    pub(crate) fn take(&mut self, topic: Arc<str>, ordering_key: OrderingKey, event: Event) {
        self.budget.take(&event);
        self.metrics.events_read.inc();
        let at = quarantine::place(&event.origin);
        match self.quarantine.admit(&topic, &ordering_key, at) {
            Admission::Open => self.lanes.push(topic, ordering_key, event),
            Admission::Quarantined(why) => {
                self.set_aside_behind(topic, ordering_key, event, Outcome::Quarantined(why));
            }
            Admission::Released(why) => {
                self.set_aside_behind(topic, ordering_key, event, Outcome::Released(why));
            }
            Admission::Held => {
                self.quarantine.hold(topic, ordering_key, event);
            }
        }
    }

    /// Whether more events may be read. Events that wait for a retry or for their topic must not keep
    /// the others from the room that is left.
    pub(crate) fn takes_events(&self) -> bool {
        !self.budget.is_spent() || (self.budget.has_room() && self.lanes.waiting() > 0)
    }

    /// The stream has caught up, for now.
    pub(crate) fn caught_up(&mut self) {
        self.budget.caught_up();
    }

    /// Whether lanes should linger for more events.
    fn fills_requests(&mut self) -> bool {
        self.budget.weigh_lanes(self.lanes.len());
        self.budget.fills_requests(self.lanes.waiting() == 0)
    }

    /// Waits until something happens, and returns how many events of which transactions have their
    /// outcome now: often none. Cancel-safe.
    ///
    /// # Errors
    /// Errors that only a person can fix.
    pub(crate) async fn progress(&mut self) -> Result<Vec<(CommitLsn, u64)>> {
        if !self.resolved.commits.is_empty() {
            return Ok(std::mem::take(&mut self.resolved.commits));
        }
        if self.budget.is_spent_by_messages() || !self.budget.has_room() {
            // Held events would keep the budget spent, even if other events have spent it.
            self.unhold();
        }
        self.ask();
        let next_due = self.lanes.next_due();
        // Released events that cannot be sent must not take the last room from the stream.
        let crowded = self.quarantine.crowds_lanes(self.budget.limit() / 2);
        let has_room = self.takes_events() && !(self.budget.is_spent() && crowded);
        tokio::select! {
            biased;
            // First, because it is the slowest by far and so keeps nothing else waiting.
            found = self.releases.woken(has_room) => {
                if let Some(found) = found {
                    self.on_found(found)?;
                }
            }
            event = self.written.recv() => match event {
                Some(event) => self.on_written(event)?,
                None => return Err(Error::new(Code::Internal, "the dispatch writer ended")),
            },
            Some(answer) = self.publishing.join_next(), if !self.publishing.is_empty() => {
                self.on_answer(answer)?;
                while let Some(answer) = self.publishing.try_join_next() {
                    self.on_answer(answer)?;
                }
            }
            topic = self.topic_maker.made() => self.lanes.hasten(&topic, Instant::now()),
            () = until(next_due), if next_due.is_some() => {}
        }
        Ok(std::mem::take(&mut self.resolved.commits))
    }

    /// Sets the gauges.
    pub(crate) fn measure(&mut self) {
        self.failing.survey(&self.lanes);
        self.metrics.in_flight_bytes.set(self.budget.used() as i64);
        self.metrics
            .in_flight_requests
            .set(self.lanes.in_flight() as i64);
        self.metrics.lanes.set(self.lanes.len() as i64);
        self.metrics.lanes_waiting.set(self.lanes.waiting() as i64);
        let blocked = self.quarantine.blocked();
        self.metrics.blocked_keys.set(Some(blocked as f64));
    }
}

/// Sleeps until `due`; forever if that is `None`.
pub(crate) async fn until(due: Option<Instant>) {
    match due {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
