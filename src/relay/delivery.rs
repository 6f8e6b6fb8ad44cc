//! Takes an event to its recorded outcome: lanes, requests, answers, dispatch rows.
//!
//! This part of a session does not depend on where an event came from. [`Delivery::progress`] returns
//! which events have their outcome; the caller decides what that means for the position. `bad_events`
//! handles events that can never be published, and `released` handles events that return from
//! quarantine.

mod bad_events;
mod failing_topics;
mod records;
mod released;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::budget::Budget;
use super::quarantine::{self, Admission, EventPlace, Letter, Quarantine, Releaser};
use super::topic_maker::TopicMaker;
use failing_topics::FailingTopics;
use records::leave_without_rows;
use released::Releases;

use crate::dispatch::{DispatchWriter, Outcome, Record, SlotReader, WriterEvent, Written};
use crate::error::{Code, Error, Result};
use crate::lanes::{Event, EventRef, Lanes, Load, Request, Serve, Standing};
use crate::map::{EventId, OrderingKey};
use crate::metrics::{KindLabel, Metrics};
use crate::publish::{self, Backoff, Class, Failure, MessageIds, Publisher};
use crate::settings::{Dispatch, Settings};
use crate::throttled_log::ThrottledLog;
use crate::watermark::CommitLsn;

/// Minimum time for writing dispatch rows when a session ends. So one answer that never comes does
/// not cost the records of those that came.
const WRITER_LIMIT: Duration = Duration::from_secs(3);

/// Delivers the events of one session.
pub(super) struct Delivery {
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

/// The result of one attempt.
struct Answer {
    request: Request,
    result: Result<MessageIds, Failure>,
}

impl Delivery {
    /// A delivery without events. `seed` makes the pauses of this session differ from another's.
    pub(super) fn new(
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
    pub(super) fn take(&mut self, topic: Arc<str>, ordering_key: OrderingKey, event: Event) {
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
    pub(super) fn takes_events(&self) -> bool {
        !self.budget.is_spent() || (self.budget.has_room() && self.lanes.waiting() > 0)
    }

    /// The stream has caught up, for now.
    pub(super) fn caught_up(&mut self) {
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
    pub(super) async fn progress(&mut self) -> Result<Vec<(CommitLsn, u64)>> {
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

    /// Starts as many requests as the lanes and the limit allow. Their timeout begins at `now`, when
    /// the lease was last checked. `serve` chooses the lanes, given whether requests still fill up.
    pub(super) fn send_requests(&mut self, now: Instant, serve: impl Fn(bool) -> Serve) {
        while let serve = serve(self.fills_requests())
            && let Some(request) = self.lanes.next_request(now, serve)
        {
            self.budget.sent(&request.events);
            let publisher = self.publisher.clone();
            self.publishing.spawn(async move {
                let messages = request.events.iter().map(|event| &event.message);
                let result = publisher.publish(&request.key.topic, messages, now).await;
                Answer { request, result }
            });
        }
    }

    fn on_answer(&mut self, answer: Result<Answer, tokio::task::JoinError>) -> Result<()> {
        let Answer { request, result } =
            answer.map_err(|e| Error::new(Code::Internal, "a publish task ended").caused_by(e))?;
        self.budget.answered(&request.events);
        match result {
            Ok(message_ids) => {
                self.on_published(request, message_ids);
                Ok(())
            }
            Err(failure) => self.on_failure(request, &failure),
        }
    }

    fn on_published(&mut self, mut request: Request, mut message_ids: MessageIds) {
        self.lanes.finished(&request);
        self.failing.published(&request.key.topic);
        let at = self.metrics.server_clock.now();
        self.metrics.publish_requests.inc();
        self.metrics.last_published.now();
        let bytes = request.events.iter().map(|event| event.message.len()).sum();
        self.budget.give_back_messages(request.events.len(), bytes);
        if !self.letters.is_empty() {
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
        let events = request.events.into_iter().map(|event| event.origin);
        let mut events: Vec<EventRef> = events.collect();
        if self.dispatch == Dispatch::Exceptions {
            leave_without_rows(&mut events);
            if self.resolves_at_once(&events) {
                for event in &events {
                    self.resolved.count(event.commit);
                }
                self.budget.give_back_records(events.len());
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

    /// Schedules a retry of a failed attempt. If Pub/Sub refuses the request for good, bisects it and
    /// sets the bad event aside.
    fn on_failure(&mut self, request: Request, failure: &Failure) -> Result<()> {
        let topic = request.key.topic.clone();
        let error = publish::error(failure, &topic);
        let kind = error.code().name();
        self.metrics
            .publish_failures
            .get_or_create(&KindLabel { kind })
            .inc();
        let load = match failure.class {
            Class::Content => {
                let key = request.key.clone();
                return match self.lanes.refused(request) {
                    Some(event) => self.on_refused(&key, event, error, failure),
                    None => Ok(()),
                };
            }
            Class::UnknownOutcome => Load::Reduce,
            Class::Throttled => Load::ReduceTopic,
            Class::Environment => Load::Keep,
        };
        let now = Instant::now();
        self.metrics.topic_failures.count(&topic, error.code());
        if self.topic_maker.can_help(error.code()) {
            self.topic_maker.make(topic);
        } else {
            self.failing.failed(&topic, &error, now);
        }
        let pause = self
            .backoff
            .pause(failure.class, request.failed_attempts + 1);
        self.lanes.failed(request, now + pause, load);
        Ok(())
    }

    /// Sets the gauges.
    pub(super) fn measure(&mut self) {
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

/// An event that was published stays published, even if it cannot be repeated: its key must not wait
/// for an event that consumers already have.
pub(super) fn stays_published(event: &EventId, error: &dyn std::fmt::Display) {
    tracing::warn!(
        event = event.shown(),
        "the event was published before, and cannot be published again: {error}"
    );
}

/// Sleeps until `due`; forever if that is `None`.
pub(super) async fn until(due: Option<Instant>) {
    match due {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
