//! The relay's own tables in the schema `outbox`. All SQL on these tables is here.
//!
//! - [`dispatch`]: the outcome of each event, and the quarantine (`outbox.dispatch`).
//! - [`capture_record`]: which rows of each captured table are ours, and how far they are resolved
//!   (`outbox.capture`).
//! - [`replay`]: which published events must be published again (`outbox.replay`,
//!   `outbox.replay_event`).
//! - [`days`]: the daily partitions of `outbox.events`.
//! - [`relay_row`]: which relay serves a slot, and how far it got (`outbox.relay`).
//!
//! After a crash the relay rebuilds its state from these tables and the slot.
//!
//! **Invariants.** Nothing here writes to an outbox table, but [`days`] may drop a partition of one.
//! The relay records outcomes, raises floors and records audits only after a check, in the same transaction,
//! that no other session has the slot.
//!
//! Not here: queries on captured tables (`capture`), the tables' definitions (`migrations/`), and
//! decisions. The callers decide from the rows that they read here.

pub(crate) mod capture_record;
pub(crate) mod days;
pub(crate) mod dispatch;
pub(crate) mod position;
pub(crate) mod relay_row;
pub(crate) mod replay;
