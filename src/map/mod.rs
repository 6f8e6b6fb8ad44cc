//! Map: from a row of an outbox table to a Pub/Sub message.
//!
//! A tour, in the order in which a row passes:
//!
//! 1. [`TableSettings`] say what a table's columns mean (`settings`).
//! 2. When the server describes the table, [`Mapper::resolve`] finds those columns (`columns`), with
//!    domains taken as what they are made from (`column_types`). From then on a row is read by
//!    position.
//! 3. [`Mapper::map`] reads a row's values as text (`value`) and its payload (`payload`), and makes
//!    the event's identity (`event_id`), its topic (`topic`, `template`), its ordering key
//!    (`ordering`), its attributes (`attributes`, `headers`, `timestamp`) and its data (`envelope`).
//! 4. What Pub/Sub would refuse is refused here (`limits`), with an error that names the row
//!    ([`MapError`]).
//! 5. The message is encoded once (`wire`) and stays like that: retries send the same bytes.
//!
//! Attributes, the first of a name counts: the fixed ones (`event_id`, `source_id` where the id is
//! not a uuid, `event_type`, `aggregate_type`, `aggregate_id`, `version`, `schema_version`,
//! `occurred_at`; nulls are left out), the envelope's own, the extra columns, the headers, and at last the trace context once
//! more under the names that Google's client libraries read. So a header cannot replace an
//! attribute that consumers rely on. Since `event_id` is always there, no message is ever empty.
//!
//! **Not here:** IO of any kind, batches and lanes, what becomes of a row that is refused, and the
//! marks of a replay.

mod attributes;
mod column_types;
mod columns;
pub mod envelope;
mod error;
mod event_id;
mod headers;
pub mod limits;
mod mapper;
mod ordering;
mod payload;
mod settings;
mod template;
mod timestamp;
mod topic;
mod value;
mod wire;

pub use column_types::{ColumnType, ColumnTypes};
pub use columns::INSERTED_XID;
pub use envelope::{Envelope, ParseEnvelopeError};
pub use error::{EventError, EventFault, Known, Limit, MapError, SettingFault};
pub(crate) use event_id::SHOWN_CHARS;
pub use event_id::{EventId, TableIdentity};
pub use mapper::{EventPosition, Mapped, Mapper, TableColumns, TimeKind};
pub use ordering::{BUCKETS_MAX, Ordering, OrderingKey, ParseOrderingError};
pub use settings::{Columns, TableSettings, TimeZone};
pub use template::{ParseTemplateError, Template};
pub use topic::{TopicNameFault, topic_name};
