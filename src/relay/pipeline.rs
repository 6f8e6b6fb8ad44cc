//! The loop of one session: stream in, requests out, outcomes in, position out.
//!
//! One task owns all state; everything that can wake it stands in one `select!`, by priority:
//! shutdown, recorded outcomes, answers of Pub/Sub, the publication guard, retries that are due,
//! and last the stream, which is the busiest. Nothing in the loop waits for the network except
//! while the events of an earlier run are looked up.

use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::backlog::Backlog;
use super::budget::Budget;
use super::intake::{Intake, Step};
use super::supervisor::Supervision;
use super::topic_maker::TopicMaker;
use crate::dispatch::{Lookup, Published, Recorded, Writer, WriterEvent};
use crate::error::{Code, Error, Result};
use crate::lanes::{Event, Lanes, Load, Request, Serve};
use crate::metrics::{Kind, Metrics};
use crate::postgres::{Sql, answer_within};
use crate::publish::{self, Backoff, Class, Failure, PublishRequest, Publisher};
use crate::source::{self, Chunk, Source, copy_data_bodies};
use crate::throttled_log::ThrottledLog;
use crate::watermark::{Confirmable, Watermark};

/// What the dispatch rows get at least of the time in which a session ends, so that an answer
/// that never comes does not cost the records of those that came.
const WRITER_LIMIT: Duration = Duration::from_secs(3);

/// Of a connection that leads nowhere, when recorded events are looked up; the server's own limit
/// comes first.
const LOOK_UP_LIMIT: Duration = Duration::from_secs(8);

/// Everything one session works with.
pub(super) struct Pipeline {
    pub(super) source: Source,
    pub(super) intake: Intake,
    pub(super) watermark: Watermark,
    pub(super) lanes: Lanes,
    pub(super) recorded: Recorded,
    /// For looking up recorded events; closed when there are none left.
    pub(super) sql: Option<Sql>,
    pub(super) writer: Writer,
    pub(super) written: mpsc::UnboundedReceiver<WriterEvent>,
    pub(super) publisher: Publisher,
    pub(super) topic_maker: TopicMaker,
    pub(super) supervision: watch::Receiver<Supervision>,
    pub(super) budget: Budget,
    pub(super) backlog: Backlog,
    pub(super) backoff: Backoff,
    pub(super) metrics: Metrics,
    pub(super) log: ThrottledLog,
    pub(super) publishing: JoinSet<Answer>,
}

/// What came of one attempt.
pub(super) struct Answer {
    request: Request,
    result: Result<Vec<String>, Failure>,
}

/// Why the loop ended in good order.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    Shutdown,
}

impl Pipeline {
    /// Runs until shutdown, or until an error ends the session.
    pub(super) async fn run(&mut self, shutdown: &mut watch::Receiver<bool>) -> Result<End> {
        loop {
            if self.source.lease_is_over() {
                return Err(source::lease_lost());
            }
            let serve = self.backlog.serve(self.budget.is_spent());
            self.send_requests(serve);
            self.source.confirm(self.watermark.confirmable());
            self.measure();
            let next_due = self.lanes.next_due();
            let takes_chunks = self.takes_chunks();
            let (ended, chunks) = self.source.split();
            tokio::select! {
                biased;
                _ = shutdown.wait_for(|stop| *stop) => return Ok(End::Shutdown),
                error = ended => return Err(error.unwrap_or_else(|_| {
                    Error::new(Code::Internal, "the replication thread ended without a word")
                })),
                event = self.written.recv() => match event {
                    Some(event) => self.on_written(event)?,
                    None => return Err(Error::new(Code::Internal, "the dispatch writer ended")),
                },
                Ok(()) = self.supervision.changed() => {
                    if *self.supervision.borrow_and_update() == Supervision::ServerStopping {
                        return Err(Error::new(Code::PostgresStopping, "PostgreSQL is shutting down"));
                    }
                }
                Some(answer) = self.publishing.join_next(), if !self.publishing.is_empty() => {
                    self.on_answer(answer)?;
                    while let Some(answer) = self.publishing.try_join_next() {
                        self.on_answer(answer)?;
                    }
                }
                topic = self.topic_maker.made() => self.lanes.hasten(&topic, Instant::now()),
                _ = until(next_due), if next_due.is_some() => {}
                _ = until(self.backlog.pause_ends()), if serve == Serve::Worthwhile => {
                    self.backlog.paused();
                }
                Some(chunk) = chunks.recv(), if takes_chunks => {
                    if let Err(error) = self.on_chunk(&chunk).await {
                        // What came before an event that cannot be delivered is delivered.
                        self.send_requests(Serve::All);
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Whether more of the stream may come into memory. Events that wait for a topic or a key to
    /// heal must not keep the others from the room that is left.
    fn takes_chunks(&self) -> bool {
        !self.budget.is_spent() || (self.budget.has_room() && self.lanes.waiting() > 0)
    }

    /// Starts as many requests as the lanes and the limit allow.
    fn send_requests(&mut self, serve: Serve) {
        let now = Instant::now();
        while let Some(request) = self.lanes.next_request(now, serve) {
            let publisher = self.publisher.clone();
            let messages = request
                .events
                .iter()
                .map(|event| event.message.clone())
                .collect();
            let call = PublishRequest {
                topic: request.key.topic.clone(),
                messages,
            };
            self.publishing.spawn(async move {
                let result = publisher.publish(call).await;
                Answer { request, result }
            });
        }
    }

    fn on_answer(&mut self, answer: Result<Answer, tokio::task::JoinError>) -> Result<()> {
        let Answer { request, result } =
            answer.map_err(|e| Error::new(Code::Internal, "a publish task ended").caused_by(e))?;
        match result {
            Ok(message_ids) => {
                self.on_published(request, message_ids);
                Ok(())
            }
            Err(failure) => self.on_failure(request, &failure),
        }
    }

    fn on_published(&mut self, request: Request, message_ids: Vec<String>) {
        self.lanes.finished(&request);
        let at = SystemTime::now();
        self.metrics.publish_requests.inc();
        self.metrics
            .events_published
            .inc_by(request.events.len() as u64);
        let bytes = request.events.iter().map(|event| event.message.len()).sum();
        self.budget.give_back_messages(request.events.len(), bytes);
        if let Some(committed) = request.events[0].origin.commit_time.to_system_time() {
            let latency = at.duration_since(committed).unwrap_or_default();
            self.metrics.latency.observe(latency.as_secs_f64());
        }
        self.writer.record(Published {
            topic: request.key.topic,
            ordering_key: request.key.ordering_key,
            attempts: i32::try_from(request.failed_attempts).unwrap_or(i32::MAX - 1) + 1,
            at,
            events: request
                .events
                .into_iter()
                .map(|event| event.origin)
                .collect(),
            message_ids,
        });
    }

    /// A failed attempt waits and goes again; only what Pub/Sub will never take ends the session.
    fn on_failure(&mut self, request: Request, failure: &Failure) -> Result<()> {
        let topic = request.key.topic.clone();
        let error = publish::error(failure, &topic);
        let kind = error.code().name();
        self.metrics
            .publish_failures
            .get_or_create(&Kind { kind })
            .inc();
        let load = match failure.class {
            Class::Content => {
                let first = &request.events[0].origin;
                return Err(error.hint(format!(
                    "one of {} events, the first of them {} (commit {}, ordinal {}), key {:?}; \
                     nothing from there on has been confirmed",
                    request.events.len(),
                    first.event_id,
                    first.commit.lsn(),
                    first.ordinal,
                    request.key.ordering_key,
                )));
            }
            Class::UnknownOutcome | Class::Throttled => Load::Reduce,
            Class::Environment => Load::Keep,
        };
        if self.topic_maker.can_help(error.code()) {
            self.topic_maker.make(topic);
        } else if let Some(more) = self.log.due(error.code()) {
            tracing::warn!(
                code = kind,
                attempt = request.failed_attempts + 1,
                hint = error.hint_text(),
                lanes_waiting = self.lanes.waiting() + 1,
                since_last = more,
                "{error}"
            );
        }
        let pause = self
            .backoff
            .pause(failure.class, request.failed_attempts + 1);
        self.lanes.failed(request, Instant::now() + pause, load);
        Ok(())
    }

    fn on_written(&mut self, event: WriterEvent) -> Result<()> {
        match event {
            WriterEvent::Recorded(commits) => {
                for (commit, events) in commits {
                    self.watermark.resolve(commit, events);
                    self.budget.give_back_records(events as usize);
                    self.metrics.events_recorded.inc_by(events);
                }
                Ok(())
            }
            WriterEvent::Failed(error) => Err(error),
        }
    }

    async fn on_chunk(&mut self, chunk: &Chunk) -> Result<()> {
        self.metrics.received_bytes.inc_by(chunk.len() as u64);
        let mut sent_at = None;
        for body in copy_data_bodies(chunk) {
            match decoder::frame::decode_frame(body) {
                Ok(decoder::frame::Frame::XLogData {
                    payload,
                    sent_at: at,
                    ..
                }) => {
                    sent_at = Some(at);
                    self.on_message(payload).await?;
                }
                Ok(decoder::frame::Frame::Keepalive { wal_end, .. }) => {
                    if self.supervision.borrow().publication_is_right() {
                        self.watermark.keepalive(wal_end);
                    }
                }
                Err(e) => {
                    return Err(
                        Error::new(Code::ReplicationProtocol, "a frame of the stream").caused_by(e),
                    );
                }
            }
        }
        if let (Some(sent_at), Some(committed)) = (sent_at, self.intake.last_commit_time()) {
            self.backlog.received(sent_at, committed, Instant::now());
        }
        Ok(())
    }

    async fn on_message(&mut self, payload: &[u8]) -> Result<()> {
        match self.intake.message(payload)? {
            Step::Nothing => {}
            Step::Begin(commit, commit_time) => self.watermark.begin(commit, commit_time),
            Step::Commit(end_lsn) => self.watermark.commit(end_lsn),
            Step::Event {
                topic,
                ordering_key,
                event,
            } => {
                if self.is_recorded(&event).await? {
                    self.metrics.events_skipped.inc();
                    return Ok(());
                }
                self.watermark.add_event();
                self.budget.take(&event);
                self.metrics.events_read.inc();
                self.lanes.push(topic, ordering_key, event);
            }
        }
        Ok(())
    }

    /// Whether an earlier run has recorded an outcome for this event.
    async fn is_recorded(&mut self, event: &Event) -> Result<bool> {
        let Some(sql) = &self.sql else {
            return Ok(false);
        };
        let origin = &event.origin;
        while self.recorded.needs_page(origin.commit, origin.ordinal) {
            answer_within(LOOK_UP_LIMIT, self.recorded.read_page(sql)).await?;
        }
        let found = self
            .recorded
            .look_up(origin.commit, origin.ordinal, &origin.event_id.uuid);
        if self.recorded.is_over() {
            self.sql = None;
        }
        Ok(found == Lookup::Done)
    }

    /// Lets requests that are on their way end, records them and confirms; starts nothing new.
    /// Returns the position that was confirmed last.
    pub(super) async fn drain(mut self, limit: Duration) -> Confirmable {
        let deadline = tokio::time::Instant::now() + limit;
        while let Ok(Some(answer)) =
            tokio::time::timeout_at(deadline, self.publishing.join_next()).await
        {
            // A failure here is met again by the next session.
            if let Ok(Answer {
                request,
                result: Ok(ids),
            }) = answer
            {
                self.on_published(request, ids);
            }
        }
        let Self {
            writer,
            mut written,
            mut watermark,
            source,
            metrics,
            ..
        } = self;
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        writer.finish(left.max(WRITER_LIMIT.min(limit))).await;
        while let Ok(event) = written.try_recv() {
            if let WriterEvent::Recorded(commits) = event {
                for (commit, events) in commits {
                    watermark.resolve(commit, events);
                    metrics.events_recorded.inc_by(events);
                }
            }
        }
        let confirmed = watermark.confirmable();
        source.confirm(confirmed);
        tracing::info!(confirmed = %confirmed.lsn(), "closing the session");
        source.close().await;
        confirmed
    }

    fn measure(&self) {
        self.metrics.in_flight_bytes.set(self.budget.used() as i64);
        self.metrics
            .in_flight_requests
            .set(self.lanes.in_flight() as i64);
        self.metrics.lanes.set(self.lanes.len() as i64);
        self.metrics.lanes_waiting.set(self.lanes.waiting() as i64);
        self.metrics
            .oldest_pending
            .set(self.watermark.oldest_pending());
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
