//! The log lines of a schedule's relays, and the times at which each relay started, streamed and ended.
//! All times are on the clock of the emulator's journal, like the times of publish attempts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Log lines which show that a relay streams. The relay logs the first line when it reads from the slot, and
/// the second when a recovery has delivered all rows from the tables.
const STREAMS: [&str; 2] = ["streaming slot=", "recovered: every row"];
/// Log lines of a relay that begins to deliver rows from the tables.
const RECOVERS: [&str; 2] = [
    "every row without a record in outbox.dispatch",
    // Logged by a relay that keeps its slot.
    "every row without a known outcome from the tables",
];
/// Log line of a relay that abandons its requests in flight, because PostgreSQL has released its
/// slot.
const GIVEN_UP: &str = "PostgreSQL has released the slot";
/// Log line of a relay that stops recording, because another session has taken over its slot.
const SUCCEEDED: &str = "another session has taken over the slot";

/// A handle to the log. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log {
    inner: Arc<Mutex<Logged>>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Logged {
    pub(crate) lines: Vec<String>,
    pub(crate) lives: Vec<Life>,
    /// When relays began to deliver unrecorded rows from the tables.
    pub(crate) recovers: Vec<Duration>,
    /// When relays found that PostgreSQL had released their slot.
    pub(crate) given_up: Vec<Duration>,
    /// When relays found that another session had taken over their slot.
    pub(crate) succeeded: Vec<Duration>,
}

impl Logged {
    /// How often a relay began to deliver unrecorded rows from the tables.
    pub(crate) fn recoveries(&self) -> u64 {
        self.recovers.len() as u64
    }
}

/// The life of one relay process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) pid: u32,
    pub(crate) born: Duration,
    pub(crate) died: Option<Duration>,
    /// When the relay logged that it streams. The relay reads the existing dispatch rows shortly before each
    /// of these times, so afterwards it knows which events were recorded before that read.
    pub(crate) streams: Vec<Duration>,
}

impl Log {
    /// Notes that the harness has started a relay.
    pub(crate) fn born(&self, pid: u32, at: Duration) {
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

    /// Notes a log line of a relay.
    pub(crate) fn said(&self, pid: u32, at: Duration, line: &str) {
        let mut log = self.lock();
        log.lines
            .push(format!("{:8.3} [{pid}] {line}", at.as_secs_f64()));
        if RECOVERS.iter().any(|said| line.contains(said)) {
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

    /// Notes that a relay has ended.
    pub(crate) fn died(&self, pid: u32, at: Duration, how: &str) {
        let mut log = self.lock();
        let line = format!("{:8.3} -- relay {pid} {how}", at.as_secs_f64());
        log.lines.push(line);
        if let Some(life) = log.lives.iter_mut().rfind(|life| life.pid == pid) {
            life.died = Some(at);
        }
    }

    /// Whether the relay has logged a line.
    pub(crate) fn has_spoken(&self, pid: u32) -> bool {
        let name = format!(" [{pid}] ");
        self.lock().lines.iter().any(|line| line.contains(&name))
    }

    /// Whether the relay has ever logged that it streams.
    pub(crate) fn has_streamed(&self, pid: u32) -> bool {
        let streams = |life: &Life| life.pid == pid && !life.streams.is_empty();
        self.lock().lives.iter().any(streams)
    }

    pub(crate) fn all(&self) -> Logged {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Logged> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
