//! Decides whether the stream is behind. If it is, lanes may linger until requests fill up, and the
//! session may read in bulk.
//!
//! A request costs about the same for one message as for a hundred. While the stream is live, every
//! event is sent at once. While the server sends old transactions, a lane lingers until it has
//! enough for a request. Lanes stop lingering when more events would not make requests larger
//! (`flow_control`), or when a pause shows that the stream has caught up.
//!
//! After a keepalive a short pause is enough: the server sends a keepalive before it waits for more
//! WAL. But the server also sends keepalives within a backlog (`WalSndWaitForWal` and
//! `WalSndUpdateProgress` in its walsender.c), so a keepalive alone does not prove that the stream
//! has caught up. While reading is stopped, the pause is longest. The age of a transaction is the
//! difference of two server times, so our own clock does not matter.

use std::time::{Duration, Instant};

use decoder::PgTimestamp;

use crate::lanes::Serve;

/// The stream is behind when it sends transactions older than this. Live transactions are much
/// younger, and a real backlog is much longer.
const BEHIND: Duration = Duration::from_secs(1);

/// A stream that sends nothing for this long has caught up. Shorter pauses also occur within a
/// backlog, whenever other processes take the server's cores. If lanes stopped lingering at such a
/// pause, they would send small requests.
const PAUSE: Duration = Duration::from_millis(40);

/// A stream that sends nothing for this long after a keepalive has caught up. A short pause is
/// enough, because a server that only lacks cores sends no keepalive.
const SHORT_PAUSE: Duration = Duration::from_millis(5);

/// How long lanes linger while reading is stopped. Reading usually resumes sooner, when Pub/Sub
/// answers or the writer records outcomes, which frees memory.
const LONG_PAUSE: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub(crate) struct Backlog {
    /// The start of the current pause, while the stream is behind: the time of the last chunk, or of
    /// the last stop or resume of reading if that is later. `None` when the stream is not behind.
    quiet_since: Option<Instant>,
    is_held_up: bool,
    /// Whether a keepalive has arrived after the last chunk of a transaction.
    has_keepalive: bool,
}

impl Backlog {
    /// Notes that a chunk arrived. The server sent the chunk at `sent_at`, and committed its transaction
    /// at `committed`.
    pub(crate) fn received(&mut self, sent_at: PgTimestamp, committed: PgTimestamp, now: Instant) {
        let behind = sent_at.micros_since(committed) > BEHIND.as_micros() as i64;
        self.quiet_since = behind.then_some(now);
        self.has_keepalive = false;
    }

    /// Notes that a keepalive arrived after the last chunk.
    pub(crate) fn keepalive(&mut self) {
        self.has_keepalive = true;
    }

    /// Notes that from `now` on, reading is allowed (`reads`) or stopped.
    pub(crate) fn reads(&mut self, reads: bool, now: Instant) {
        if self.is_held_up == reads {
            self.is_held_up = !reads;
            self.quiet_since = self.quiet_since.map(|_| now);
        }
    }

    /// Whether the stream is behind, that is, brings old transactions.
    pub(crate) fn is_behind(&self) -> bool {
        self.quiet_since.is_some()
    }

    /// Which lanes to serve.
    pub(crate) fn serve(&self, may_linger: bool) -> Serve {
        if self.is_behind() && may_linger {
            Serve::Worthwhile
        } else {
            Serve::All
        }
    }

    /// Returns the time at which the stream counts as caught up if nothing arrives before. `None`
    /// when the stream is not behind.
    pub(crate) fn pause_ends(&self) -> Option<Instant> {
        let pause = match (self.is_held_up, self.has_keepalive) {
            (true, _) => LONG_PAUSE,
            (false, true) => SHORT_PAUSE,
            (false, false) => PAUSE,
        };
        self.quiet_since.map(|at| at + pause)
    }

    /// Notes that nothing arrived until [`pause_ends`](Self::pause_ends): the stream has caught up.
    pub(crate) fn paused(&mut self) {
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
    fn lanes_wait_only_while_the_stream_is_behind_and_requests_fill_up() {
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
    fn after_a_keepalive_a_short_pause_is_enough() {
        let (mut backlog, now) = (Backlog::default(), Instant::now());
        backlog.received(second(100), second(10), now);
        backlog.keepalive();
        assert!(
            backlog.is_behind(),
            "a keepalive alone does not end a backlog"
        );
        assert_eq!(backlog.pause_ends(), Some(now + SHORT_PAUSE));
        backlog.received(second(100), second(10), now);
        assert_eq!(backlog.pause_ends(), Some(now + PAUSE));
    }

    #[test]
    fn while_reading_is_stopped_the_pause_is_longest() {
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
        assert_eq!(backlog.pause_ends(), None, "the stream is no longer behind");
    }
}
