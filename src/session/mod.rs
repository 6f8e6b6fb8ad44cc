//! The relay: runs sessions on the slot, one after the other, until shutdown.
//!
//! `session` opens a session, and `pipeline` is its loop. `intake` turns the stream into events, and
//! `delivery` takes each event to its recorded outcome. In parallel, `supervisor` watches the
//! database and `auditor` looks for rows that the stream left out. `standby` waits for a slot that
//! another relay holds, `opening` compares the slot with the relay's own row (`record`), and
//! `recovery` replaces a lost slot. `mapped_stream` is a session without delivery, for benchmarks.
//! When a session ends with an error, the error's code decides whether another session follows.

mod mapped_stream;
mod open;
mod parts;
mod pipeline;
pub(crate) mod plan;
mod standby;
mod start_check;
mod stuck;
mod supervisor;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slot_manager::health::{self, Observation, Thresholds, Viewer};
use slot_manager::publication::CapturedTable;
use slot_manager::{DatabaseOrigin, Health, Slot};
use tokio::sync::watch;

pub use mapped_stream::{MappedEvent, MappedStream};

use crate::error::{Code, Disposition, Result};
use crate::metrics::Metrics;
use crate::publish::{Publisher, TopicAdmin};
use crate::settings::Settings;
use crate::state::{Phase, RelayState};

/// Pauses between sessions: short at first, because a server that restarts is soon back.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// How many bytes of the host name the instance name contains.
const MAX_HOST_NAME: usize = 33;

/// Everything that outlives a session.
#[derive(Debug)]
pub struct Relay {
    pub(crate) settings: Settings,
    captured: Vec<CapturedTable>,
    publisher: Publisher,
    /// `None` when the relay must not create topics.
    topics: Option<TopicAdmin>,
    pub(crate) metrics: Metrics,
    pub(crate) state: Arc<RelayState>,
    /// Names this process to PostgreSQL and to other relays.
    pub(crate) instance: String,
    /// Whether this process has ever found the publication right.
    publication_was_right: AtomicBool,
    /// The slot's position when PostgreSQL last failed to decode.
    undecodable_after: AtomicU64,
}

impl Relay {
    /// Prepares a relay without connecting to anything.
    ///
    /// # Errors
    /// `project-missing`, `credentials-missing`, `pubsub-endpoint`, `database-url-invalid`.
    pub fn new(settings: Settings, metrics: Metrics, state: Arc<RelayState>) -> Result<Self> {
        settings.project()?;
        settings.database()?;
        settings.dead_letter_topic()?;
        let publisher = Publisher::new(&settings)?;
        let topics = settings.create_topics.then(|| TopicAdmin::new(&publisher));
        warn_of_global_endpoint(&settings);
        let captured = settings.captured();
        // Containers may share the host's name and have the same pid.
        let random = RandomState::new().hash_one(Instant::now()) as u32;
        let instance = instance_name(&host_name(), random, std::process::id());
        Ok(Self {
            settings,
            captured,
            publisher,
            topics,
            metrics,
            state,
            instance,
            publication_was_right: AtomicBool::new(false),
            undecodable_after: AtomicU64::new(u64::MAX),
        })
    }

    /// Runs until `shutdown` is true, or until an error that a person must fix.
    ///
    /// # Errors
    /// An error whose code stops the relay; or `postgres-unreachable` and the like when PostgreSQL
    /// never answered within `start_timeout_s`.
    pub async fn run(&self, mut shutdown: watch::Receiver<bool>) -> Result<()> {
        let began = Instant::now();
        tokio::select! {
            _ = shutdown.wait_for(|stop| *stop) => return Ok(()),
            fits = start_check::settings_fit_the_tables(self) => fits?,
        }
        let mut server_answered = false;
        let mut pause = FIRST_PAUSE;
        loop {
            self.state.set(Phase::Connecting);
            let mut started = false;
            let ended = open::run(self, &mut shutdown, |phase| {
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
            let was_right = self.publication_was_right.load(Ordering::Relaxed);
            if !comes_back(error.code(), was_right) || gives_up {
                return Err(error);
            }
            if started {
                pause = FIRST_PAUSE;
            }
            self.state.set(Phase::Broken(error.code()));
            tracing::warn!(
                code = %error.code(), hint = error.hint_text(),
                "{error}; retrying in {pause:?}"
            );
            tokio::select! {
                _ = shutdown.wait_for(|stop| *stop) => return Ok(()),
                () = tokio::time::sleep(pause) => {}
            }
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }
}

/// Whether another session may follow an error. A wrong publication stops the relay only if it was
/// never right in this process, even as a standby. Otherwise somebody is altering it, and it will be
/// right again.
fn comes_back(code: Code, publication_was_right: bool) -> bool {
    match code {
        Code::PublicationMissing | Code::PublicationDrift if publication_was_right => true,
        code => code.disposition() == Disposition::Retry,
    }
}

fn warn_of_global_endpoint(settings: &Settings) {
    if crate::publish::is_global(&settings.pubsub) {
        tracing::warn!(
            "publishing through the global endpoint: Pub/Sub keeps the order of a key only among \
             publishes in one region; set POSTRIDER_PUBSUB_ENDPOINT to a regional endpoint"
        );
    }
}

/// PostgreSQL cuts names at 63 bytes. The parts that distinguish two relays must fit.
fn instance_name(host: &str, random: u32, pid: u32) -> String {
    let end = (0..=MAX_HOST_NAME)
        .rev()
        .find(|end| host.is_char_boundary(*end));
    let host = &host[..end.unwrap_or(0).min(host.len())];
    format!("postrider {host}/{random:08x}:{pid}")
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .ok()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .unwrap_or_else(|| "localhost".into())
}

/// The health of the slot that this relay streams from. The recorded position is compared only when a
/// session opens: nobody else can move the slot while we hold it.
fn health_of(slot: &Slot, origin: DatabaseOrigin) -> Health {
    let observation = Observation {
        slot: Some(slot),
        earlier: None,
        viewer: Viewer::Streaming,
        time_lag: None,
        origin,
        recorded: None,
    };
    health::judge(&observation, &Thresholds::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instance_names_differ_within_63_bytes_even_for_the_same_host_and_pid() {
        let name = instance_name("shop", 0x1a2b, 1);
        assert_eq!(name, "postrider shop/00001a2b:1");
        for host in ["x".repeat(64), "\u{e9}".repeat(32)] {
            let name = |random| instance_name(&host, random, u32::MAX);
            assert!(name(0).len() <= 63 && name(0).starts_with("postrider "));
            assert_ne!(name(0), name(1));
        }
    }
}
