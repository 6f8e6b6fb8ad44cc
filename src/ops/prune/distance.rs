//! Estimates how far a pruning run has got in a table, for the progress bar. The estimate is the share of the table's
//! old rows that the run has read.

use std::ops::Range;

use super::{PruneContext, Pruning};
use crate::capture::claim::Captured;
use crate::capture::table::TableReader;

/// The values of `seq` from the first row of a table to the first row that is younger than the retention.
pub(super) struct PruneDistance(Range<i64>);

impl PruneDistance {
    /// Looks up both ends of the range. Returns `None` for a relay, which shows no progress bar, for a table that
    /// is not read along `seq`, and for a table whose rows have no times. Also returns `None` after an error, so
    /// that the run does not fail because of its progress bar.
    pub(super) async fn find(
        context: &PruneContext<'_>,
        captured: &Captured,
        reader: &TableReader,
    ) -> Option<Self> {
        if context.request.who == Pruning::Relay {
            return None;
        }
        let seqs = context.cutoff.seqs_before(context.sql, captured, reader);
        seqs.await.ok().flatten().map(Self)
    }

    /// The share that has been read, from 0 to 1. `last` is the `seq` of the last row that was read, or `None` at the
    /// end of the rows with a `seq`.
    pub(super) fn share(&self, last: Option<i64>) -> f64 {
        let Range { start, end } = self.0;
        let distance = |to: i64| i128::from(to) - i128::from(start);
        last.map_or(1.0, |last| {
            #[expect(clippy::cast_precision_loss, reason = "a bar shows about 20 steps")]
            let share = (distance(last) + 1) as f64 / distance(end).max(1) as f64;
            share.clamp(0.0, 1.0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_of_prune_is_measured_from_the_first_row_to_the_young_rows() {
        let distance = PruneDistance(101..1_101);
        let shares = [
            (Some(200), 0.1),
            (Some(600), 0.5),
            (Some(1_100), 1.0),
            (Some(2_000), 1.0),
            (None, 1.0),
        ];
        for (last, share) in shares {
            assert_eq!(distance.share(last), share, "{last:?}");
        }
        assert_eq!(PruneDistance(-10..10).share(Some(-1)), 0.5);
        assert_eq!(PruneDistance(i64::MIN..i64::MAX).share(Some(0)), 0.5);
        assert_eq!(PruneDistance(5..5).share(Some(7)), 1.0);
    }
}
