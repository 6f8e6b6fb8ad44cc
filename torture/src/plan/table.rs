//! Plans what the relay of a schedule finds at its first start: the outbox table, the database's encoding, and
//! perhaps a second slot.

use super::FaultFamily;
use crate::random::Random;

/// The state of the outbox table and its database when the relay starts for the first time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TablePlan {
    /// Number of rows that were committed before the table was captured. The relay must publish
    /// none of them.
    pub(crate) history: u64,
    /// Whether the relay creates the slot and the capture record at its first start. If false,
    /// `postrider init` creates them.
    pub(crate) captured_by_relay: bool,
    /// Whether the database has a second logical slot. No session reads from that slot, so the slot holds
    /// back `catalog_xmin`.
    pub(crate) lagging_slot: bool,
    /// The encoding of the database.
    pub(crate) encoding: Encoding,
}

/// The encoding of a database.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Encoding {
    #[default]
    Utf8,
    SqlAscii,
    Win1252,
}

impl Encoding {
    /// Returns what to append to `CREATE DATABASE name`.
    pub(crate) fn of_database(self) -> &'static str {
        match self {
            Self::Utf8 => "",
            Self::SqlAscii => {
                " TEMPLATE template0 ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'"
            }
            Self::Win1252 => " TEMPLATE template0 ENCODING 'WIN1252' LC_COLLATE 'C' LC_CTYPE 'C'",
        }
    }

    /// Returns SQL for a text that PostgreSQL accepts in this encoding, and cannot convert to UTF-8.
    pub(crate) fn undecodable(self) -> &'static str {
        match self {
            Self::Utf8 => "'every text is UTF-8'",
            Self::SqlAscii => "convert_from('\\xff', 'SQL_ASCII')",
            Self::Win1252 => "convert_from('\\x81', 'WIN1252')",
        }
    }
}

impl TablePlan {
    /// Draws the plan of the table.
    pub(super) fn draw(fault_family: FaultFamily, random: &mut Random) -> Self {
        let has_history = random.per_mille(400);
        let rows = random.pick(&[1, 200, 2_000, 12_000]);
        Self {
            history: if has_history { rows } else { 0 },
            // The relay captures the table only in schedules that start it before the writers (`serve_first`).
            // Otherwise rows would be committed before the capture, and the relay would never publish them.
            captured_by_relay: random.per_mille(400) && fault_family.loses_rows(),
            lagging_slot: random.per_mille(200),
            encoding: match fault_family {
                FaultFamily::Bytes => random.pick(&[Encoding::SqlAscii, Encoding::Win1252]),
                _ => Encoding::Utf8,
            },
        }
    }
}
