//! Defines a batch of outcomes, and the rule that decides when a batch is written.

use std::time::Duration;

use replication::CommitLsn;
use tokio::time::Instant;

use super::super::outcome::Record;
use crate::event::{EventPosition, Standing};

/// A batch with this many rows is full. They are enough to spread the cost of a commit, and few enough to be
/// written quickly.
pub(super) const MAX_ROWS: usize = 8_000;
/// A batch with this many bytes of text is full. This limits memory when rows have long texts, because
/// sending a batch needs a second copy of its texts.
const MAX_TEXT_BYTES: usize = 4 << 20;
/// A batch with this many rows is written immediately, because its commit is cheap compared to writing the
/// rows.
const ENOUGH_ROWS: usize = 2_000;
/// Minimum time between two small batches. Events that are published during this time are confirmed only
/// after the next batch, so if the relay crashes before that, it publishes them again.
const MIN_INTERVAL: Duration = Duration::from_millis(50);

/// Events that are resolved.
#[derive(Debug, Default)]
pub(crate) struct ResolvedEvents {
    /// For each transaction of the stream, how many of its events are resolved.
    pub(crate) commits: Vec<(CommitLsn, u64)>,
    /// The events that were read from a table.
    pub(crate) from_tables: Vec<EventPosition>,
}

impl ResolvedEvents {
    /// Adds an event. Consecutive events of one transaction share an entry.
    pub(crate) fn add(&mut self, event: EventPosition) {
        if event.is_of_a_table() {
            self.from_tables.push(event);
            return;
        }
        match self.commits.last_mut() {
            Some((last, count)) if *last == event.commit => *count += 1,
            Some(_) | None => self.commits.push((event.commit, 1)),
        }
    }

    pub(crate) fn extend(&mut self, more: Self) {
        self.commits.extend(more.commits);
        self.from_tables.extend(more.from_tables);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.commits.is_empty() && self.from_tables.is_empty()
    }
}

/// The content of a batch that is now durable.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// The events that this batch resolves. Released events do not count, because they were resolved
    /// before.
    pub(crate) resolved: ResolvedEvents,
    pub(crate) events: usize,
    /// Sum of [`Record::text_bytes`] over the batch.
    pub(crate) text_bytes: usize,
    /// Number of [`Record`]s in the batch. The writer writes records in the order in which they were
    /// queued.
    pub(crate) records: u64,
}

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
                // An event that needs no row is queued too, so it does not count as resolved before earlier
                // events do.
                Standing::New | Standing::NeedsNoRow => self.recorded.resolved.add(event.position),
                Standing::Released => self.holds_released = true,
            }
        }
        self.records.push(record);
    }

    pub(super) fn is_full(&self) -> bool {
        self.recorded.events >= MAX_ROWS || self.recorded.text_bytes >= MAX_TEXT_BYTES
    }
}

/// Decides when to write a batch that is not full. This is a state machine without IO: the caller passes in the
/// time.
#[derive(Debug)]
pub(super) struct Pacing {
    /// The earliest time for the next small batch. Only the last batch of the session may be written earlier.
    pub(super) earliest: Instant,
}

impl Pacing {
    pub(super) fn new(now: Instant) -> Self {
        Self { earliest: now }
    }

    /// Whether a batch of `events` events is written at `now`.
    pub(super) fn is_due(&self, events: usize, now: Instant) -> bool {
        events >= ENOUGH_ROWS || (events > 0 && now >= self.earliest)
    }

    /// Notes that a batch of `events` events has been written before it was full.
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
    fn a_small_batch_is_delayed_only_by_a_small_one_before_it() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut pacing = Pacing::new(start);
        assert!(!pacing.is_due(0, at(0)), "nothing to write");
        assert!(pacing.is_due(1, at(0)), "the first batch does not wait");
        pacing.written(1, at(1));
        assert!(!pacing.is_due(ENOUGH_ROWS - 1, at(50)));
        assert!(pacing.is_due(ENOUGH_ROWS, at(20)));
        pacing.written(ENOUGH_ROWS, at(30));
        assert!(
            !pacing.is_due(1, at(50)),
            "the small batch was written less than 50 ms ago"
        );
        assert!(pacing.is_due(1, at(51)), "a large batch delays nothing");
        pacing.written(1, at(60));
        pacing.written(ENOUGH_ROWS, at(115));
        assert!(
            pacing.is_due(1, at(115)),
            "the small batch after a large batch does not wait"
        );
    }
}
