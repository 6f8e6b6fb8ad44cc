//! Decodes the output of a PostgreSQL walsender: the frames of the streaming replication protocol
//! and, inside them, the messages of `pgoutput` at protocol version 1.
//!
//! The crate does no IO, has no clock and never blocks. It turns bytes that the caller owns into
//! values that borrow from these bytes. A tour, in the order in which the bytes arrive:
//!
//! 1. Each `CopyData` body is a [`frame::Frame`]: WAL data or a keepalive
//!    ([`frame::decode_frame`]). The client answers with a [`frame::StandbyStatus`].
//! 2. The payload of a WAL data frame is one [`Message`]. [`decode`] decodes it. A transaction consists of a
//!    [`Begin`], its changes, and a [`Commit`].
//! 3. The server describes a table in a [`Relation`] before the first change to the table in a
//!    session, and again after the table's shape has changed. [`RelationCache`] stores these
//!    descriptions, and reports whether a new description differs from the previous description of
//!    the same table.
//! 4. A change contains a [`Tuple`], whose columns are in the same order as in the table's [`Relation`]. Each
//!    column is a [`Value`] that borrows from the input.
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
//! **Invariants.** Every input results in a value or a [`DecodeError`], never in a panic. Decoding
//! a message checks all of it, so iterating over its tuple, columns or relations cannot fail. Decoding
//! allocates no memory, and [`RelationCache`] allocates in proportion to its input. If a count or a
//! length on the wire promises more bytes than the input has, decoding fails. Trailing bytes, flags
//! that protocol 1 does not define, and messages of later protocols are errors.
//!
//! **Not here:** the connection and its authentication, `CopyData` framing, the decision which
//! position to confirm to the server and when, and the meaning of an outbox table's columns.
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
