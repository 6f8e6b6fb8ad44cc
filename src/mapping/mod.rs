//! Maps a row of an outbox table to a Pub/Sub message.
//!
//! The steps:
//!
//! 1. [`TableSettings`] say which columns of a table have which meaning (`settings`).
//! 2. When the server describes the table, [`Mapper::resolve`] finds those columns (`columns`). A domain
//!    is treated as its base type (`column_types`). From then on columns are found by their index.
//! 3. [`Mapper::map_row`] reads a row's values as text (`value`) and its payload (`payload`). From these
//!    values it makes the event's identity (`event_id`), topic (`topic`, `topic_name`, `template`),
//!    ordering key (`ordering`), attributes (`attributes`, `headers`, `timestamp`) and data (`data`,
//!    `envelope`).
//! 4. If Pub/Sub would refuse the message, the mapping refuses the row (`limits`), with an error that
//!    names the row ([`MapError`]).
//! 5. The message is encoded once (`wire`). Retries send the same bytes.
//!
//! The attributes are added in this order. If two have the same name, the first one wins:
//!
//! 1. the fixed attributes: `event_id`, `source_id` if the id is not a uuid, `event_type`,
//!    `aggregate_type`, `aggregate_id`, `version`, `schema_version`, `occurred_at`, each left out if null;
//! 2. the attributes of the envelope;
//! 3. the extra columns;
//! 4. the headers;
//! 5. the trace context of Debezium's column (`trace_context`), if the headers have none;
//! 6. the trace context again, under the names that Google's client libraries read.
//!
//! So a header cannot replace an attribute that consumers rely on. Every message has an `event_id`, so
//! Pub/Sub never refuses a message because it is empty.
//!
//! **Invariants.** No value is truncated. The mapping refuses a row with a value that is too long, except that it
//! leaves out a value of Debezium's trace context. An error names the row, and never contains the value of a payload,
//! a header or an attribute.
//!
//! **Not here:** IO of any kind, batches and lanes, the handling of refused rows, and the types that all
//! modules use for events (`event`). The names of attributes and envelopes and the ids of events are a
//! contract with consumers, in the crate [`outbox_event`].

mod attributes;
mod column_types;
mod columns;
mod contradictions;
mod data;
mod envelope;
mod error;
mod event_id;
mod headers;
pub mod limits;
mod mapper;
mod ordering;
mod payload;
mod replayed;
mod settings;
mod template;
mod timestamp;
mod topic;
mod topic_name;
mod trace_context;
mod tuple_values;
mod value;
mod wire;

pub use column_types::{ColumnType, ColumnTypes};
pub use columns::INSERTED_XID;
pub use error::{EventError, EventFault, FaultyRow, Limit, MapError, SettingFault};
pub use mapper::{Mapped, Mapper, TableColumns, TimeKind};
pub(crate) use ordering::fnv1a_64;
pub use ordering::{BUCKETS_MAX, Ordering, ParseOrderingError};
pub use replayed::marked;
pub use settings::{ColumnSettings, TableSettings, TimeZone};
pub use template::{ParseTemplateError, Template};
pub use topic_name::{TopicNameFault, topic_name};
pub use tuple_values::TupleValues;
