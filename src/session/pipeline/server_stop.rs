//! Decides how long a session continues while its PostgreSQL server shuts down.
//!
//! A server that shuts down sends the rest of its WAL, and waits until the relay has confirmed it. Then the server
//! ends the stream. If the relay closed the session earlier, the slot would not have consumed all WAL, and
//! `pg_upgrade` would refuse the slot. But the server may accept no more writes, so some events may never get their
//! outcome. The server must not wait for those.

use std::time::{Duration, Instant};

use decoder::Lsn;

use super::Pipeline;
use crate::error::{Code, Error};
use crate::session::supervisor::Supervision;

/// Maximum time that the server has to wait for this session while the session confirms no further position.
const LIMIT: Duration = Duration::from_secs(5);

/// What a session remembers about the shutdown of its server.
#[derive(Debug, Default)]
pub(in crate::session) struct ServerStop {
    /// The position up to which the server has sent its WAL: the highest `wal_end` of its keepalives.
    sent: Lsn,
    /// The position that may be confirmed, and since when it has not changed. `None` until the server shuts down.
    confirmed: Option<(Lsn, Instant)>,
}

impl ServerStop {
    /// Notes the `wal_end` of a keepalive.
    pub(super) fn sent(&mut self, wal_end: Lsn) {
        self.sent = self.sent.max(wal_end);
    }

    /// Returns when the session has to end. `None` while the server is not shutting down. Also `None` while the
    /// server does not wait for this session. In that case the server ends the stream itself, or the session
    /// loses its lease if the server has died. `has_pending` says whether the session has something without an
    /// outcome.
    fn ends_at(&mut self, confirmable: Lsn, has_pending: bool, now: Instant) -> Option<Instant> {
        let (confirmed, since) = self.confirmed.as_mut()?;
        if *confirmed != confirmable || (!has_pending && confirmable >= self.sent) {
            (*confirmed, *since) = (confirmable, now);
        }
        (has_pending || confirmable < self.sent).then_some(*since + LIMIT)
    }
}

impl Pipeline {
    /// Handles a new result of the supervisor. Returns the error with which the session must end now. `None` if
    /// the session may continue.
    pub(super) fn on_supervision(&mut self) -> Option<Error> {
        let found = self.supervision.borrow_and_update().clone();
        if found == Supervision::PublicationRight {
            // The server goes on after all, or another server has answered.
            self.server_stop.confirmed = None;
        } else if matches!(found, Supervision::ServerStopping { .. })
            && self.server_stop.confirmed.is_none()
        {
            tracing::info!("PostgreSQL is shutting down: confirming the rest of its WAL");
            self.server_stop.confirmed = Some((self.confirmable().lsn(), Instant::now()));
        }
        found.ends_session()
    }

    /// Returns when the session has to end because its server is shutting down and waits for the session.
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

    #[test]
    fn a_session_ends_once_the_server_has_waited_5_s_for_it_without_progress() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let lsn = Lsn::new;
        let mut stop = ServerStop::default();
        stop.sent(lsn(100));
        assert_eq!(stop.ends_at(lsn(10), true, at(0)), None, "no shutdown");
        stop.confirmed = Some((lsn(10), at(0)));
        let mut ends_at = |confirmable, has_pending, seconds| {
            stop.ends_at(lsn(confirmable), has_pending, at(seconds))
        };
        assert_eq!(ends_at(10, true, 1), Some(at(5)));
        // Progress extends the limit.
        assert_eq!(ends_at(20, true, 4), Some(at(9)));
        // No event is pending, but the session cannot confirm all WAL that the server has sent.
        assert_eq!(ends_at(20, false, 8), Some(at(9)));
        assert_eq!(ends_at(100, false, 8), None);
        // While the server itself has work to do, the session waits for as long as that takes.
        assert_eq!(ends_at(100, false, 1_000), None);
        assert_eq!(ends_at(100, true, 1_001), Some(at(1_005)));
    }
}
