//! Decides how long a session continues while its PostgreSQL server shuts down.
//!
//! A server that shuts down sends the rest of its WAL, and waits until the relay has confirmed it. Then the
//! server ends the stream. If the relay closed the session earlier, the slot would not have consumed all WAL,
//! and `pg_upgrade` would refuse the slot. But a server that shuts down may accept no more writes. Events that
//! need a record then never get an outcome, so the session must end without them.

use std::time::{Duration, Instant};

use decoder::Lsn;

use super::Pipeline;
use crate::error::{Code, Error};
use crate::session::supervisor::Supervision;

/// Maximum time that the server has to wait while this session makes no progress. While the session makes
/// progress no limit is needed here, because a server that shuts down writes only a limited amount of WAL.
const LIMIT: Duration = Duration::from_secs(5);

/// Maximum time without a higher confirmable position, unless the session's limit ([`ServerStop::new`]) is longer. If
/// an event never gets an outcome, the confirmable position does not move, although messages and outcomes of other
/// events keep arriving.
const LONGEST: Duration = Duration::from_secs(30);

/// The progress of a session. A large transaction moves the confirmable position only at its end, so its
/// messages and the outcomes of its events count too. Keepalives do not count, because the server may repeat
/// them for ever.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct StopProgress {
    confirmable: Lsn,
    /// Number of steps. A step is a message that the relay has received, or an occasion on which events got an outcome.
    steps: u64,
}

/// The state of a session with respect to the shutdown of its server.
#[derive(Debug)]
pub(in crate::session) struct ServerStop {
    limit: Duration,
    /// The position up to which the server has sent its WAL: the highest `wal_end` of its keepalives.
    sent: Lsn,
    steps: u64,
    /// The last progress of the session, and its time. `None` until the server shuts down.
    last: Option<(StopProgress, Instant)>,
    /// The start of the period that [`LONGEST`] limits. `None` until the server shuts down. The start is the latest of
    /// these times:
    ///
    /// - The server began to shut down.
    /// - The confirmable position moved.
    /// - The server last had nothing to wait for.
    moved: Option<Instant>,
}

impl ServerStop {
    /// `attempt` is the maximum duration of a publish attempt. It is `None` if the session writes a record for each
    /// published event.
    ///
    /// A server that shuts down may accept no more writes. A session that writes no such records can still finish
    /// events: Pub/Sub only has to store them. So the limit of this session leaves time for a slow publish attempt.
    pub(in crate::session) fn new(attempt: Option<Duration>) -> Self {
        let limit = attempt.map_or(LIMIT, |attempt| attempt + LIMIT);
        Self {
            limit,
            sent: Lsn::default(),
            steps: 0,
            last: None,
            moved: None,
        }
    }

    /// Notes that a message came, or that events got an outcome.
    pub(super) fn advances(&mut self) {
        self.steps += 1;
    }

    /// Notes the `wal_end` of a keepalive.
    pub(super) fn sent(&mut self, wal_end: Lsn) {
        self.sent = self.sent.max(wal_end);
    }

    /// Returns the time at which the session has to end. `has_pending` says whether some events have no outcome.
    /// Returns `None` in these cases:
    ///
    /// - The server is not shutting down.
    /// - The server does not wait for this session, because every event has an outcome and the relay can confirm all
    ///   WAL that the server has sent. The session then ends when the server ends the stream or the lease runs out.
    fn ends_at(&mut self, confirmable: Lsn, has_pending: bool, now: Instant) -> Option<Instant> {
        let (before, since) = self.last.as_mut()?;
        let moved = self.moved.get_or_insert(*since);
        let progress = StopProgress {
            confirmable,
            steps: self.steps,
        };
        let is_done = !has_pending && confirmable >= self.sent;
        if is_done || before.confirmable != confirmable {
            *moved = now;
        }
        if is_done || *before != progress {
            (*before, *since) = (progress, now);
        }
        let end = (*since + self.limit).min(*moved + LONGEST.max(self.limit));
        (!is_done).then_some(end)
    }
}

impl Pipeline {
    /// Handles a new result of the supervisor. Returns the error with which the session must end now. `None` if
    /// the session may continue.
    pub(super) fn on_supervision(&mut self) -> Option<Error> {
        let found = self.supervision.borrow_and_update().clone();
        if found == Supervision::PublicationRight {
            // Forget the shutdown: the server does not shut down after all, or another server has answered.
            (self.server_stop.last, self.server_stop.moved) = (None, None);
        } else if matches!(found, Supervision::ServerStopping { .. })
            && self.server_stop.last.is_none()
        {
            tracing::info!("PostgreSQL is shutting down: confirming the rest of its WAL");
            self.server_stop.last = Some((StopProgress::default(), Instant::now()));
        }
        found.ends_session()
    }

    /// Returns the time at which the session has to end, if its server is shutting down and waits for the session.
    pub(super) fn server_stop_ends_at(&mut self, now: Instant) -> Option<Instant> {
        let confirmable = self.confirmable().lsn();
        let has_pending = self.seam.is_some() || self.watermark.pending_transactions() > 0;
        self.server_stop.ends_at(confirmable, has_pending, now)
    }
}

/// The error of a session that cannot confirm the rest of the WAL of its server.
pub(super) fn server_waits_in_vain() -> Error {
    let what = "PostgreSQL is shutting down, and waits for events that have no outcome yet";
    Error::new(Code::PostgresStopping, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn a_session_ends_once_the_server_has_waited_5_s_for_it_without_progress() {
        let start = Instant::now();
        let lsn = Lsn::new;
        let mut stop = ServerStop::new(None);
        stop.sent(lsn(100));
        assert_eq!(stop.ends_at(lsn(10), true, start), None, "no shutdown");
        stop.last = Some((StopProgress::default(), start));
        let mut ends_at = |confirmable, has_pending, seconds, advances: bool| {
            if advances {
                stop.advances();
            }
            let end = stop.ends_at(lsn(confirmable), has_pending, at(start, seconds));
            end.map(|end| end.duration_since(start).as_secs())
        };
        assert_eq!(ends_at(10, true, 0, false), Some(5));
        assert_eq!(ends_at(10, true, 1, false), Some(5));
        // Progress extends the limit. Progress is a confirmed position, or an outcome within a large
        // transaction.
        assert_eq!(ends_at(20, true, 4, false), Some(9));
        assert_eq!(ends_at(20, true, 7, true), Some(12));
        // No event is pending, but the session cannot confirm all WAL that the server has sent.
        assert_eq!(ends_at(20, false, 8, false), Some(12));
        assert_eq!(ends_at(100, false, 8, false), None);
        // While the server itself has work to do, the session waits until the server has finished.
        assert_eq!(ends_at(100, false, 1_000, false), None);
        assert_eq!(ends_at(100, true, 1_001, false), Some(1_005));
        // From second 1,001 on, an event is pending that never gets an outcome, so the confirmable position stays at
        // 100. The outcomes of other events extend the limit, but the session ends at second 1,030 at the latest. That
        // is 30 s after second 1,000, the last time at which no event was pending.
        for seconds in (1_004..1_024).step_by(4) {
            assert_eq!(ends_at(100, true, seconds, true), Some(seconds + 5));
        }
        assert_eq!(ends_at(100, true, 1_028, true), Some(1_030));
    }

    #[test]
    fn a_session_gives_a_publish_attempt_time_to_end_when_the_server_stops() {
        let start = Instant::now();
        let mut stop = ServerStop::new(Some(Duration::from_secs(10)));
        stop.last = Some((StopProgress::default(), start));
        let end = stop.ends_at(Lsn::default(), true, start);
        assert_eq!(end, Some(at(start, 15)));
    }
}
