//! Estimates the number of waiting events in a table that has too many rows to read them all. Reads only the
//! first and the last rows, so the results are lower bounds.
//!
//! A relay delivers rows roughly in the order in which they were written. So if the relay is down or late, it
//! has delivered the older rows, and the newer rows wait. If all of the last rows wait, a binary search finds
//! the border between delivered and waiting rows, and with it the age of the oldest waiting event. If
//! delivered and waiting rows are mixed, the search still finds a waiting event. The age of that event is
//! then only a lower bound.

use super::{BLOCK_BYTES, CountedRows, LARGEST_BYTES, MOST_ROWS, PendingEvents};
use crate::error::Result;

/// Number of rows that are read at each end of the range of `seq`.
const END_ROWS: u32 = MOST_ROWS / 2;

/// Number of rows that one step of the binary search reads.
const STEP_ROWS: u32 = 1_000;

/// Maximum number of steps of the binary search. Each step halves the range of `seq` that is left, so after
/// this many steps the range of all 64-bit numbers has shrunk to one.
const MOST_STEPS: u32 = 64;

/// Counts the waiting events whose `seq` is higher than `from`. `seq` is an SQL expression that has an index.
pub(super) async fn by_seq(rows: &CountedRows<'_>, seq: &str, from: i64) -> Result<PendingEvents> {
    let all = format!("{seq} > {from}");
    let first_end = rows.nth(seq, &all, "asc", END_ROWS).await?;
    let last_begin = rows.nth(seq, &all, "desc", END_ROWS).await?;
    let (Some(first_end), Some(last_begin)) = (first_end, last_begin) else {
        return rows.count(&all).await;
    };
    if last_begin <= first_end {
        return rows.count(&all).await;
    }
    let first = format!("{all} and {seq} <= {first_end}");
    let mut found = rows.count(&first).await?;
    let last = rows.count(&format!("{seq} >= {last_begin}")).await?;
    if last.events >= u64::from(END_ROWS) {
        let (mut below, mut above) = (first_end, last_begin);
        for _ in 0..MOST_STEPS {
            let middle = below.midpoint(above);
            if middle <= below {
                break;
            }
            let from = format!("{seq} >= {middle} and {seq} < {above}");
            let end = rows.nth(seq, &from, "asc", STEP_ROWS).await?;
            let some = match end {
                Some(end) => rows.count(&format!("{from} and {seq} <= {end}")).await?,
                None => rows.count(&from).await?,
            };
            if some.events > 0 {
                found.oldest = found.oldest.zip(some.oldest).map(|(a, b)| a.max(b));
                above = middle;
            } else if end.is_none() && rows.nth(seq, &from, "asc", 1).await?.is_none() {
                // There are no rows from `middle` to `above`. So the border between delivered and waiting rows is below
                // `middle`.
                above = middle;
            } else {
                below = middle;
            }
        }
    }
    found = found.and(last);
    found.is_lower_bound = true;
    Ok(found)
}

/// Counts the waiting events in the first and the last blocks of a table with `blocks` blocks.
pub(super) async fn by_block(rows: &CountedRows<'_>, blocks: u32) -> Result<PendingEvents> {
    let part = u32::try_from(LARGEST_BYTES / BLOCK_BYTES / 2).unwrap_or(u32::MAX);
    let last = blocks.saturating_sub(part);
    let first = rows.count(&format!("e.ctid < '({part},0)'::tid")).await?;
    let last = rows.count(&format!("e.ctid >= '({last},0)'::tid")).await?;
    let mut found = first.and(last);
    found.is_lower_bound = true;
    Ok(found)
}

impl CountedRows<'_> {
    /// Sorts the rows that meet the SQL condition `bound` by `seq` (`order` is `asc` or `desc`), and returns the
    /// `seq` of the `n`th row, counted from one. `None` if there are fewer rows.
    async fn nth(&self, seq: &str, bound: &str, order: &str, n: u32) -> Result<Option<i64>> {
        let statement = format!(
            "select {seq}::bigint from {} and {bound} order by {seq} {order} offset {} limit 1",
            self.reader.rows_sql(),
            n.saturating_sub(1)
        );
        let row = self.sql.query_opt(&statement, &[]).await?;
        Ok(row.map(|row| row.get(0)))
    }
}
