//! Streams a logical replication slot of PostgreSQL, and computes the position that may be
//! confirmed.
//!
//! A tour:
//!
//! - [`Target`] says which server to connect to and how to log in. It is read from a URL and
//!   libpq's environment variables. [`connection`] opens the byte stream, with TLS, for replication
//!   and SQL sessions.
//! - [`Source`] runs a replication session on its own thread. The thread passes on chunks of whole
//!   frames, and [`frames`] decodes them. The thread also sends the status messages, so nothing in
//!   the caller can delay them.
//! - Our hold on the slot is a lease: [`Source::lease_is_over`] says whether the caller must stop publishing,
//!   because another session has the slot or may soon have it. [`LeaseProof`] collects evidence that the
//!   server receives our messages. This evidence extends the lease.
//! - [`Watermark`] computes the [`Confirmable`] position. Everything before this position has a
//!   durable outcome.
//! - [`create_slot`] creates a slot, together with a snapshot of the rows that the slot will not
//!   stream. [`probe`] checks that the server accepts a replication session.
//!
//! **Invariants.** Only `watermark.rs` advances a confirmable position. State machines are pure: the caller
//! passes in the clock. Memory is bounded, because buffers have a maximum size and the channel is short.
//! Every failure is a [`ReplicationError`], and callers branch only on its [`ErrorKind`] and SQLSTATE.
//! Nothing here restarts a session. A session ends with an error, and the caller opens the next one.
//!
//! **Not here:** decoding (the crate `decoder`), inspecting and managing slots (`slot-manager`),
//! running SQL sessions, and deciding what happens to a row.
//!
//! # Example
//!
//! Streams one transaction and confirms it.
//!
//! ```
//! use std::time::Duration;
//!
//! use decoder::{Message, decode, frame::Frame};
//! use replication::{
//!     CommitLsn, Confirmable, Environment, Source, StreamOptions, Target, Watermark, frames,
//! };
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let server = scratch_postgres::ScratchPostgres::builder().start()?;
//! # let url = server.socket_url("postgres");
//! # let (sql, driver) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
//! # tokio::spawn(driver);
//! # sql.batch_execute("CREATE TABLE t (n int); CREATE PUBLICATION p FOR TABLE t").await?;
//! let statement = "SELECT lsn::text FROM pg_create_logical_replication_slot('s', 'pgoutput')";
//! let slot_begins: String = sql.query_one(statement, &[]).await?.get(0);
//! let start = Confirmable::by_slot(slot_begins.parse()?);
//! sql.batch_execute("INSERT INTO t VALUES (1), (2)").await?;
//!
//! let target = Target::from_settings(&url, &Environment::new())?;
//! let options = StreamOptions {
//!     target: target.expect("the URL names a database"),
//!     slot: "s".into(),
//!     publication: "p".into(),
//!     application_name: "example".into(),
//!     wal_sender_timeout: Duration::from_secs(60),
//!     confirmed: start,
//! };
//! let mut source = Source::open(options, || {}).await?;
//! let mut watermark = Watermark::new(start);
//! let (mut rows, mut is_over) = (0, false);
//! while !is_over {
//!     let (ended, chunks) = source.split();
//!     let Some(chunk) = chunks.recv().await else {
//!         return Err(ended.await?.into());
//!     };
//!     for frame in frames(&chunk) {
//!         let Frame::XLogData { payload, .. } = frame? else { continue };
//!         match decode(payload)? {
//!             Message::Begin(begin) => {
//!                 let commit = CommitLsn::new(begin.final_lsn);
//!                 watermark.begin(commit, begin.commit_time, begin.xid.0);
//!             }
//!             Message::Insert(_) => {
//!                 watermark.add_event();
//!                 rows += 1;
//!             }
//!             Message::Commit(commit) => {
//!                 watermark.commit(commit.end_lsn);
//!                 // Here the rows get a durable outcome.
//!                 watermark.resolve(CommitLsn::new(commit.commit_lsn), rows);
//!                 is_over = rows > 0;
//!             }
//!             _ => {}
//!         }
//!     }
//! }
//! source.confirm(watermark.confirmable());
//! source.close().await;
//!
//! let statement = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots";
//! let confirmed: String = sql.query_one(statement, &[]).await?.get(0);
//! assert_eq!(confirmed.parse(), Ok(watermark.confirmable().lsn()));
//! assert_eq!(rows, 2);
//! # Ok(())
//! # }
//! ```

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

pub mod connection;
mod environment;
mod error;
mod source;
mod watermark;

pub use connection::{Servers, Target};
pub use environment::Environment;
pub use error::{ErrorKind, ReplicationError};
pub use source::{
    Chunk, CreateSlot, CreatedSlot, LeaseProof, Source, StreamOptions, create_slot, frames, probe,
};
pub use watermark::{CommitLsn, Confirmable, Watermark};

/// The target (in the sense of `tracing`) of all log lines of this crate. It begins with the name
/// of the program, so that `RUST_LOG=postrider=debug` includes this crate.
const LOG_TARGET: &str = "postrider::replication";
