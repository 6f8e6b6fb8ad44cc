//! What the relay remembers in the database: the only SQL on the tables of the schema `outbox`.
//!
//! - [`dispatch`]: the outcome of each event, and the quarantine (`outbox.dispatch`).
//! - [`capture_record`]: which rows of each captured table are ours, and how far they are resolved
//!   (`outbox.capture`).
//! - [`replay`]: which published events must be published again (`outbox.replay`,
//!   `outbox.replay_event`).
//! - [`partitions`]: the daily partitions of `outbox.events`.
//! - [`relay_row`]: which relay serves a slot, and how far it got (`outbox.relay`).
//!
//! The relay can rebuild its memory from these tables and the slot.
//!
//! **Invariants.** Nothing here writes to an outbox table, except that [`partitions`] drops old partitions. A
//! statement that only the holder of the slot may run checks in the database that its session still holds it.
//!
//! Not here: queries on captured tables (`capture`), the tables' definitions (`migrations/`), and what
//! follows from a row.

pub(crate) mod capture_record;
pub(crate) mod dispatch;
pub(crate) mod partitions;
pub(crate) mod relay_row;
pub(crate) mod replay;
