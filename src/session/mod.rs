//! Runs the relay: one session on the slot after the other, until shutdown.
//!
//! A session begins in `open`: it checks the `database` and its `publication`, waits for the slot
//! (`standby`), gathers the facts and decides how to begin (`plan`, and `recovery` after a loss), opens
//! the stream, and waits until the previous relay no longer writes. Then `pipeline` runs the session's
//! loop, with `supervisor` alongside, and `run` ends the session. `parts` builds the input of each part
//! of a session.
//!
//! When a session ends with an error, the error's code decides whether another session follows (except
//! for a publication that was right before). `stuck` decides whether the next session needs a new slot.
//!
//! `mapped_stream` is a session without delivery, for benchmarks.
//!
//! **Invariants.** A session starts with empty state and may be dropped at any point. Only
//! [`SessionRunner`] outlives a session, and it keeps nothing about events. No part of a session sees
//! the runner.
//!
//! Not here: the source of events (`capture`), their delivery (`delivery`), the records (`store`), the
//! replacement of a lost slot (`recovery`), and the search for missing rows (`audit`).

pub(crate) mod database;
mod greeting;
mod instance;
mod mapped_stream;
mod open;
mod parts;
mod pipeline;
mod plan;
pub(crate) mod publication;
mod run;
mod standby;
mod start_check;
mod stuck;
mod supervisor;

use std::sync::Arc;
use std::time::{Duration, Instant};

use publisher::{Publisher, TopicAdmin};
use tokio::sync::watch;

use greeting::Greeting;
pub use mapped_stream::{MappedEvent, MappedStream};
use publication::PublicationCheck;
use stuck::StuckPlaces;

use crate::condition::{RelayState, Trouble};
use crate::error::{Code, Disposition, Error, Result};
use crate::metrics::Metrics;
use crate::postgres::connect;
use crate::settings::Settings;
use crate::store::relay_row;
use crate::throttled_log::ThrottledLog;
use crate::traces::Traces;

/// The first pause between sessions. It is short, because a server that restarts is soon back. The pause
/// doubles up to [`LAST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// Time limit for recording in `outbox.relay` why there is no session.
const SAY_LIMIT: Duration = Duration::from_secs(2);

/// Statement timeout while a session opens. Looking up recorded events may take long.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs sessions. Owns everything that outlives a session, and gives each part only its own share.
#[derive(Debug)]
pub struct SessionRunner {
    settings: Settings,
    publisher: Publisher,
    /// `None` if the relay must not create topics.
    topics: Option<TopicAdmin>,
    metrics: Metrics,
    traces: Traces,
    state: Arc<RelayState>,
    /// The name of this process, by which PostgreSQL and other relays know it.
    instance: String,
    publication: PublicationCheck,
    stuck_places: StuckPlaces,
    greeting: Greeting,
}

impl SessionRunner {
    /// Prepares the relay without connecting to anything.
    ///
    /// # Errors
    /// `project-missing`, `credentials-missing`, `pubsub-endpoint`, `database-url-invalid`.
    pub fn new(settings: Settings, metrics: Metrics, state: Arc<RelayState>) -> Result<Self> {
        settings.project()?;
        settings.database()?;
        settings.dead_letter_topic()?;
        let publisher = Publisher::new(
            &settings.pubsub,
            settings.pubsub_channels,
            settings.publish_timeout,
        )?;
        let topics = settings.create_topics.then(|| TopicAdmin::new(&publisher));
        warn_of_global_endpoint(&settings);
        let traces = Traces::start(settings.traces_endpoint.as_deref(), &metrics)?;
        Ok(Self {
            traces,
            publication: PublicationCheck::new(&settings),
            stuck_places: StuckPlaces::new(),
            greeting: Greeting::new(),
            instance: instance::new_name(),
            settings,
            publisher,
            topics,
            metrics,
            state,
        })
    }

    /// Sends the remaining spans to the collector.
    pub async fn finish(self) {
        self.traces.finish().await;
    }

    /// Runs until `shutdown` is true, or until an error that a person must fix.
    ///
    /// # Errors
    /// An error that stops the relay. That includes `postgres-unreachable` if PostgreSQL has not answered
    /// once within `start_timeout_s`.
    pub async fn run(&self, mut shutdown: watch::Receiver<bool>) -> Result<()> {
        let began = Instant::now();
        tokio::select! {
            _ = shutdown.wait_for(|stop| *stop) => return Ok(()),
            fits = start_check::settings_fit_the_tables(&self.settings) => fits?,
        }
        let mut server_answered = false;
        let mut pause = FIRST_PAUSE;
        let mut said: Option<(Code, Instant)> = None;
        let mut log = ThrottledLog::default();
        loop {
            let mut started = false;
            let ended = self
                .run_session(&mut shutdown, |phase| {
                    started = true;
                    self.state.set(phase);
                })
                .await;

            let error = match ended {
                Ok(pipeline::PipelineEnd::Shutdown) => return Ok(()),
                Err(error) => error,
            };
            server_answered |= started || error.code() != Code::PostgresUnreachable;
            let gives_up = !server_answered && began.elapsed() >= self.settings.start_timeout;
            if !comes_back(error.code(), self.publication.was_right()) || gives_up {
                self.state.broken(&error);
                self.say_what_broke(&error).await;
                return Err(error);
            }
            if started {
                pause = FIRST_PAUSE;
                log = ThrottledLog::default();
            }
            self.state.broken(&error);
            let is_known = said.is_some_and(|(code, at)| {
                code == error.code() && at.elapsed() < supervisor::SAID_AGAIN
            });
            if !is_known {
                said = Some((error.code(), Instant::now()));
                self.say_what_broke(&error).await;
            }
            if let Some(since_last) = log.due(error.code()) {
                tracing::warn!(
                    code = %error.code(), hint = error.hint_text(), since_last,
                    "{error}; retrying in {pause:?}"
                );
            }
            tokio::select! {
                _ = shutdown.wait_for(|stop| *stop) => return Ok(()),
                () = tokio::time::sleep(pause) => {}
            }
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }
}

impl SessionRunner {
    /// Records in the relay's row why there is no session, for `postrider status` and `slot show`.
    /// Writes nothing if delivery is not held up, if the database cannot be reached, or if the database
    /// is a copy: the row in a copy is not ours.
    async fn say_what_broke(&self, error: &Error) {
        let trouble = Trouble::of(error, Instant::now());
        self.metrics.troubles.remember(&trouble);
        let condition = self.metrics.condition(&self.state);
        if !condition.is_held_up() || error.code() == Code::ForeignCluster {
            return;
        }
        let slot = &self.settings.slot;
        let writing = async {
            let target = self.settings.database()?;
            let sql = connect(target, "postrider", SAY_LIMIT).await?;
            relay_row::write_condition(&sql, slot, &self.instance, Some(&condition)).await
        };
        if !matches!(tokio::time::timeout(SAY_LIMIT, writing).await, Ok(Ok(()))) {
            tracing::debug!("could not write the condition to outbox.relay");
        }
    }
}

/// Whether another session follows after an error. A wrong publication stops the relay only if this
/// process has never found it right, not even as a standby. Otherwise somebody is altering the
/// publication, and it will soon be right again.
fn comes_back(code: Code, publication_was_right: bool) -> bool {
    match code {
        Code::PublicationMissing | Code::PublicationDrift if publication_was_right => true,
        code => code.disposition() == Disposition::Retry,
    }
}

fn warn_of_global_endpoint(settings: &Settings) {
    if settings.pubsub.is_global() {
        tracing::warn!(
            "publishing through the global endpoint: Pub/Sub keeps the order of a key only among \
             publishes in one region; set POSTRIDER_PUBSUB_ENDPOINT to a regional endpoint"
        );
    }
}
