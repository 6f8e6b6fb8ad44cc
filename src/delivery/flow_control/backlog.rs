//! Decides whether the stream is behind. If the stream is behind, lanes may linger until requests fill up,
//! and the session may read in bulk. Lanes may also linger while rows arrive from a table.
//!
//! A request costs about the same for one message as for a hundred. While the stream is live, every event
//! is sent at once. While the server sends old transactions, a lane lingers until it has enough events
//! for an efficient request. Lanes stop lingering when more events would not make requests larger
//! (`flow_control`), or when a pause shows that the stream has caught up.
//!
//! The length of the pause depends on the situation:
//!
//! - After a keepalive, a short pause is enough, because the server sends a keepalive before it waits for more WAL.
//!   The pause is still needed, because the server also sends keepalives within a backlog (`WalSndWaitForWal` and
//!   `WalSndUpdateProgress` in its walsender.c).
//! - While reading is stopped, or while a task reads a table, silence is normal, so the pause must be much longer.
//!
//! Whether the stream is behind follows from the age of the last transaction, which is the difference of two times of
//! the server's clock. So the relay's clock does not matter.

use std::time::{Duration, Instant};

use decoder::PgTimestamp;

use crate::lanes::Serve;

/// The stream counts as behind when the server sends a transaction more than this time after its commit. In a live
/// stream, the delay is much shorter. In a real backlog, the delay is much longer.
const BEHIND: Duration = Duration::from_secs(1);

/// How long the stream must be silent before it counts as caught up. Shorter pauses also occur within a
/// backlog, whenever other processes use the server's cores. If lanes stopped lingering at such a pause,
/// they would send small requests.
const PAUSE: Duration = Duration::from_millis(40);

/// How long the stream must be silent after a keepalive before it counts as caught up. The server sends a keepalive
/// before it waits for more WAL, but not when it is silent for lack of CPU time. So after a keepalive, a short pause
/// is enough.
const SHORT_PAUSE: Duration = Duration::from_millis(5);

/// How long lanes keep lingering without new rows while reading is stopped, or while a task reads a table. Usually new
/// rows arrive sooner. While reading is stopped, answers and recorded outcomes free memory, so that reading resumes. A
/// task that reads a table soon sends its next rows.
const LONG_PAUSE: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub(crate) struct Backlog {
    /// When the current silence of the stream began. This is when the last chunk arrived, or when reading
    /// last stopped or resumed, whichever is later. `None` when the stream is not behind.
    quiet_since: Option<Instant>,
    is_held_up: bool,
    /// Whether the last rows came from a table, and more rows follow.
    reads_a_table: bool,
    /// Whether a keepalive has arrived after the last chunk of a transaction.
    has_keepalive: bool,
}

impl Backlog {
    /// Notes that a chunk arrived. The server sent the chunk at `sent_at`, and committed the chunk's
    /// transaction at `committed`.
    pub(crate) fn received(&mut self, sent_at: PgTimestamp, committed: PgTimestamp, now: Instant) {
        let behind = sent_at.micros_since(committed) > BEHIND.as_micros() as i64;
        self.quiet_since = behind.then_some(now);
        self.has_keepalive = false;
        self.reads_a_table = false;
    }

    /// Notes that rows of a table arrived. If more rows follow (`has_more`), lanes linger as they do when the
    /// stream has a backlog.
    pub(crate) fn received_from_table(&mut self, has_more: bool, now: Instant) {
        self.quiet_since = has_more.then_some(now);
        self.has_keepalive = false;
        self.reads_a_table = has_more;
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

    /// Whether there is a backlog: the stream contains old transactions, or more rows follow from a table.
    pub(crate) fn is_behind(&self) -> bool {
        self.quiet_since.is_some()
    }

    /// Which lanes may send now.
    pub(crate) fn serve(&self, may_linger: bool) -> Serve {
        if self.is_behind() && may_linger {
            Serve::Worthwhile
        } else {
            Serve::All
        }
    }

    /// The time at which the stream counts as caught up, if nothing arrives before. `None` when the
    /// stream is not behind.
    pub(crate) fn pause_ends(&self) -> Option<Instant> {
        let pause = match (self.is_held_up || self.reads_a_table, self.has_keepalive) {
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
    fn lanes_wait_while_a_table_is_read_and_not_after_its_last_rows() {
        let (mut backlog, now) = (Backlog::default(), Instant::now());
        backlog.received_from_table(true, now);
        assert_eq!(backlog.serve(true), Serve::Worthwhile);
        assert_eq!(backlog.pause_ends(), Some(now + LONG_PAUSE));
        backlog.received_from_table(false, now);
        assert_eq!(backlog.serve(true), Serve::All);
        backlog.received_from_table(true, now);
        backlog.received(second(100), second(100), now);
        assert_eq!(backlog.serve(true), Serve::All, "the stream is live");
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
