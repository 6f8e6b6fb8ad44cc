//! Runs the relay: one session on the slot after another, until shutdown.
//!
//! `open` opens a session in these steps:
//!
//! - It checks the database (`database`) and its publication (`publication`).
//! - It waits until nobody reads from the slot (`standby`).
//! - It reads the facts about the slot and decides how to begin (`plan`). After a loss it replaces the slot
//!   (`recovery`).
//! - It claims the tables, opens the stream, and waits until the previous relay no longer writes.
//!
//! Meanwhile `opening` reports what the session waits for. `parts` builds the input of each part of the session. Then
//! `pipeline` runs the session's loop, while `supervisor` checks the slot and the publication. Finally `run` ends the
//! session.
//!
//! When a session ends with an error, the error's code decides whether another session follows. The function
//! `comes_back` lists two exceptions. If the stream cannot get past a row, `stuck` decides whether the next session
//! needs a new slot.
//!
//! `mapped_stream` is a session without delivery, for benchmarks.
//!
//! **Invariants.** A session starts without events and may be dropped at any point. Only [`SessionRunner`] outlives a
//! session, and it keeps nothing about events. No part of a session sees the runner.
//!
//! Not here: the source of events (`capture`), their delivery (`delivery`), the records (`store`), the
//! replacement of a lost slot (`recovery`), and the search for missing rows (`audit`).

pub(crate) mod database;
mod greeting;
mod instance;
mod mapped_stream;
mod open;
mod opening;
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
use run::SessionLife;
use stuck::StuckPositions;

use crate::condition::{Condition, RelayState, Trouble};
use crate::delivery::EarlierFailures;
use crate::error::{Code, Disposition, Error, Result};
use crate::metrics::Metrics;
use crate::postgres::connect;
use crate::recovery::Announcements;
use crate::settings::Settings;
use crate::store::privileges::{Purpose, name_missing};
use crate::store::relay_row;
use crate::throttled_log::ThrottledLog;
use crate::traces::Traces;

/// Pause after the first failed session. Short, because a restarted server is soon back. The pause doubles
/// with each further failure, up to [`LAST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// Time after which a relay without a stream writes an unchanged condition again. Short, because commands such as
/// `postrider status` know only from these writes that such a relay still runs.
const REWRITE_AFTER: Duration = Duration::from_secs(5);

/// Time limit for recording in `outbox.relay` why there is no session. Short, because the next session begins
/// only afterwards.
const WRITE_LIMIT: Duration = Duration::from_secs(2);

/// Statement timeout while a session opens. Long, because looking up recorded events may take a while.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs sessions. Owns everything that outlives a session, and gives each part of a session only what it
/// needs.
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
    stuck_positions: StuckPositions,
    /// The failing topics of the sessions that have ended.
    earlier_failures: EarlierFailures,
    greeting: Greeting,
    announcements: Announcements,
}

impl SessionRunner {
    /// Prepares the relay without connecting to anything.
    ///
    /// # Errors
    /// `project-missing`, `credentials-missing`, `pubsub-endpoint`, `database-url-invalid`; `setting-invalid` for a
    /// variable of OpenTelemetry.
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
            stuck_positions: StuckPositions::new(),
            earlier_failures: EarlierFailures::default(),
            greeting: Greeting::new(),
            announcements: Announcements::default(),
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

    /// Runs until `shutdown` is true, or until an error that an operator must fix.
    ///
    /// # Errors
    /// The error that stops the relay. `postgres-unreachable` stops the relay only if PostgreSQL has never answered
    /// since the start of the process, and `start_timeout_s` has elapsed.
    pub async fn run(&self, mut shutdown: watch::Receiver<bool>) -> Result<()> {
        let began = Instant::now();
        let (mut pause, mut probation) = (FIRST_PAUSE, Duration::ZERO);
        tokio::select! {
            _ = shutdown.wait_for(|stop| *stop) => return Ok(()),
            fits = start_check::settings_fit_the_tables(&self.settings) => match fits {
                Ok(Some(earlier)) => {
                    // The first session begins on probation, because it will probably fail in the same way as the
                    // previous relay.
                    probation = run::SHORTEST_PROBATION;
                    self.state.ended_before(earlier);
                }
                Ok(None) => {}
                Err(error) => return Err(self.name_missing_rights(error).await),
            },
        }
        let (mut server_answered, mut has_served) = (false, false);
        let mut said: Option<(Code, Instant)> = None;
        let mut log = ThrottledLog::default();
        loop {
            let mut life = SessionLife::default();
            let ended = self.run_session(&mut shutdown, probation, &mut life).await;
            let error = match ended {
                Ok(pipeline::PipelineEnd::Shutdown) => return Ok(()),
                Err(error) => self.name_missing_rights(error).await,
            };
            server_answered |= life.lived.is_some() || error.code() != Code::PostgresUnreachable;
            let gives_up = !server_answered && began.elapsed() >= self.settings.start_timeout;
            has_served |= life.lived.is_some() || self.state.has_served();
            if !comes_back(error.code(), self.publication.was_right(), has_served) || gives_up {
                self.state.broken(&error);
                self.say_what_broke(&error).await;
                return Err(error);
            }
            probation = life.next_probation().unwrap_or(probation);
            if life.lived.is_some() {
                // The session has cleared the condition in the relay's row, so write the new condition even if its
                // code is the same as that of the last one.
                said = None;
                if probation.is_zero() {
                    pause = FIRST_PAUSE;
                }
            }
            if life.was_long() {
                // Always log the end of a long session. Only the warnings about short sessions are
                // throttled.
                log = ThrottledLog::default();
            }
            self.state.broken(&error);
            let is_known =
                said.is_some_and(|(code, at)| code == error.code() && at.elapsed() < REWRITE_AFTER);
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
    /// Returns the error. If it is about a missing privilege, adds a hint that contains the GRANT statement.
    async fn name_missing_rights(&self, error: Error) -> Error {
        match self.settings.database() {
            Ok(servers) => {
                name_missing(error, servers, &self.settings.tables, Purpose::Relay).await
            }
            Err(_) => error,
        }
    }

    /// Records in the relay's row why there is no session, for `postrider status` and `slot show`. Writes
    /// nothing if delivery is not held up. Also writes nothing in a copy of the database, because the row
    /// there belongs to the relay of the original.
    async fn say_what_broke(&self, error: &Error) {
        let trouble = Trouble::of(error, Instant::now());
        self.metrics.troubles.remember(&trouble);
        let condition = self.metrics.condition(&self.state);
        if !condition.is_held_up() || error.code() == Code::ForeignCluster {
            return;
        }
        self.write_condition(Some(&condition)).await;
    }

    /// Writes the condition to the relay's row while there is no session. Returns whether the write
    /// succeeded.
    async fn write_condition(&self, condition: Option<&Condition>) -> bool {
        let slot = &self.settings.slot;
        let writing = async {
            let target = self.settings.database()?;
            let sql = connect(target, "postrider", WRITE_LIMIT).await?;
            sql.commit_locally().await?;
            relay_row::write_condition(&*sql, slot, &self.instance, condition).await
        };
        let written = tokio::time::timeout(WRITE_LIMIT, writing).await;
        let is_written = matches!(written, Ok(Ok(())));
        if !is_written {
            tracing::debug!("could not write the condition to outbox.relay");
        }
        is_written
    }
}

/// Whether the relay opens another session after an error. Usually the error's code alone decides. Two errors stop only
/// a relay that has just started:
///
/// - The publication is wrong. If it was right at an earlier check by this process, somebody is probably altering it,
///   so the relay tries again.
/// - A captured table shares rows with a table that another slot captures. If this process has run a session or been a
///   standby, somebody has attached one of the tables to the other since. They may detach it again, so the relay tries
///   again.
fn comes_back(code: Code, publication_was_right: bool, has_served: bool) -> bool {
    match code {
        Code::PublicationMissing | Code::PublicationDrift if publication_was_right => true,
        Code::TableCaptured if has_served => true,
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
