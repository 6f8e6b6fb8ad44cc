//! Decides when to send a status message, and when we have to treat the slot as no longer ours.
//!
//! This is a state machine without IO; the caller passes in the clock. Status messages are our heartbeat,
//! because the walsender ends a session that has been silent for `wal_sender_timeout`. If we hear nothing
//! from the server for an eighth of that time, we ask for a reply. [`Lease`] decides how long we may send to
//! Pub/Sub while we wait for the reply.

use std::time::{Duration, Instant};

use decoder::Lsn;

use super::lease::{FrameEvidence, Lease};

/// Minimum time between a status message and the next one that reports a new position. Otherwise a fast
/// stream of outcomes would cause a message for each outcome.
const STATUS_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum time between two checks of the lease in a session with traffic.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long the server must be silent before we report less often ([`QUIET_INTERVAL`]). A walsender is silent for one
/// of two reasons:
///
/// - It is idle. No report is urgent in this case.
/// - It decodes changes that it does not send, and reads none of our messages meanwhile. Frequent reports would fill
///   a Unix socket, which has room for only a few hundred of them.
const QUIET_AFTER: Duration = Duration::from_secs(1);
/// Replaces [`STATUS_INTERVAL`] and [`POLL_INTERVAL`] while the server is silent.
const QUIET_INTERVAL: Duration = Duration::from_millis(250);

/// Maximum time between two status messages while reading is held back. Without reading we cannot hear the
/// server, so a failed write is the only sign of a broken connection.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);

/// What the session has to do now.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DueAction {
    Nothing,
    /// Send a status message. If `ask` is true, the message asks for a reply.
    Status {
        ask: bool,
    },
    /// The lease has expired: for too long, nothing has proved that the server receives our messages.
    LeaseLost,
}

/// Whether the session is reading from the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadState {
    /// We read, so we receive every message of the server.
    Open,
    /// Reading is held back by backpressure from the caller. The server may have sent messages that
    /// we have not read.
    HeldBack,
}

/// The state of one session: when we heard the server, what we sent, and the lease.
#[derive(Debug)]
pub(super) struct Feedback {
    eighth: Duration,
    lease: Lease,
    heard_at: Instant,
    sent_at: Instant,
    sent: Lsn,
    owes_reply: bool,
}

impl Feedback {
    /// Creates the state of a session that begins at `now` at the position `confirmed`.
    pub(super) fn new(wal_sender_timeout: Duration, confirmed: Lsn, now: Instant) -> Self {
        Self {
            eighth: wal_sender_timeout / 8,
            lease: Lease::new(wal_sender_timeout, now),
            heard_at: now,
            sent_at: now,
            sent: confirmed,
            owes_reply: false,
        }
    }

    /// Records that frames arrived from the server.
    pub(super) fn heard(&mut self, evidence: FrameEvidence, now: Instant) {
        self.heard_at = now;
        self.lease.heard(evidence, now);
    }

    /// Records a proof that PostgreSQL received a status message which we sent at `sent_at`.
    pub(super) fn proven(&mut self, sent_at: Instant) {
        self.lease.proven(sent_at);
    }

    /// Records that our walsender held the slot at the time `at`. This is only weak evidence that the server hears us,
    /// because a walsender keeps the slot for a while without hearing from us. So it extends the lease only if two
    /// conditions hold:
    ///
    /// - Reading is held back. While we read, the stream gives better evidence.
    /// - The server's last keepalive did not ask for a reply. A walsender asks when it has not heard us for half of
    ///   `wal_sender_timeout`.
    pub(super) fn has_slot(&mut self, at: Instant, reading: ReadState) {
        match reading {
            ReadState::HeldBack if !self.lease.is_unheard() => self.lease.proven(at),
            ReadState::HeldBack | ReadState::Open => {}
        }
    }

    /// The time at which we have to stop sending to Pub/Sub.
    pub(super) fn lease_ends_at(&self) -> Instant {
        self.lease.ends_at()
    }

    /// Records that a keepalive has asked for a reply.
    pub(super) fn reply_requested(&mut self) {
        self.owes_reply = true;
    }

    /// Returns what to do at `now`, with `confirmed` as the position to report.
    pub(super) fn due(&self, now: Instant, confirmed: Lsn, reading: ReadState) -> DueAction {
        let silent = now.saturating_duration_since(self.heard_at);
        let since_status = now.saturating_duration_since(self.sent_at);
        if now >= self.lease.ends_at() {
            return DueAction::LeaseLost;
        }
        let probe = match reading {
            ReadState::Open => self.eighth,
            ReadState::HeldBack => PROBE_INTERVAL.min(self.eighth),
        };
        let status_due = self.status_due(now, confirmed);
        let is_due = status_due.is_some_and(|due| due <= now);
        if self.owes_reply || is_due || since_status >= probe {
            return DueAction::Status {
                ask: silent >= self.eighth || self.lease.is_unheard(),
            };
        }
        DueAction::Nothing
    }

    /// When to send a status message with the position `confirmed`; `None` if that position was
    /// already reported.
    pub(super) fn status_due(&self, now: Instant, confirmed: Lsn) -> Option<Instant> {
        let silent = now.saturating_duration_since(self.heard_at);
        let interval = if silent >= QUIET_AFTER {
            QUIET_INTERVAL
        } else {
            STATUS_INTERVAL
        };
        (confirmed > self.sent).then(|| self.sent_at + interval)
    }

    /// How long the session's loop may wait before it checks the lease and the status messages again. `None` means
    /// the usual [`POLL_INTERVAL`]. Returns a longer time only if the session is reading and the server is silent.
    pub(super) fn rests_for(&self, now: Instant, reading: ReadState) -> Option<Duration> {
        let silent = now.saturating_duration_since(self.heard_at);
        let status_due = (self.sent_at + self.eighth).saturating_duration_since(now);
        let rests = reading == ReadState::Open && silent >= QUIET_AFTER;
        rests.then(|| QUIET_INTERVAL.min(status_due))
    }

    /// Records that a status message with `confirmed` was sent.
    pub(super) fn sent(&mut self, now: Instant, confirmed: Lsn) {
        self.sent_at = now;
        self.sent = confirmed;
        self.owes_reply = false;
    }
}

#[cfg(test)]
mod tests {
    use decoder::PgTimestamp;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(40);

    fn at(start: Instant, seconds: f64) -> Instant {
        start + Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_new_position_is_reported_20_ms_after_the_last_and_an_old_one_is_not_repeated() {
        let start = Instant::now();
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        assert_eq!(
            feedback.due(at(start, 0.019), Lsn::new(9), ReadState::Open),
            DueAction::Nothing
        );
        assert_eq!(
            feedback.due(at(start, 0.02), Lsn::new(9), ReadState::Open),
            DueAction::Status { ask: false }
        );
        feedback.sent(at(start, 0.02), Lsn::new(9));
        assert_eq!(
            feedback.due(at(start, 1.0), Lsn::new(9), ReadState::Open),
            DueAction::Nothing
        );
    }

    #[test]
    fn new_positions_are_reported_to_a_silent_server_four_times_a_second() {
        let start = Instant::now();
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        let due =
            |feedback: &Feedback, seconds| feedback.status_due(at(start, seconds), Lsn::new(9));
        feedback.sent(at(start, 0.99), Lsn::new(8));
        assert_eq!(due(&feedback, 0.99), Some(at(start, 1.01)));
        assert_eq!(due(&feedback, 1.0), Some(at(start, 1.24)));
        feedback.heard(FrameEvidence::default(), at(start, 1.1));
        assert_eq!(due(&feedback, 1.1), Some(at(start, 1.01)));
        feedback.sent(at(start, 1.1), Lsn::new(9));
        assert_eq!(due(&feedback, 1.2), None);
    }

    #[test]
    fn an_idle_session_wakes_up_rarely_until_data_arrives() {
        let start = Instant::now();
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        let rests =
            |feedback: &Feedback, seconds| feedback.rests_for(at(start, seconds), ReadState::Open);
        assert_eq!(rests(&feedback, 0.9), None);
        assert_eq!(rests(&feedback, 1.0), Some(QUIET_INTERVAL));
        let held_back = feedback.rests_for(at(start, 1.0), ReadState::HeldBack);
        assert_eq!(held_back, None, "the lease must be checked");
        let until_status = rests(&feedback, 4.9).unwrap();
        assert!(
            until_status <= Duration::from_millis(100),
            "{until_status:?}"
        );
        feedback.heard(FrameEvidence::default(), at(start, 2.0));
        assert_eq!(rests(&feedback, 2.1), None);
    }

    #[test]
    fn a_requested_reply_is_due_at_once() {
        let start = Instant::now();
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        feedback.reply_requested();
        assert_eq!(
            feedback.due(start, Lsn::new(5), ReadState::Open),
            DueAction::Status { ask: false }
        );
    }

    #[test]
    fn a_silent_server_is_asked_after_5_s_and_given_up_after_30_s_of_a_40_s_timeout() {
        let start = Instant::now();
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        let due = |feedback: &Feedback, seconds| {
            feedback.due(at(start, seconds), Lsn::new(5), ReadState::Open)
        };
        assert_eq!(due(&feedback, 5.0), DueAction::Status { ask: true });
        feedback.sent(at(start, 5.0), Lsn::new(5));
        assert_eq!(due(&feedback, 29.9), DueAction::Status { ask: true });
        assert_eq!(due(&feedback, 30.0), DueAction::LeaseLost);
        let evidence = FrameEvidence {
            last_sent_at: Some(PgTimestamp::from_micros(0)),
            keepalive: None,
        };
        feedback.heard(evidence, at(start, 29.0));
        assert_ne!(due(&feedback, 30.0), DueAction::LeaseLost);
    }

    #[test]
    fn while_reading_is_held_back_status_is_still_sent_and_proof_extends_the_lease() {
        let start = Instant::now();
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        let due = |feedback: &Feedback, seconds| {
            feedback.due(at(start, seconds), Lsn::new(5), ReadState::HeldBack)
        };
        for second in (2..1_000).step_by(2).map(f64::from) {
            assert_eq!(
                due(&feedback, second),
                DueAction::Status { ask: second >= 5.0 }
            );
            feedback.sent(at(start, second), Lsn::new(5));
            feedback.proven(at(start, second - 1.0));
        }
        assert_ne!(due(&feedback, 1_026.0), DueAction::LeaseLost);
        assert_eq!(due(&feedback, 1_027.5), DueAction::LeaseLost);
    }

    #[test]
    fn holding_the_slot_extends_the_lease_only_while_reading_is_held_back() {
        let start = Instant::now() + TIMEOUT;
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        feedback.has_slot(at(start, 20.0), ReadState::Open);
        assert_eq!(feedback.lease_ends_at(), at(start, 30.0));
        feedback.has_slot(at(start, 20.0), ReadState::HeldBack);
        assert_eq!(feedback.lease_ends_at(), at(start, 50.0));
        // The server has reported that it does not hear us.
        let asks = FrameEvidence {
            last_sent_at: Some(PgTimestamp::from_micros(0)),
            keepalive: Some((PgTimestamp::from_micros(0), true)),
        };
        feedback.heard(asks, at(start, 25.0));
        let ends_at = feedback.lease_ends_at();
        feedback.has_slot(at(start, 28.0), ReadState::HeldBack);
        assert_eq!(feedback.lease_ends_at(), ends_at);
    }
}
