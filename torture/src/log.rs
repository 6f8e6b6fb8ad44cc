//! The log lines of a schedule's relays, and the times at which each relay started, streamed and ended.
//! All times are on the clock of the emulator's journal, like the times of publish attempts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Log lines which show that a relay streams. The relay logs the first line when it reads from the slot, and
/// the second when a recovery has delivered all rows from the tables.
const STREAMS: [&str; 2] = [STREAMING, "recovered: every row"];
const STREAMING: &str = "streaming slot=";
/// Log lines of a relay that begins to deliver rows from the tables.
const RECOVERS: [&str; 2] = [
    "every row without a record in outbox.dispatch",
    // Logged by a relay that keeps its slot.
    "every row without a known outcome from the tables",
];
/// Log line of a session that continues the recovery of an earlier session.
const CONTINUES: &str = "continuing a recovery";
/// Part of the log line of a relay that finishes a first start.
const FIRST_START: &str = "an earlier recovery (first-start) has not finished";
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
    /// Whether a relay continued the first start of a relay that was killed. The continuing relay publishes the rows
    /// from the tables.
    pub(crate) fn finishes_first_start(&self) -> bool {
        let finishes = |line: &String| line.contains(FIRST_START);
        self.lines.iter().any(finishes)
    }

    /// How often a relay began to deliver unrecorded rows from the tables.
    pub(crate) fn recoveries(&self) -> u64 {
        self.recovers.len() as u64
    }
}

/// The life of one relay process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) pid: u32,
    pub(crate) born: Duration,
    pub(crate) died: Option<Duration>,
    /// When the relay logged that it streams. The relay reads the existing dispatch rows shortly before each
    /// of these times, so afterwards it knows which events were recorded before that read.
    pub(crate) streams: Vec<Duration>,
    /// When the relay logged that a session begins to deliver events: from its slot, or from the tables.
    pub(crate) sessions: Vec<Duration>,
    /// Whether the current session recovers. Such a session first delivers the rows from the tables. It logs only
    /// afterwards that it streams.
    pub(crate) recovers: bool,
}

impl Life {
    /// Notes a log line of the relay.
    fn said(&mut self, at: Duration, line: &str) {
        if STREAMS.iter().any(|said| line.contains(said)) {
            self.streams.push(at);
        }
        if line.contains(CONTINUES) || begins_recovery(line) {
            self.sessions.push(at);
            self.recovers = true;
        } else if line.contains(STREAMING) {
            // A recovering session was noted when its recovery began, so its streaming line must not count
            // again. A line with `confirmed=` always counts: it comes from a session that does not recover.
            if line.contains("confirmed=") || !self.recovers {
                self.sessions.push(at);
            }
            self.recovers = false;
        }
    }
}

/// Whether this is the log line of a relay that begins to deliver rows from the tables.
fn begins_recovery(line: &str) -> bool {
    RECOVERS.iter().any(|said| line.contains(said))
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
            ..Life::default()
        });
    }

    /// Notes a log line of a relay.
    pub(crate) fn said(&self, pid: u32, at: Duration, line: &str) {
        let mut log = self.lock();
        log.lines
            .push(format!("{:8.3} [{pid}] {line}", at.as_secs_f64()));
        if begins_recovery(line) {
            log.recovers.push(at);
        }
        if line.contains(GIVEN_UP) {
            log.given_up.push(at);
        }
        if line.contains(SUCCEEDED) {
            log.succeeded.push(at);
        }
        if let Some(life) = log.lives.iter_mut().rfind(|life| life.pid == pid) {
            life.said(at, line);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_after_a_recovery_does_not_count_as_a_new_session() {
        let log = Log::default();
        log.born(1, Duration::ZERO);
        let lines = [
            "streaming slot=a confirmed=0/1",
            "recovering: the slot was lost; every row without a record in outbox.dispatch is published",
            "continuing a recovery that an earlier session has not finished",
            "recovered: every row committed since its table was captured has an outcome",
            "streaming slot=a",
            "streaming slot=a confirmed=0/2",
        ];
        for (at, line) in (1..).zip(lines) {
            log.said(1, Duration::from_secs(at), line);
        }
        let life = log.all().lives.remove(0);
        let seconds = |times: &[Duration]| Vec::from_iter(times.iter().map(Duration::as_secs));
        assert_eq!(seconds(&life.sessions), [1, 2, 3, 6]);
        assert_eq!(seconds(&life.streams), [1, 4, 5, 6]);
    }
}
