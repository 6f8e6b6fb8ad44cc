//! Whether the stream is behind, so that there is time to let requests fill up.
//!
//! A request costs about the same for one message as for a hundred. While live, every event goes
//! at once; while the server sends transactions of long ago, lanes wait until they are worth a
//! request, more of it would not make requests larger (`budget`), or the stream pauses. Both times
//! compared are the server's.

use std::time::{Duration, Instant};

use decoder::PgTimestamp;

use crate::lanes::Serve;

/// From this age on of what is being sent, the stream is behind; well above the age that live
/// transactions have, and small against what a reader that is behind has to make up.
const BEHIND: Duration = Duration::from_secs(1);

/// A stream that brings nothing for so long has been caught up with.
const PAUSE: Duration = Duration::from_millis(5);

#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// When the last chunk came, while the stream is behind.
    behind_since_chunk: Option<Instant>,
}

impl Backlog {
    /// A chunk came that the server sent at `sent_at`, of a transaction of `committed`.
    pub(super) fn received(&mut self, sent_at: PgTimestamp, committed: PgTimestamp, now: Instant) {
        let behind = sent_at.micros_since(committed) > BEHIND.as_micros() as i64;
        self.behind_since_chunk = behind.then_some(now);
    }

    /// Which lanes to serve.
    pub(super) fn serve(&self, fills_requests: bool) -> Serve {
        match self.behind_since_chunk {
            Some(_) if fills_requests => Serve::Worthwhile,
            Some(_) | None => Serve::All,
        }
    }

    /// When the stream counts as caught up with, if nothing comes until then.
    pub(super) fn pause_ends(&self) -> Option<Instant> {
        self.behind_since_chunk.map(|at| at + PAUSE)
    }

    /// Nothing came until then.
    pub(super) fn paused(&mut self) {
        self.behind_since_chunk = None;
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
}
