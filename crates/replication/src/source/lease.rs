//! Computes how long the slot is provably ours.
//!
//! A walsender releases the slot when it has received nothing from us for `wal_sender_timeout` (below: `timeout`). So
//! we hold the slot only by a lease. The lease lasts three quarters of the timeout. When it ends, we stop sending to
//! Pub/Sub (self-fencing). A publish attempt is shorter than the remaining quarter, so every attempt has ended before
//! another session can get the slot.
//!
//! The lease starts at the time when we *sent* the last status message that the server has provably received. The
//! arrival time of the server's answer proves nothing, because proxies and full buffers deliver late. Three things
//! show this send time:
//!
//! - **A frame of the stream.** We send a status message every `timeout / 8` or more often. So the last message that
//!   the server received before it sent a frame was about `timeout / 8` old, or less. The lease starts `timeout / 8`
//!   before the send time of the frame.
//! - **A keepalive that asks for a reply.** A walsender asks when it has received nothing from us for `timeout / 2`.
//!   So the lease starts `timeout / 2` before the send time of this keepalive, even if the lease becomes shorter.
//!   Further frames extend the lease only after a keepalive that does not ask for a reply.
//! - **The column `pg_stat_replication.reply_time`.** It contains the send time of the last message that the server
//!   received. It is the only proof while we read nothing from the stream, or read only old data.
//!
//! A frame contains its send time by the server's clock. To convert this time to our clock, we use the frame with the
//! shortest delay so far as the reference. We cannot detect a delay that all frames have in common.
//!
//! The lease must be longer than `timeout / 2`. A walsender that decodes a large transaction without sending it reads
//! our messages only once per `timeout / 2`. So a shorter lease would expire on a healthy connection.

use std::time::{Duration, Instant};

use decoder::PgTimestamp;

/// The assumed drift between the two clocks: 1 s in this number of seconds.
const DRIFT: u32 = 5_000;

/// The send times in a chunk of frames, from which the [`Lease`] computes when the server last heard us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct FrameEvidence {
    /// Send time of the last frame in the chunk, by the server's clock.
    pub(super) last_sent_at: Option<PgTimestamp>,
    /// The last keepalive in the chunk: its send time, and whether it asks for a reply.
    pub(super) keepalive: Option<(PgTimestamp, bool)>,
}

/// The lease of one session.
#[derive(Debug)]
pub(super) struct Lease {
    wal_sender_timeout: Duration,
    /// The lease runs from this time, because the server has received everything that we sent before it.
    runs_from: Instant,
    /// The arrival time and the send time of the frame with the shortest delay.
    reference: Option<(Instant, PgTimestamp)>,
    /// Whether the last keepalive asked for a reply. If so, we assume that the server has not heard us for
    /// half of `wal_sender_timeout`.
    unheard: bool,
}

impl Lease {
    pub(super) fn new(wal_sender_timeout: Duration, now: Instant) -> Self {
        Self {
            wal_sender_timeout,
            runs_from: now,
            reference: None,
            unheard: false,
        }
    }

    /// The time at which we have to stop sending to Pub/Sub.
    pub(super) fn ends_at(&self) -> Instant {
        self.runs_from + self.wal_sender_timeout / 8 * 6
    }

    /// Whether the last keepalive asked for a reply. A walsender asks when it has received nothing from us for half
    /// of `wal_sender_timeout`.
    pub(super) fn is_unheard(&self) -> bool {
        self.unheard
    }

    /// Records that the server received a status message which we sent at `sent_at`.
    pub(super) fn proven(&mut self, sent_at: Instant) {
        self.runs_from = self.runs_from.max(sent_at);
    }

    /// Records that frames arrived at `now`.
    pub(super) fn heard(&mut self, evidence: FrameEvidence, now: Instant) {
        if let Some((sent_at, asks)) = evidence.keepalive {
            self.unheard = asks;
            let half_before = self
                .on_our_clock(sent_at, now)
                .checked_sub(self.wal_sender_timeout / 2);
            if let Some(heard_last) = half_before.filter(|_| asks) {
                self.runs_from = self.runs_from.min(heard_last);
            }
        }
        if let Some(sent_at) = evidence.last_sent_at {
            let said_at = self.on_our_clock(sent_at, now);
            // We send a status message every `timeout / 8` or more often. So when the server sent this frame, the
            // last message that it had received was at most `timeout / 8` old.
            let heard = said_at.checked_sub(self.wal_sender_timeout / 8);
            if let Some(heard) = heard.filter(|_| !self.unheard) {
                self.runs_from = self.runs_from.max(heard);
            }
        }
    }

    /// Converts the send time of a frame to our clock. The result is the arrival time of the reference frame, plus the
    /// difference between the send times of the two frames. The result is too late by the delay of the reference frame,
    /// which we do not know. But it is never later than `now`.
    fn on_our_clock(&mut self, sent_at: PgTimestamp, now: Instant) -> Instant {
        let Some((came, reference)) = self.reference else {
            self.reference = Some((now, sent_at));
            return now;
        };
        let micros = sent_at.as_micros().saturating_sub(reference.as_micros());
        let apart = Duration::from_micros(micros.unsigned_abs());
        let then = if micros >= 0 {
            came.checked_add(apart)
        } else {
            came.checked_sub(apart)
        };
        let drift = now.saturating_duration_since(came) / DRIFT;
        match then {
            Some(then) if then + drift < now => then,
            Some(_) | None => {
                self.reference = Some((now, sent_at));
                now
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(40);

    /// A lease, and a server whose clock is an hour ahead of ours.
    struct World {
        start: Instant,
        lease: Lease,
    }

    impl World {
        fn new() -> Self {
            let start = Instant::now() + Duration::from_secs(1_000);
            let lease = Lease::new(TIMEOUT, start);
            let mut world = Self { start, lease };
            world.data(0.0, 0.0);
            world
        }

        fn at(&self, seconds: f64) -> Instant {
            self.start + Duration::from_secs_f64(seconds)
        }

        fn stamp(seconds: f64) -> PgTimestamp {
            PgTimestamp::from_micros(((3_600.0 + seconds) * 1e6) as i64)
        }

        /// Simulates the arrival of a data frame. `sent` and `came` are its send and arrival times,
        /// in seconds.
        fn data(&mut self, sent: f64, came: f64) {
            let evidence = FrameEvidence {
                last_sent_at: Some(Self::stamp(sent)),
                keepalive: None,
            };
            self.lease.heard(evidence, self.at(came));
        }

        fn keepalive(&mut self, sent: f64, came: f64, asks: bool) {
            let evidence = FrameEvidence {
                last_sent_at: Some(Self::stamp(sent)),
                keepalive: Some((Self::stamp(sent), asks)),
            };
            self.lease.heard(evidence, self.at(came));
        }

        /// When the lease ends, in seconds after the start.
        fn ends(&self) -> f64 {
            (self.lease.ends_at() - self.start).as_secs_f64()
        }
    }

    #[track_caller]
    fn near(left: f64, right: f64) {
        assert!((left - right).abs() < 0.05, "{left} is not {right}");
    }

    #[test]
    fn a_frame_extends_the_lease_to_three_quarters_of_the_timeout_less_one_reporting_interval() {
        let mut world = World::new();
        near(world.ends(), 30.0);
        world.data(20.0, 20.0);
        near(world.ends(), 20.0 - 5.0 + 30.0);
    }

    #[test]
    fn old_frames_that_arrive_late_do_not_extend_the_lease() {
        let mut world = World::new();
        world.keepalive(20.0, 20.0, false);
        let before = world.ends();
        for late in 21..90 {
            world.keepalive(20.0 + f64::from(late) / 10_000.0, f64::from(late), false);
        }
        near(world.ends(), before);
    }

    #[test]
    fn no_frame_of_a_server_that_does_not_hear_us_extends_the_lease() {
        let mut world = World::new();
        world.data(20.0, 20.0);
        world.keepalive(30.0, 30.0, true);
        near(world.ends(), 30.0 - 20.0 + 30.0);
        for second in 31..60 {
            world.data(f64::from(second), f64::from(second));
        }
        near(world.ends(), 40.0);
        assert!(world.lease.is_unheard());
        world.keepalive(60.0, 60.0, false);
        near(world.ends(), 60.0 - 5.0 + 30.0);
        assert!(!world.lease.is_unheard());
    }

    #[test]
    fn a_proven_status_message_counts_from_the_time_it_was_sent() {
        let mut world = World::new();
        let sent_at = world.at(17.0);
        world.lease.proven(sent_at);
        near(world.ends(), 47.0);
        let older = world.at(3.0);
        world.lease.proven(older);
        near(world.ends(), 47.0);
    }

    #[test]
    fn clock_drift_or_a_step_of_the_servers_clock_does_not_end_an_active_session() {
        let mut world = World::new();
        for second in 1..100_000 {
            let came = f64::from(second);
            // The server's clock loses 100 microseconds each second.
            world.data(came * 0.999_9, came);
            assert!(world.ends() > came + 20.0, "{second}");
        }
        // The server's clock steps ahead by a minute.
        world.data(100_060.0, 100_000.0);
        near(world.ends(), 100_025.0);
        world.data(100_061.0, 100_001.0);
        near(world.ends(), 100_026.0);
    }
}
