//! Counts the rows that a recovery publishes from the tables.

use std::time::{Duration, Instant};

const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Counts the rows from the tables, and logs the number from time to time.
pub(super) struct RowCounter {
    pub(super) began: Instant,
    logged: Instant,
    pub(super) rows: u64,
}

impl RowCounter {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            began: now,
            logged: now,
            rows: 0,
        }
    }

    pub(super) fn row(&mut self) {
        self.rows += 1;
        // Check the clock only every 256 rows, because a check for each row would cost more than the row
        // itself.
        if self.rows.is_multiple_of(256) && self.logged.elapsed() >= LOG_INTERVAL {
            self.logged = Instant::now();
            let rows = self.rows;
            tracing::info!(rows, "recovering: publishing rows from the tables");
        }
    }
}
