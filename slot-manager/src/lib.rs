//! Creates, inspects and judges logical replication slots on PostgreSQL 14 to 18.
//!
//! Functions with IO take a plain [`tokio_postgres::Client`] connected to the database of the slot. No
//! replication connection is needed. The relay's other queries of the catalog and the statistics are here
//! too. A tour:
//!
//! - [`slots`]: [`list`](slots::list), [`find`](slots::find), [`create`](slots::create),
//!   [`drop`](slots::drop), [`advance`](slots::advance) and
//!   [`wait_until_free`](slots::wait_until_free). One row type, [`Slot`], for all majors.
//! - [`health`]: [`judge`](health::judge) turns a slot and the known facts about it into a
//!   [`Health`], with a severity and a remedy. Pure.
//! - [`retention`]: which transactions and slots keep WAL from being removed.
//! - [`publication`]: whether the publication still carries every captured row. The relay asks
//!   every few seconds, because PostgreSQL itself may skip rows without an error.
//! - [`statistics`]: how many rows were inserted, for rates.
//! - [`cluster`]: identifies the cluster and the database, so that a copy is not taken for the original.
//! - [`activity`]: the sessions of a relay, and the holders of locks.
//! - [`table`], [`table_shape`], [`column_types`]: a captured table as the catalog describes it.
//! - [`privileges`]: what roles may do.
//! - [`preflight`]: checks the server, its settings, the slot, the publication and the grants, and returns
//!   [`Finding`]s.
//!
//! **Invariants.** Decisions rest on SQLSTATEs and catalog columns, never on message texts. Every statement
//! is in `sql.rs` or `sql/`. Statements are sent unnamed, in one round trip, so they leave nothing behind in
//! a session. No function logs or reconnects. Only [`publication::inspect`] retries, when an object is
//! dropped while it reads.
//!
//! **Not here:** streaming from a slot, confirming positions, and the snapshot that a slot can
//! export (a replication command).
//!
//! # Example
//!
//! Creates a slot, reads it, and drops it again.
//!
//! ```
//! use std::time::Duration;
//!
//! use slot_manager::slots::{self, CreateOptions};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let server = scratch_postgres::ScratchPostgres::builder().setting("wal_level", "logical").start()?;
//! # let url = server.socket_url("postgres");
//! let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
//! tokio::spawn(connection);
//!
//! let name = "orders".parse()?;
//! let begins_at =
//!     slots::create(&client, &name, CreateOptions::default(), Duration::from_secs(10)).await?;
//! let slot = slots::find(&client, &name).await?.expect("the slot exists");
//! assert_eq!(slot.confirmed_flush_lsn, Some(begins_at));
//! slots::drop(&client, &name).await?;
//! # Ok(())
//! # }
//! ```

pub mod activity;
pub mod cluster;
pub mod column_types;
mod error;
mod finding;
pub mod health;
pub mod preflight;
pub mod privileges;
pub mod publication;
mod qualified_name;
mod query;
pub mod retention;
mod slot;
mod slot_name;
pub mod slots;
mod sql;
pub mod statistics;
pub mod table;
pub mod table_shape;

pub use cluster::{Cluster, DatabaseOrigin, SystemIdentifier};
pub use error::SlotError;
pub use finding::{Finding, Severity};
pub use health::Health;
pub use qualified_name::{
    ParseQualifiedNameError, QualifiedName, quoted_identifier, quoted_literal,
};
pub use slot::{Holder, Slot, WalStatus};
pub use slot_name::{InvalidSlotName, SlotName};
