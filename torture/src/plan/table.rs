//! The outbox table of a schedule before the relay starts, and other slots of the server.

use crate::random::Random;

/// The outbox table when the relay starts for the first time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TablePlan {
    /// Rows that were committed before the table was captured. The relay must publish none of them.
    pub(crate) history: u64,
    /// The relay creates the slot and the capture record at its first start. If false, `postrider
    /// init` creates them.
    pub(crate) captured_by_relay: bool,
    /// A second logical slot in the same database. Nobody reads from this slot, so it holds back
    /// `catalog_xmin`.
    pub(crate) lagging_slot: bool,
}

impl TablePlan {
    /// Draws the table. `is_served_first` says that the writers start only after a relay has served
    /// the slot.
    pub(super) fn draw(is_served_first: bool, random: &mut Random) -> Self {
        let has_history = random.per_mille(400);
        let rows = random.pick(&[1, 200, 2_000, 12_000]);
        Self {
            history: if has_history { rows } else { 0 },
            // If the writers start together with the relay, the relay must not capture the table
            // itself: it would never publish rows that were committed before the capture.
            captured_by_relay: random.per_mille(400) && is_served_first,
            lagging_slot: random.per_mille(200),
        }
    }
}
