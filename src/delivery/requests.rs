//! Sends the requests of a session, and decides what follows from each answer.

use std::time::Instant;

use publisher::{Backoff, Class, Failure, MessageIds, Publisher};
use tokio::task::{JoinError, JoinSet};

use super::Delivery;
use crate::error::{Code, Error, Result};
use crate::event::{EventRef, Standing};
use crate::lanes::{Load, Request, Serve};
use crate::metrics::KindLabel;
use crate::store::dispatch::{Outcome, Record};
use crate::traces::Destination;

/// The attempts to publish that are in flight.
pub(crate) struct Attempts {
    publisher: Publisher,
    running: JoinSet<Answer>,
    backoff: Backoff,
}

impl Attempts {
    /// Starts without attempts. `seed` makes the backoff pauses differ from those of other sessions.
    pub(crate) fn new(publisher: Publisher, seed: u64) -> Self {
        Self {
            publisher,
            running: JoinSet::new(),
            backoff: Backoff::new(seed),
        }
    }

    fn start(&mut self, request: Request, now: Instant) {
        let publisher = self.publisher.clone();
        self.running.spawn(async move {
            let messages = request.events.iter().map(|event| &event.message);
            let result = publisher.publish(&request.key.topic, messages, now).await;
            Answer { request, result }
        });
    }

    /// The next answer; `None` when no attempt is in flight. Cancel-safe.
    pub(super) async fn answer(&mut self) -> Option<Result<Answer, JoinError>> {
        self.running.join_next().await
    }

    /// The next answer, if it is there already.
    pub(super) fn try_answer(&mut self) -> Option<Result<Answer, JoinError>> {
        self.running.try_join_next()
    }
}

/// The result of one attempt.
pub(super) struct Answer {
    pub(super) request: Request,
    pub(super) result: Result<MessageIds, Failure>,
}

impl Delivery {
    /// Starts as many requests as the lanes and their limits allow. The timeout of the requests begins at
    /// `now`, when the lease was last checked. `serve` says which lanes may send; its argument is whether
    /// lanes may linger.
    pub(crate) fn send_requests(&mut self, now: Instant, serve: impl Fn(bool) -> Serve) {
        while let serve = serve(self.may_linger())
            && let Some(request) = self.lanes.next_request(now, serve)
        {
            self.flow.sent(&request.events);
            self.attempts.start(request, now);
        }
    }

    pub(super) fn on_answer(&mut self, answer: Result<Answer, JoinError>) -> Result<()> {
        let Answer { request, result } =
            answer.map_err(|e| Error::new(Code::Internal, "a publish task ended").caused_by(e))?;
        self.flow.answered(&request.events);
        match result {
            Ok(message_ids) => {
                self.on_published(request, message_ids);
                Ok(())
            }
            Err(failure) => self.on_failure(request, &failure),
        }
    }

    pub(super) fn on_published(&mut self, mut request: Request, mut message_ids: MessageIds) {
        self.lanes.finished(&request);
        self.failing.published(&request.key.topic);
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
                    self.recorder.resolve(event.position.commit);
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

    /// Schedules a retry of a failed attempt. If Pub/Sub refuses the request for good, bisects it and
    /// sets the bad event aside.
    fn on_failure(&mut self, request: Request, failure: &Failure) -> Result<()> {
        let topic = request.key.topic.clone();
        let error = Error::pubsub(failure, &topic);
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
        let is_made = self.topic_maker.can_help(error.code());
        self.failing.failed(&topic, &error, now, is_made);
        if is_made {
            self.topic_maker.make(topic);
        }
        let attempt = request.failed_attempts + 1;
        let pause = self.attempts.backoff.pause(failure.class, attempt);
        self.lanes.failed(request, now + pause, load);
        Ok(())
    }
}

/// Marks new events so that they get no row. If published events are not recorded, only those that were
/// released have a row.
fn leave_without_rows(events: &mut [EventRef]) {
    for event in events {
        if event.standing == Standing::New {
            event.standing = Standing::Repeated;
        }
    }
}
