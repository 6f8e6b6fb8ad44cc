//! Decodes the output of a PostgreSQL walsender: the frames of the streaming replication protocol
//! and, inside them, the messages of `pgoutput` at protocol version 1.
//!
//! The crate does no IO, has no clock and never waits. It turns bytes that the caller owns into
//! values that borrow from them. A tour, in the order in which bytes arrive:
//!
//! 1. Each `CopyData` body is a [`frame::Frame`]: WAL data or a keepalive
//!    ([`frame::decode_frame`]). The client answers with a [`frame::StandbyStatus`].
//! 2. The payload of a WAL data frame is one [`Message`] ([`decode`]). A transaction is a
//!    [`Begin`], its changes, and a [`Commit`].
//! 3. The server describes a table in a [`Relation`] before the first change to it in a session, and
//!    again after its shape has changed. [`RelationCache`] stores these descriptions, and reports
//!    whether a new description differs from the previous description of the same table.
//! 4. A change holds a [`Tuple`], whose columns are in the order of that relation. Each is a
//!    [`Value`] that points into the input.
//!
//! ```
//! use decoder::{Message, Value, decode};
//!
//! // Insert into relation 16384 of one row with two columns: the text "7", and NULL.
//! let payload = b"I\x00\x00\x40\x00N\x00\x02t\x00\x00\x00\x017n";
//! let Message::Insert(insert) = decode(payload)? else { unreachable!() };
//! let row: Vec<Value<'_>> = insert.tuple.iter().collect();
//! assert_eq!(row, [Value::Text(b"7"), Value::Null]);
//! # Ok::<(), decoder::DecodeError>(())
//! ```
//!
//! **Invariants.** Any input results in a value or a [`DecodeError`], never in a panic. A message is
//! checked as a whole when it is decoded, so that iterating over its tuple, columns or relations
//! cannot fail. When decoding, only [`RelationCache`] allocates memory, in proportion to its
//! input. A count or a length from the wire is never trusted before its bytes have been seen.
//! Trailing bytes, flags that protocol 1 does not define, and messages of later protocols are
//! errors.
//!
//! **Not here:** the connection and its authentication, `CopyData` framing, which position may be
//! confirmed to the server and when, and the meaning of columns in an outbox.
//!
//! Source for all layouts: the PostgreSQL manual, chapters "Streaming Replication Protocol" and
//! "Logical Replication Message Formats".

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

mod begin;
mod commit;
mod data_type;
mod delete;
mod error;
pub mod frame;
mod id;
mod insert;
mod logical_message;
mod lsn;
mod message;
mod message_kind;
mod origin;
mod reader;
mod relation;
mod relation_cache;
mod timestamp;
mod truncate;
mod tuple;
mod update;

pub use begin::Begin;
pub use commit::Commit;
pub use data_type::Type;
pub use delete::Delete;
pub use error::{DecodeError, Fault};
pub use id::{Oid, Xid};
pub use insert::Insert;
pub use logical_message::LogicalMessage;
pub use lsn::{Lsn, ParseLsnError};
pub use message::{Message, decode};
pub use message_kind::MessageKind;
pub use origin::Origin;
pub use relation::{Column, ColumnIter, Columns, Relation, ReplicaIdentity};
pub use relation_cache::{CacheChange, OwnedColumn, OwnedRelation, RelationCache};
pub use timestamp::PgTimestamp;
pub use truncate::{RelationOids, Truncate};
pub use tuple::{Tuple, Value, Values};
pub use update::{OldRow, Update};
