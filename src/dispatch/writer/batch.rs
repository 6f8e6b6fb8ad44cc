//! One batch of outcomes: what is in it, and when it is due.

use std::time::Duration;

use tokio::time::Instant;

use super::super::outcome::Record;
use crate::lanes::Standing;
use crate::watermark::CommitLsn;

/// Rows per transaction: enough that a commit's cost is spread thin, small enough to be quick.
pub(super) const MAX_ROWS: usize = 8_000;
/// Bytes of texts per transaction, if the rows have long ones: it is in memory once more to be sent.
const MAX_TEXT_BYTES: usize = 4 << 20;
/// A batch of so many rows does not wait for more: a commit is cheap beside them.
const ENOUGH_ROWS: usize = 2_000;
/// From a small batch to the next one that is small too. A crash repeats what was published in this
/// time, and nothing of it is confirmed sooner.
const MIN_INTERVAL: Duration = Duration::from_millis(50);

/// What was durably recorded with one batch.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// How many events of which transactions have their first outcome by it.
    pub(crate) commits: Vec<(CommitLsn, u64)>,
    /// Events in it.
    pub(crate) events: usize,
    /// [`Record::text_bytes`] of all of it.
    pub(crate) text_bytes: usize,
    /// [`Record`]s in it. They are written in the order in which they were handed over.
    pub(crate) records: u64,
}

impl Written {
    /// One more event of `commit` has its first outcome; neighbours are put together.
    pub(crate) fn count(&mut self, commit: CommitLsn) {
        match self.commits.last_mut() {
            Some((last, count)) if *last == commit => *count += 1,
            Some(_) | None => self.commits.push((commit, 1)),
        }
    }
}

/// One batch of outcomes.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) records: Vec<Record>,
    pub(super) holds_released: bool,
    pub(super) recorded: Written,
}

impl Batch {
    pub(super) fn add(&mut self, record: Record) {
        self.recorded.records += 1;
        self.recorded.events += record.events.len();
        self.recorded.text_bytes += record.text_bytes();
        for event in &record.events {
            match event.standing {
                // One that gets no row waits here for those before it.
                Standing::New | Standing::Repeated => self.recorded.count(event.commit),
                Standing::Released => self.holds_released = true,
            }
        }
        self.records.push(record);
    }

    pub(super) fn is_full(&self) -> bool {
        self.recorded.events >= MAX_ROWS || self.recorded.text_bytes >= MAX_TEXT_BYTES
    }
}

/// When a batch goes that is not full yet. A state machine without IO; the clock is passed in.
#[derive(Debug)]
pub(super) struct Pacing {
    /// No small one goes before.
    pub(super) earliest: Instant,
}

impl Pacing {
    pub(super) fn new(now: Instant) -> Self {
        Self { earliest: now }
    }

    /// Whether a batch of so many events goes at `now`.
    pub(super) fn is_due(&self, events: usize, now: Instant) -> bool {
        events >= ENOUGH_ROWS || (events > 0 && now >= self.earliest)
    }

    /// One that was not full was written, of so many events.
    pub(super) fn written(&mut self, events: usize, now: Instant) {
        if events < ENOUGH_ROWS {
            self.earliest = now + MIN_INTERVAL;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_batch_keeps_a_distance_from_the_small_one_before_it_alone() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut pacing = Pacing::new(start);
        assert!(!pacing.is_due(0, at(0)), "nothing to write");
        assert!(pacing.is_due(1, at(0)), "the first does not wait");
        pacing.written(1, at(1));
        assert!(!pacing.is_due(ENOUGH_ROWS - 1, at(50)));
        assert!(pacing.is_due(ENOUGH_ROWS, at(20)));
        pacing.written(ENOUGH_ROWS, at(30));
        assert!(!pacing.is_due(1, at(50)), "the small one counts still");
        assert!(pacing.is_due(1, at(51)), "the large one does not");
        pacing.written(1, at(60));
        pacing.written(ENOUGH_ROWS, at(115));
        assert!(
            pacing.is_due(1, at(115)),
            "what the large one has left over"
        );
    }
}
