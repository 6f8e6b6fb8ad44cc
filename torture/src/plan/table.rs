//! The contents of a schedule's outbox table before the relay starts, and other readers of the
//! server's WAL.

use crate::random::Random;

/// The outbox table when the relay starts for the first time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TablePlan {
    /// Rows that were committed before the table was captured. The relay must publish none of them.
    pub(crate) history: u64,
    /// The relay creates the slot and the capture record at its first start; otherwise `postrider
    /// init` does.
    pub(crate) captured_by_relay: bool,
    /// A second logical slot in the database that nobody reads. It holds back `catalog_xmin`.
    pub(crate) lagging_slot: bool,
}

impl TablePlan {
    /// `is_served_first`: the writers start after a relay has served the slot.
    pub(super) fn draw(is_served_first: bool, random: &mut Random) -> Self {
        let has_history = random.per_mille(400);
        let rows = random.pick(&[1, 200, 2_000, 12_000]);
        Self {
            history: if has_history { rows } else { 0 },
            // Not if the writers start together with the relay: then some of their rows would be
            // committed before the relay captures the table.
            captured_by_relay: random.per_mille(400) && is_served_first,
            lagging_slot: random.per_mille(200),
        }
    }
}
