//! Whether the stream is behind, so that there is time to let requests fill up, and to read in bulk.
//!
//! A request costs about the same for one message as for a hundred. While live, every event goes
//! at once; while the server sends transactions of long ago, lanes wait until they are worth a
//! request, more of it would not make requests larger (`budget`), or the stream has been caught up
//! with, which a pause tells. A keepalive makes it a short one: the server sends one before it waits for
//! more WAL, but also within a backlog (`WalSndWaitForWal` and `WalSndUpdateProgress` in its walsender.c),
//! so that it ends nothing by itself. While reading is held up the pause is longest. Both times compared
//! are the server's.

use std::time::{Duration, Instant};

use decoder::PgTimestamp;

use crate::lanes::Serve;

/// From this age on of what is being sent, the stream is behind; well above the age that live
/// transactions have, and small against what a reader that is behind has to make up.
const BEHIND: Duration = Duration::from_secs(1);

/// A stream that brings nothing for so long has been caught up with. It pauses for some milliseconds
/// whenever other processes take the server's cores, and what lanes hold then is hardly worth requests.
const PAUSE: Duration = Duration::from_millis(40);

/// The same behind a keepalive, which does not come because others have the cores.
const SHORT_PAUSE: Duration = Duration::from_millis(5);

/// So long lanes wait while nothing may be read: the answers and records in the way usually come sooner.
const LONG_PAUSE: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// While the stream is behind, since when nothing came, or nothing was or could be read.
    quiet_since: Option<Instant>,
    is_held_up: bool,
    /// Whether a keepalive came after the last chunk of a transaction.
    has_keepalive: bool,
}

impl Backlog {
    /// A chunk came that the server sent at `sent_at`, of a transaction of `committed`.
    pub(super) fn received(&mut self, sent_at: PgTimestamp, committed: PgTimestamp, now: Instant) {
        let behind = sent_at.micros_since(committed) > BEHIND.as_micros() as i64;
        self.quiet_since = behind.then_some(now);
        self.has_keepalive = false;
    }

    /// A keepalive came behind that.
    pub(super) fn keepalive(&mut self) {
        self.has_keepalive = true;
    }

    /// Whether anything may be read, from `now` on.
    pub(super) fn reads(&mut self, reads: bool, now: Instant) {
        if self.is_held_up == reads {
            self.is_held_up = !reads;
            self.quiet_since = self.quiet_since.map(|_| now);
        }
    }

    /// Whether the stream brings what was committed long ago.
    pub(super) fn is_behind(&self) -> bool {
        self.quiet_since.is_some()
    }

    /// Which lanes to serve.
    pub(super) fn serve(&self, fills_requests: bool) -> Serve {
        match self.is_behind() && fills_requests {
            true => Serve::Worthwhile,
            false => Serve::All,
        }
    }

    /// When the stream counts as caught up with, if nothing comes until then.
    pub(super) fn pause_ends(&self) -> Option<Instant> {
        let pause = match (self.is_held_up, self.has_keepalive) {
            (true, _) => LONG_PAUSE,
            (false, true) => SHORT_PAUSE,
            (false, false) => PAUSE,
        };
        self.quiet_since.map(|at| at + pause)
    }

    /// Nothing came until then.
    pub(super) fn paused(&mut self) {
        self.quiet_since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(n: i64) -> PgTimestamp {
        PgTimestamp::from_micros(n * 1_000_000)
    }

    #[test]
    fn only_old_transactions_make_lanes_wait_and_only_while_requests_fill_up_or_until_a_pause() {
        let (mut backlog, now) = (Backlog::default(), Instant::now());
        assert_eq!(backlog.serve(true), Serve::All);
        backlog.received(second(100), second(100), now);
        assert_eq!(backlog.serve(true), Serve::All);
        backlog.received(second(100), second(10), now);
        assert_eq!(backlog.serve(true), Serve::Worthwhile);
        assert_eq!(backlog.serve(false), Serve::All);
        assert_eq!(backlog.pause_ends(), Some(now + PAUSE));
        backlog.paused();
        assert_eq!(backlog.serve(true), Serve::All);
    }

    #[test]
    fn behind_a_keepalive_a_short_pause_will_do() {
        let (mut backlog, now) = (Backlog::default(), Instant::now());
        backlog.received(second(100), second(10), now);
        backlog.keepalive();
        assert!(backlog.is_behind(), "more may come at once");
        assert_eq!(backlog.pause_ends(), Some(now + SHORT_PAUSE));
        backlog.received(second(100), second(10), now);
        assert_eq!(backlog.pause_ends(), Some(now + PAUSE));
    }

    #[test]
    fn a_stream_that_is_held_up_pauses_when_that_lasts_long() {
        let (mut backlog, start) = (Backlog::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        backlog.reads(true, at(0));
        backlog.received(second(100), second(10), at(0));
        backlog.reads(false, at(3));
        backlog.reads(false, at(100));
        assert_eq!(backlog.pause_ends(), Some(at(3) + LONG_PAUSE));
        backlog.reads(true, at(101));
        assert_eq!(backlog.pause_ends(), Some(at(101) + PAUSE));
        backlog.paused();
        backlog.reads(false, at(200));
        assert_eq!(backlog.pause_ends(), None, "it was not behind any more");
    }
}
