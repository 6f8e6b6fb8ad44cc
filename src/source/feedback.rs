//! When to send a status message, and when the slot can no longer be taken for ours.
//!
//! A state machine without IO; the clock is passed in. The walsender ends a session that has been
//! silent for `wal_sender_timeout`, and only then can another session take the slot. So the slot
//! is a lease: each word from the server proves that we had it then. After an eighth of the
//! time-out without a word we ask for one; after three quarters of it we give the session up, and
//! every publish attempt, which is shorter than the last quarter, is over before the slot changes
//! hands. Not sooner: while it decodes a large transaction of which it sends nothing, a walsender
//! looks at our messages only every half of its time-out.
//!
//! A process that was frozen or starved for half of the time-out has not sent a status message
//! meanwhile, and cannot know since when the bytes that it now reads have lain there: it gives the
//! session up as well.

use std::time::{Duration, Instant};

use decoder::Lsn;

/// How long a new confirmed position may wait for its status message.
pub(super) const STATUS_INTERVAL: Duration = Duration::from_millis(250);

/// While the reader is held back it cannot hear the server; a write then shows whether the
/// connection still stands.
const WRITE_PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// What is due.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// Send a status message, asking for a reply or not.
    Status {
        ask: bool,
    },
    /// The server has been silent for too long.
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
            heard_at: now,
            sent_at: now,
            sent: confirmed,
            owes_reply: false,
        }
    }

    /// Bytes came from the server, at this time or later.
    pub(super) fn heard(&mut self, at: Instant) {
        self.heard_at = at;
    }

    /// Until when the slot is certainly ours, if nothing more is heard and nothing more sent.
    pub(super) fn held_until(&self, now: Instant, reading: Reading) -> Instant {
        let unfrozen = now + self.eighth * 4;
        match reading {
            Reading::Open => unfrozen.min(self.heard_at + self.eighth * 6),
            Reading::HeldBack => unfrozen,
        }
    }

    /// A keepalive asked for a reply.
    pub(super) fn reply_requested(&mut self) {
        self.owes_reply = true;
    }

    /// What to do at `now`, with `confirmed` as the position to report.
    pub(super) fn due(&self, now: Instant, confirmed: Lsn, reading: Reading) -> Due {
        let silent = now.saturating_duration_since(self.heard_at);
        let since_status = now.saturating_duration_since(self.sent_at);
        match reading {
            Reading::Open if silent >= self.eighth * 6 => return Due::LeaseLost,
            Reading::Open | Reading::HeldBack => {}
        }
        let probe = match reading {
            Reading::Open => self.eighth,
            Reading::HeldBack => WRITE_PROBE_INTERVAL.min(self.eighth),
        };
        let changed = confirmed > self.sent && since_status >= STATUS_INTERVAL;
        if self.owes_reply || changed || since_status >= probe {
            return Due::Status {
                ask: silent >= self.eighth,
            };
        }
        Due::Nothing
    }

    /// A status message with `confirmed` went out.
    pub(super) fn sent(&mut self, now: Instant, confirmed: Lsn) {
        self.sent_at = now;
        self.sent = confirmed;
        self.owes_reply = false;
    }

    /// The reader was held back until now: what was not heard since cannot be held against the
    /// server.
    pub(super) fn reading_again(&mut self, now: Instant) {
        self.heard_at = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(40);

    fn at(start: Instant, seconds: f64) -> Instant {
        start + Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_new_position_is_reported_within_250_ms_and_an_old_one_is_not_repeated() {
        let start = Instant::now();
        let mut feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        assert_eq!(
            feedback.due(at(start, 0.2), Lsn::new(9), Reading::Open),
            Due::Nothing
        );
        assert_eq!(
            feedback.due(at(start, 0.25), Lsn::new(9), Reading::Open),
            Due::Status { ask: false }
        );
        feedback.sent(at(start, 0.25), Lsn::new(9));
        assert_eq!(
            feedback.due(at(start, 1.0), Lsn::new(9), Reading::Open),
            Due::Nothing
        );
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
        feedback.heard(at(start, 29.0));
        assert_ne!(due(&feedback, 30.0), Due::LeaseLost);
    }

    #[test]
    fn the_slot_is_ours_for_half_the_timeout_after_we_last_ran_and_three_quarters_after_a_word() {
        let start = Instant::now();
        let feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        let until = |seconds, reading| feedback.held_until(at(start, seconds), reading) - start;
        assert_eq!(until(1.0, Reading::Open), Duration::from_secs(21));
        assert_eq!(until(29.0, Reading::Open), Duration::from_secs(30));
        assert_eq!(until(29.0, Reading::HeldBack), Duration::from_secs(49));
    }

    #[test]
    fn a_reader_that_is_held_back_keeps_the_walsender_alive_and_does_not_lose_its_lease() {
        let start = Instant::now();
        let feedback = Feedback::new(TIMEOUT, Lsn::new(5), start);
        assert_eq!(
            feedback.due(at(start, 100.0), Lsn::new(5), Reading::HeldBack),
            Due::Status { ask: true }
        );
    }
}
