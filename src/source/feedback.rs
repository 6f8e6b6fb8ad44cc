//! When to send a status message, and when the slot can no longer be taken for ours.
//!
//! A state machine without IO; the clock is passed in. The walsender ends a session that has been
//! silent for `wal_sender_timeout`; after an eighth of it without a word we ask for one. How long
//! the slot is ours meanwhile, see [`Lease`].

use std::time::{Duration, Instant};

use decoder::Lsn;

use super::lease::{Lease, Words};

/// From one status message to the next, at least, for a position that is further on.
const STATUS_INTERVAL: Duration = Duration::from_millis(20);

/// How often a session that hears the server looks at its lease.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// A server that says nothing for so long has nothing to be told of soon: both intervals are longer then.
/// A walsender that is busy with what it does not send takes in no status messages either, and a Unix
/// socket has room for a few hundred.
const QUIET_AFTER: Duration = Duration::from_secs(1);
const QUIET_INTERVAL: Duration = Duration::from_millis(250);

/// How often a write shows whether the connection still stands while the reader is held back and
/// cannot hear the server.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);

/// What is due.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// Send a status message, asking for a reply or not.
    Status {
        ask: bool,
    },
    /// The server has not been heard, or has not heard us, for too long.
    LeaseLost,
}

/// Whether the session reads from the server just now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    /// Every word of the server is heard.
    Open,
    /// Held back by the relay: the server may have spoken, unheard.
    HeldBack,
}

/// The feedback of one session.
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
    /// A session that began at `now` with `confirmed`.
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

    /// Frames came from the server.
    pub(super) fn heard(&mut self, words: Words, now: Instant) {
        self.heard_at = now;
        self.lease.words(words, now);
    }

    /// PostgreSQL shows a status message of ours that was sent then.
    pub(super) fn proven(&mut self, sent_at: Instant) {
        self.lease.proven(sent_at);
    }

    /// Our walsender had the slot at that time. Says little, as it keeps the slot for a while when
    /// it hears nothing; all there is while reading is held back, and nothing when it is not: then
    /// the stream itself would tell.
    pub(super) fn has_slot(&mut self, at: Instant, reading: Reading) {
        match reading {
            Reading::HeldBack if !self.lease.is_unheard() => self.lease.proven(at),
            Reading::HeldBack | Reading::Open => {}
        }
    }

    /// When sending has to stop.
    pub(super) fn lease_ends_at(&self) -> Instant {
        self.lease.ends_at()
    }

    /// A keepalive asked for a reply.
    pub(super) fn reply_requested(&mut self) {
        self.owes_reply = true;
    }

    /// What to do at `now`, with `confirmed` as the position to report.
    pub(super) fn due(&self, now: Instant, confirmed: Lsn, reading: Reading) -> Due {
        let silent = now.saturating_duration_since(self.heard_at);
        let since_status = now.saturating_duration_since(self.sent_at);
        if now >= self.lease.ends_at() {
            return Due::LeaseLost;
        }
        let probe = match reading {
            Reading::Open => self.eighth,
            Reading::HeldBack => PROBE_INTERVAL.min(self.eighth),
        };
        let status_due = self.status_due(now, confirmed);
        let is_due = status_due.is_some_and(|due| due <= now);
        if self.owes_reply || is_due || since_status >= probe {
            return Due::Status {
                ask: silent >= self.eighth || self.lease.is_unheard(),
            };
        }
        Due::Nothing
    }

    /// When a status message is due with `confirmed`, if that is further on than the last one said.
    pub(super) fn status_due(&self, now: Instant, confirmed: Lsn) -> Option<Instant> {
        let silent = now.saturating_duration_since(self.heard_at);
        let interval = match silent >= QUIET_AFTER {
            true => QUIET_INTERVAL,
            false => STATUS_INTERVAL,
        };
        (confirmed > self.sent).then(|| self.sent_at + interval)
    }

    /// How long nothing has to be looked at but what the server says; `None` is a
    /// [`LOOK_INTERVAL`].
    pub(super) fn rests_for(&self, now: Instant, reading: Reading) -> Option<Duration> {
        let silent = now.saturating_duration_since(self.heard_at);
        let status_due = (self.sent_at + self.eighth).saturating_duration_since(now);
        let rests = reading == Reading::Open && silent >= QUIET_AFTER;
        rests.then(|| QUIET_INTERVAL.min(status_due))
    }

    /// A status message with `confirmed` went out.
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
            feedback.due(at(start, 0.019), Lsn::new(9), Reading::Open),
            Due::Nothing
        );
        assert_eq!(
            feedback.due(at(start, 0.02), Lsn::new(9), Reading::Open),
            Due::Status { ask: false }
        );
        feedback.sent(at(start, 0.02), Lsn::new(9));
        assert_eq!(
            feedback.due(at(start, 1.0), Lsn::new(9), Reading::Open),
            Due::Nothing
        );
    }

    #[test]
    fn a_server_that_says_nothing_is_told_of_new_positions_four_times_a_second() {
        let start = Instant::now();
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        let due =
            |feedback: &Feedback, seconds| feedback.status_due(at(start, seconds), Lsn::new(9));
        feedback.sent(at(start, 0.99), Lsn::new(8));
        assert_eq!(due(&feedback, 0.99), Some(at(start, 1.01)));
        assert_eq!(due(&feedback, 1.0), Some(at(start, 1.24)));
        feedback.heard(Words::default(), at(start, 1.1));
        assert_eq!(due(&feedback, 1.1), Some(at(start, 1.01)));
        feedback.sent(at(start, 1.1), Lsn::new(9));
        assert_eq!(due(&feedback, 1.2), None);
    }

    #[test]
    fn an_idle_session_looks_up_seldom_until_something_comes() {
        let start = Instant::now();
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        let rests =
            |feedback: &Feedback, seconds| feedback.rests_for(at(start, seconds), Reading::Open);
        assert_eq!(rests(&feedback, 0.9), None);
        assert_eq!(rests(&feedback, 1.0), Some(QUIET_INTERVAL));
        let held_back = feedback.rests_for(at(start, 1.0), Reading::HeldBack);
        assert_eq!(held_back, None, "the lease is looked at");
        let until_status = rests(&feedback, 4.9).unwrap();
        assert!(
            until_status <= Duration::from_millis(100),
            "{until_status:?}"
        );
        feedback.heard(Words::default(), at(start, 2.0));
        assert_eq!(rests(&feedback, 2.1), None);
    }

    #[test]
    fn a_requested_reply_is_due_at_once() {
        let start = Instant::now();
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        feedback.reply_requested();
        assert_eq!(
            feedback.due(start, Lsn::new(5), Reading::Open),
            Due::Status { ask: false }
        );
    }

    #[test]
    fn a_silent_server_is_asked_after_an_eighth_and_given_up_after_three_quarters_of_its_timeout() {
        let start = Instant::now();
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        let due = |feedback: &Feedback, seconds| {
            feedback.due(at(start, seconds), Lsn::new(5), Reading::Open)
        };
        assert_eq!(due(&feedback, 5.0), Due::Status { ask: true });
        feedback.sent(at(start, 5.0), Lsn::new(5));
        assert_eq!(due(&feedback, 29.9), Due::Status { ask: true });
        assert_eq!(due(&feedback, 30.0), Due::LeaseLost);
        let words = Words {
            last_sent_at: Some(PgTimestamp::from_micros(0)),
            keepalive: None,
        };
        feedback.heard(words, at(start, 29.0));
        assert_ne!(due(&feedback, 30.0), Due::LeaseLost);
    }

    #[test]
    fn a_reader_that_is_held_back_keeps_the_walsender_alive_and_its_lease_by_what_postgresql_shows()
    {
        let start = Instant::now();
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        let due = |feedback: &Feedback, seconds| {
            feedback.due(at(start, seconds), Lsn::new(5), Reading::HeldBack)
        };
        for second in (2..1_000).step_by(2).map(f64::from) {
            assert_eq!(due(&feedback, second), Due::Status { ask: second >= 5.0 });
            feedback.sent(at(start, second), Lsn::new(5));
            feedback.proven(at(start, second - 1.0));
        }
        assert_ne!(due(&feedback, 1_026.0), Due::LeaseLost);
        assert_eq!(due(&feedback, 1_027.5), Due::LeaseLost);
    }

    #[test]
    fn that_our_walsender_has_the_slot_extends_the_lease_only_while_reading_is_held_back() {
        let start = Instant::now() + TIMEOUT;
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        feedback.has_slot(at(start, 20.0), Reading::Open);
        assert_eq!(feedback.lease_ends_at(), at(start, 30.0));
        feedback.has_slot(at(start, 20.0), Reading::HeldBack);
        assert_eq!(feedback.lease_ends_at(), at(start, 50.0));
        // The server has said that it does not hear us.
        let asks = Words {
            last_sent_at: Some(PgTimestamp::from_micros(0)),
            keepalive: Some((PgTimestamp::from_micros(0), true)),
        };
        feedback.heard(asks, at(start, 25.0));
        let ends_at = feedback.lease_ends_at();
        feedback.has_slot(at(start, 28.0), Reading::HeldBack);
        assert_eq!(feedback.lease_ends_at(), ends_at);
    }
}
