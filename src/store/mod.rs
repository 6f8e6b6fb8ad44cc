//! The relay's own tables in the schema `outbox`. All SQL on these tables is here, except that of `postrider init`.
//!
//! - [`dispatch`]: the outcome of each event, and the quarantine (`outbox.dispatch`).
//! - [`capture_record`]: which rows of each captured table the relay must publish, and how far they are
//!   resolved (`outbox.capture`).
//! - [`replay`]: which published events must be published again (`outbox.replay`, `outbox.replay_event`).
//! - [`days`]: the daily partitions of `outbox.events`.
//! - [`privileges`]: which privileges on these tables our role lacks.
//! - [`records_reach`]: the highest transaction ids and the last WAL position in these tables.
//! - [`relay_row`]: which relay serves a slot, and how far it got (`outbox.relay`).
//!
//! After a crash the relay rebuilds its state from these tables and the slot.
//!
//! **Invariants.** Nothing here writes to an outbox table, except that [`days`] adds and drops its partitions.
//! When the relay records outcomes, raises floors or records audits, it checks in the same transaction that
//! no other session has the slot. A relay that has lost the slot therefore records none of these.
//!
//! Not here: queries on captured tables (`capture`), the definitions of the relay's own tables
//! (`migrations/`), and decisions. The callers decide from the rows that they read here.

pub(crate) mod capture_record;
pub(crate) mod days;
pub(crate) mod dispatch;
pub(crate) mod position;
pub(crate) mod privileges;
pub(crate) mod records_reach;
pub(crate) mod relay_row;
pub(crate) mod replay;
