//! What the relays of a schedule have logged, and when they lived, by the journal's clock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What a relay logs once it has the slot, or has delivered what was in the tables before it.
const STREAMS: [&str; 2] = ["streaming slot=", "recovered: everything"];
/// What a relay logs when it begins to deliver from the tables.
const RECOVERS: &str = "every row without a record in outbox.dispatch";
/// What a relay logs when it leaves what is on its way to itself.
const GIVEN_UP: &str = "PostgreSQL has released the slot";
/// What a relay logs when it records nothing any more.
const SUCCEEDED: &str = "another session has taken over the slot";

/// A handle to the log. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Log {
    inner: Arc<Mutex<Logged>>,
}

/// All of it.
#[derive(Debug, Clone, Default)]
pub(super) struct Logged {
    pub(super) lines: Vec<String>,
    pub(super) lives: Vec<Life>,
    /// When relays have begun to deliver everything without a record from the tables.
    pub(super) recovers: Vec<Duration>,
    /// When relays have found that PostgreSQL had given their slot up.
    pub(super) given_up: Vec<Duration>,
    /// When relays have found that another session has had their slot.
    pub(super) succeeded: Vec<Duration>,
}

impl Logged {
    /// How often a relay has begun to deliver everything without a record from the tables.
    pub(super) fn recoveries(&self) -> u64 {
        self.recovers.len() as u64
    }
}

/// The life of one relay process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Life {
    pub(super) pid: u32,
    pub(super) born: Duration,
    pub(super) died: Option<Duration>,
    /// When it said that it streams: a little before, it has looked up what is recorded.
    pub(super) streams: Vec<Duration>,
}

impl Log {
    /// A relay was started.
    pub(super) fn born(&self, pid: u32, at: Duration) {
        let mut log = self.lock();
        let line = format!("{:8.3} -- relay {pid} starts", at.as_secs_f64());
        log.lines.push(line);
        log.lives.push(Life {
            pid,
            born: at,
            died: None,
            streams: Vec::new(),
        });
    }

    /// It has logged a line.
    pub(super) fn said(&self, pid: u32, at: Duration, line: &str) {
        let mut log = self.lock();
        log.lines
            .push(format!("{:8.3} [{pid}] {line}", at.as_secs_f64()));
        if line.contains(RECOVERS) {
            log.recovers.push(at);
        }
        if line.contains(GIVEN_UP) {
            log.given_up.push(at);
        }
        if line.contains(SUCCEEDED) {
            log.succeeded.push(at);
        }
        let life = log.lives.iter_mut().rfind(|life| life.pid == pid);
        if let Some(life) = life.filter(|_| STREAMS.iter().any(|said| line.contains(said))) {
            life.streams.push(at);
        }
    }

    /// It is gone.
    pub(super) fn died(&self, pid: u32, at: Duration, how: &str) {
        let mut log = self.lock();
        let line = format!("{:8.3} -- relay {pid} {how}", at.as_secs_f64());
        log.lines.push(line);
        if let Some(life) = log.lives.iter_mut().rfind(|life| life.pid == pid) {
            life.died = Some(at);
        }
    }

    /// Whether it has logged anything.
    pub(super) fn has_spoken(&self, pid: u32) -> bool {
        let name = format!(" [{pid}] ");
        self.lock().lines.iter().any(|line| line.contains(&name))
    }

    /// Whether it has ever said that it streams.
    pub(super) fn has_streamed(&self, pid: u32) -> bool {
        let streams = |life: &Life| life.pid == pid && !life.streams.is_empty();
        self.lock().lives.iter().any(streams)
    }

    pub(super) fn all(&self) -> Logged {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Logged> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
