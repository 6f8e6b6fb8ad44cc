//! Creates, inspects and judges logical replication slots on PostgreSQL 14 to 18.
//!
//! The functions with IO take a plain [`tokio_postgres::Client`], connected to the slot's database.
//! No replication connection is needed. The crate also contains the relay's other queries of
//! PostgreSQL's catalogue and statistics. A tour:
//!
//! - [`slots`]: [`list`](slots::list), [`find`](slots::find), [`create`](slots::create),
//!   [`drop`](slots::drop), [`advance`](slots::advance) and
//!   [`wait_until_free`](slots::wait_until_free). All major versions share one row type, [`Slot`].
//! - [`health`]: [`judge`](health::judge) turns a slot and the known facts about it into a
//!   [`Health`], with a severity and a remedy, without IO.
//! - [`retention`]: which transactions and slots keep the server from removing WAL.
//! - [`publication`]: whether the publication still publishes every captured row. The relay asks
//!   every few seconds, because PostgreSQL does not report rows that it skips.
//! - [`statistics`]: how many rows were inserted, to compute rates.
//! - [`cluster`]: identifies the cluster and the database, so that a copy is not mistaken for the
//!   original.
//! - [`activity`]: the sessions of a relay, and the holders of locks.
//! - [`standby_slots`]: whether a walsender waits for the standby servers of `synchronized_standby_slots`.
//! - [`table`], [`table_shape`], [`column_types`]: a captured table as the catalogue describes it.
//! - [`privileges`]: the privileges of roles.
//! - [`preflight`]: checks the server, its settings, the slot, the publication and the grants, and
//!   returns [`Finding`]s.
//!
//! **Invariants.** Decisions depend on SQLSTATEs and catalogue columns, never on message texts. Every
//! statement is in `sql.rs` or `sql/`, except the one that [`table_shape::sequence`] builds from the name
//! of a sequence. The crate prepares no named statements, and sends each statement in one round trip, so
//! it leaves nothing behind in a session. No function logs or reconnects. Only [`publication::inspect`]
//! retries, if somebody drops an object while it reads.
//!
//! **Not here:** streaming from a slot, confirming positions, and exporting a snapshot with a new
//! slot (which needs a replication command).
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
mod shown_name;
mod slot;
mod slot_name;
pub mod slots;
mod sql;
pub mod standby_slots;
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
