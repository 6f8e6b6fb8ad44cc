//! What a schedule's outbox table holds before the relay comes, and who else reads the server's WAL.

use super::super::random::Random;

/// The outbox table when the relay starts for the first time.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::torture) struct TablePlan {
    /// Rows that were committed before the table was captured. The relay must publish none of them.
    pub(in crate::torture) history: u64,
    /// The relay makes the slot and the capture record at its first start; else `postrider init` does.
    pub(in crate::torture) captured_by_relay: bool,
    /// A second logical slot in the database, which nobody reads: it holds `catalog_xmin` back.
    pub(in crate::torture) lagging_slot: bool,
}

impl TablePlan {
    /// `is_served_first` where the writers start after the relay has served its slot.
    pub(super) fn draw(is_served_first: bool, random: &mut Random) -> Self {
        let has_history = random.per_mille(400);
        let rows = random.pick(&[1, 200, 2_000, 12_000]);
        Self {
            history: if has_history { rows } else { 0 },
            // Writers that start together with the relay write rows from before, too.
            captured_by_relay: random.per_mille(400) && is_served_first,
            lagging_slot: random.per_mille(200),
        }
    }
}
