//! Sends the requests of a session, and decides what follows from each answer.

use std::time::{Duration, Instant};

use publisher::{Backoff, Class, FailedStep, Failure, MessageIds, Publisher};
use tokio::task::{JoinError, JoinSet};

use super::Delivery;
use crate::error::{Code, Error, Result};
use crate::lanes::{Load, Request, Serve};
use crate::metrics::KindLabel;

/// The attempts to publish that are in flight.
pub(crate) struct Attempts {
    publisher: Publisher,
    running: JoinSet<Answer>,
    /// Number of attempts that were started so far.
    started: u64,
    backoff: Backoff,
}

impl Attempts {
    /// Starts without attempts. `seed` makes the backoff pauses differ from those of other sessions.
    pub(crate) fn new(publisher: Publisher, seed: u64) -> Self {
        Self {
            publisher,
            running: JoinSet::new(),
            started: 0,
            backoff: Backoff::new(seed),
        }
    }

    fn start(&mut self, request: Request, now: Instant) {
        let publisher = self.publisher.clone();
        let number = self.started;
        self.started += 1;
        self.running.spawn(async move {
            let messages = request.events.iter().map(|event| &event.message);
            let result = publisher.publish(&request.key.topic, messages, now).await;
            Answer {
                request,
                result,
                number,
            }
        });
    }

    /// Number of attempts that were started so far.
    pub(super) fn started(&self) -> u64 {
        self.started
    }

    /// Number of attempts in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.running.len()
    }

    /// Waits for the next answer; returns `None` when no attempt is in flight. Cancel-safe.
    pub(super) async fn answer(&mut self) -> Option<Result<Answer, JoinError>> {
        self.running.join_next().await
    }

    /// Returns the next answer, if it has already arrived.
    pub(super) fn try_answer(&mut self) -> Option<Result<Answer, JoinError>> {
        self.running.try_join_next()
    }
}

/// The result of one attempt.
pub(super) struct Answer {
    pub(super) request: Request,
    pub(super) result: Result<MessageIds, Failure>,
    /// Number of attempts that were started before this one.
    pub(super) number: u64,
}

impl Delivery {
    /// Starts as many requests as the lanes and their limits allow. `now` is the time of the last lease check, and
    /// the timeout of each request begins at `now`. `serve` chooses which lanes may send. It is called with `true`
    /// if lanes may linger.
    pub(crate) fn send_requests(&mut self, now: Instant, serve: impl Fn(bool) -> Serve) {
        while let serve = serve(self.may_linger())
            && let Some(request) = self.lanes.next_request(now, serve)
        {
            self.outcomes.flow.sent(&request.events);
            self.attempts.start(request, now);
        }
    }

    pub(super) fn on_answer(&mut self, answer: Result<Answer, JoinError>) -> Result<()> {
        let Answer {
            request,
            result,
            number,
        } = answer.map_err(|e| Error::new(Code::Internal, "a publish task ended").caused_by(e))?;
        if let Some(census) = &mut self.census {
            census.answered(number, &request, result.is_err());
        }
        self.outcomes.flow.answered(&request.events);
        match result {
            Ok(message_ids) => {
                self.on_published(request, message_ids);
                Ok(())
            }
            Err(failure) => self.on_failure(request, &failure),
        }
    }

    pub(super) fn on_published(&mut self, request: Request, message_ids: MessageIds) {
        self.lanes.finished(&request);
        self.failing.published(&request.key.topic);
        self.outcomes.published(request, message_ids);
    }

    /// Handles a failed attempt. Usually schedules a retry. If Pub/Sub permanently refuses the request,
    /// bisects it, or sets the bad event aside if it is alone in the request.
    fn on_failure(&mut self, request: Request, failure: &Failure) -> Result<()> {
        let topic = request.key.topic.clone();
        let error = Error::pubsub(failure, &topic);
        let kind = error.code().name();
        self.outcomes
            .metrics
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
            _ if !failure.may_have_arrived() => Load::NotSent,
            _ if failure.step == FailedStep::Connection => Load::Broken,
            Class::UnknownOutcome => Load::Reduce,
            Class::Throttled => Load::ReduceTopic,
            Class::Environment => Load::Keep,
        };
        let now = Instant::now();
        self.outcomes
            .metrics
            .topic_failures
            .count(&topic, error.code());
        let is_made = self.topic_maker.can_help(error.code());
        self.failing.failed(&topic, &error, now, is_made);
        if is_made {
            self.topic_maker.make(topic);
        }
        let pause = if load == Load::NotSent {
            // This request needs no pause of its own. Until Pub/Sub answers, all lanes share a pause between attempts.
            Duration::ZERO
        } else {
            let attempt = request.failed_attempts + 1;
            self.attempts.backoff.pause(failure.class, attempt)
        };
        self.lanes.failed(request, now + pause, load);
        Ok(())
    }
}
