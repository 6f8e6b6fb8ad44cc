//! Defines the errors that concern a table, its settings or one of its rows.
//!
//! An error names the table, the row and the limit, and says what the operator can do. It never contains
//! a payload, or the value of a header or an attribute, because errors are logged.

use std::fmt;
use std::sync::Arc;

use decoder::Oid;
use printable::printable;
use thiserror::Error;

use super::topic_name::TopicNameFault;
use crate::event::{CommittedAt, EventId, OrderingKey};

/// The reason why a table or one of its rows cannot be mapped to messages.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MapError {
    /// A column that is required or configured is missing from the table, or the publication does not
    /// publish it.
    #[error(
        "table {table} has no column {column:?}, which the setting `{setting}` names; its published \
         columns are {}", .present.join(", ")
    )]
    ColumnMissing {
        /// `schema.table`.
        table: String,
        /// The missing column.
        column: String,
        /// The setting that names the column, explicitly or by default.
        setting: String,
        /// The columns in the server's description.
        present: Vec<String>,
    },
    /// The settings of the table contradict each other or Pub/Sub's rules.
    #[error("settings of table {table}: {fault}")]
    Setting {
        /// `schema.table`.
        table: String,
        /// The fault.
        fault: SettingFault,
    },
    /// One row cannot become a message.
    #[error(transparent)]
    Event(Box<EventError>),
}

/// A fault in the settings of a table.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SettingFault {
    /// A column that every event needs was switched off.
    #[error("`{setting}` is empty, but every event needs that column")]
    ColumnSwitchedOff {
        /// Such as `columns.id`.
        setting: String,
    },
    /// One setting uses a column that another setting switches off.
    #[error("`{setting}` needs the column that `{column_setting}` switches off")]
    ColumnNeeded {
        /// The setting that uses the column.
        setting: &'static str,
        /// The setting that is empty.
        column_setting: String,
    },
    /// The settings do not say which time zone applies to a time without an offset. The relay does not guess,
    /// because a wrong time zone could shift the time by up to 26 hours.
    #[error(
        "`columns.occurred_at` is column {column:?} of type timestamp without time zone, and \
         `time_zone` does not say what its values mean"
    )]
    TimeZoneMissing {
        /// The column.
        column: String,
    },
    /// An extra attribute has the name of a fixed attribute, or is listed twice.
    #[error(
        "`attributes` lists {attribute:?}, but every message has an attribute of that name already"
    )]
    AttributeTaken {
        /// The name.
        attribute: String,
    },
    /// Pub/Sub would refuse an extra attribute because of its name.
    #[error(
        "`attributes` lists {attribute:?}; Pub/Sub accepts names of up to 256 bytes that do not begin \
         with \"goog\""
    )]
    AttributeName {
        /// The name.
        attribute: String,
    },
    /// The settings contain a topic, or the fixed part of a topic template, that Pub/Sub would refuse.
    #[error("`{setting}` gives the topic {topic:?}: {fault}")]
    Topic {
        /// `topic` or `topic_rules`.
        setting: &'static str,
        /// The invalid name.
        topic: String,
        /// The reason.
        fault: TopicNameFault,
    },
}

/// One row that cannot become a message.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("event {} of table {table} at {}: {fault}", printable(.event_id.as_deref().unwrap_or("without id")), .at.position)]
pub struct EventError {
    /// `schema.table`.
    pub table: Arc<str>,
    /// The text of the event's id, shortened if it is long; `None` if the id cannot be read or is empty.
    pub event_id: Option<String>,
    /// The event's position, and its commit time.
    pub at: CommittedAt,
    /// The fault.
    pub fault: EventFault,
    /// What is known about the event despite the fault.
    pub known: FaultyRow,
}

/// The known facts about a row that cannot become a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultyRow {
    /// The event's identity. If the row's id cannot be read, the identity is made from the event's
    /// position.
    pub event_id: EventId,
    /// The event's topic, if it can be determined.
    pub topic: Option<Arc<str>>,
    /// The event's ordering key. `UNORDERED` if the key cannot be determined, or if Pub/Sub would refuse
    /// it.
    pub ordering_key: OrderingKey,
}

impl EventFault {
    /// Whether the fault concerns only this row. Any other fault lies in the table, its settings or the
    /// server, and affects every row. The relay must not quarantine rows because of such a fault.
    pub fn is_of_the_row(&self) -> bool {
        match self {
            Self::Null { .. }
            | Self::NotUtf8 { .. }
            | Self::Unreadable { .. }
            | Self::ValueTooLarge { .. }
            | Self::HeadersMalformed { .. }
            | Self::Topic { .. }
            | Self::AttributeReserved { .. }
            | Self::OverLimit { .. } => true,
            Self::ColumnCount { .. }
            | Self::UnchangedToast { .. }
            | Self::UuidMalformed { .. }
            | Self::ByteaMalformed { .. }
            | Self::BinaryTypeUnknown { .. }
            | Self::BinaryMalformed { .. } => false,
        }
    }
}

/// A fault that was found in one row.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(
    missing_docs,
    reason = "fields: a column's name, a type's OID, an attribute's or topic's name"
)]
pub enum EventFault {
    /// The row does not have as many columns as the server described.
    #[error("the row has {found} columns, but the table was described with {expected}")]
    ColumnCount { expected: usize, found: usize },
    /// A null or empty value where a value is required.
    #[error("column {column:?} is null or empty, but it is needed for {needed_for}")]
    Null {
        column: String,
        needed_for: &'static str,
    },
    /// The server did not send the value. The server leaves out values only in updates, and only inserts
    /// become events.
    #[error("the server did not send column {column:?} (unchanged TOAST value in an insert)")]
    UnchangedToast { column: String },
    /// Text that is not UTF-8. PostgreSQL sends such text only if the encoding of the database is
    /// SQL_ASCII.
    #[error("column {column:?} is not valid UTF-8")]
    NotUtf8 { column: String },
    /// A value that PostgreSQL cannot send, such as bytes that cannot be converted to UTF-8.
    #[error("PostgreSQL cannot send column {column:?}: {problem}")]
    Unreadable { column: String, problem: String },
    /// A value that is larger than any message.
    #[error("column {column:?} is larger than the largest message that Pub/Sub accepts")]
    ValueTooLarge { column: String },
    /// A uuid column whose value is not a uuid.
    #[error("column {column:?} is not a uuid")]
    UuidMalformed { column: String },
    /// A `bytea` value that is not in its hex form.
    #[error("column {column:?} is bytea, but not in the text form \\x0123")]
    ByteaMalformed { column: String },
    /// A type whose binary form is not supported.
    #[error("column {column:?} is in binary form, which is not supported for type {}", .type_oid.0)]
    BinaryTypeUnknown { column: String, type_oid: Oid },
    /// A value that is not a valid binary form of its type.
    #[error("column {column:?} is not a binary value of type {}", .type_oid.0)]
    BinaryMalformed { column: String, type_oid: Oid },
    /// Headers that are not a JSON object.
    #[error("column {column:?} is not a JSON object (line {line}, column {at_column})")]
    HeadersMalformed {
        column: String,
        line: usize,
        at_column: usize,
    },
    /// A topic name that Pub/Sub would refuse.
    #[error("its topic would be {topic:?}: {fault}")]
    Topic {
        topic: String,
        fault: TopicNameFault,
    },
    /// An attribute that Pub/Sub would refuse because of its name.
    #[error("its attribute {key:?} begins with \"goog\", which Pub/Sub reserves")]
    AttributeReserved { key: String },
    /// A size or count above a limit of Pub/Sub.
    #[error("{limit} {found} {}, but Pub/Sub accepts at most {}", .limit.unit(), .limit.maximum())]
    OverLimit { limit: Limit, found: usize },
}

/// The limits that a single message can exceed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Limit {
    /// Bytes of a request that holds only this message.
    Request,
    /// Bytes of the ordering key.
    OrderingKey,
    /// Number of attributes.
    Attributes,
    /// Bytes of an attribute's name. The field has the first characters of the name, for the error text.
    AttributeKey(String),
    /// Bytes of an attribute's value. The field has the attribute's name.
    AttributeValue(String),
}

impl Limit {
    /// The maximum that Pub/Sub accepts.
    pub fn maximum(&self) -> usize {
        use super::limits;
        match self {
            Limit::Request => limits::REQUEST_BYTES,
            Limit::OrderingKey => limits::ORDERING_KEY_BYTES,
            Limit::Attributes => limits::ATTRIBUTES,
            Limit::AttributeKey(_) => limits::ATTRIBUTE_KEY_BYTES,
            Limit::AttributeValue(_) => limits::ATTRIBUTE_VALUE_BYTES,
        }
    }

    fn unit(&self) -> &'static str {
        match self {
            Limit::Attributes => "attributes",
            _ => "bytes",
        }
    }
}

impl fmt::Display for Limit {
    /// Writes the first words of a sentence that continues with a number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Request => f.write_str("a request with only this event needs"),
            Limit::OrderingKey => f.write_str("its ordering key has"),
            Limit::Attributes => f.write_str("it has"),
            Limit::AttributeKey(start) => write!(f, "the name of its attribute {start:?}... has"),
            Limit::AttributeValue(key) => write!(f, "the value of its attribute {key:?} has"),
        }
    }
}

impl MapError {
    /// The stable error code, which `postrider explain CODE` explains.
    pub fn code(&self) -> &'static str {
        match self {
            MapError::ColumnMissing { .. } => "column-missing",
            MapError::Setting { .. } => "setting-invalid",
            MapError::Event(event) => match event.fault {
                EventFault::ValueTooLarge { .. }
                | EventFault::OverLimit {
                    limit: Limit::Request,
                    ..
                } => "event-too-large",
                _ => "event-invalid",
            },
        }
    }

    /// One sentence that says what the operator can do.
    pub fn hint(&self) -> String {
        match self {
            MapError::ColumnMissing { table, setting, .. } => {
                match setting.strip_prefix("columns.") {
                    Some(_) => format!(
                        "set `{setting}` of table {table} to the column's name, or to \"\" if the table \
                     has none; a column list of the publication must include it"
                    ),
                    None => format!("correct `{setting}` of table {table}"),
                }
            }
            MapError::Setting { fault, .. } => fault.hint(),
            MapError::Event(event) => event.hint(),
        }
    }
}

impl SettingFault {
    fn hint(&self) -> String {
        match self {
            SettingFault::ColumnSwitchedOff { setting } => {
                format!("set `{setting}` to the name of a column")
            }
            SettingFault::ColumnNeeded {
                setting,
                column_setting,
            } => {
                let of_a_row = "; if each row names its topic, set `columns.topic` to that column";
                let more = if *setting == "topic" { of_a_row } else { "" };
                format!("set `{column_setting}` to a column, or change `{setting}`{more}")
            }
            SettingFault::TimeZoneMissing { .. } => {
                "set `time_zone` to \"UTC\" if the values are in UTC, or to \"local\" to send them \
                 as they are, without an offset; better, make the column a timestamptz"
                    .to_owned()
            }
            SettingFault::AttributeTaken { attribute } => {
                format!("take {attribute:?} out of `attributes`")
            }
            SettingFault::AttributeName { attribute } => format!(
                "take {attribute:?} out of `attributes`; its value can go into the headers column \
                 under another name"
            ),
            SettingFault::Topic { setting, .. } => format!("correct `{setting}`"),
        }
    }
}

impl EventError {
    fn hint(&self) -> String {
        let table = &self.table;
        // Do not advise the operator to correct the row. Without a readable id, the relay identifies this event by
        // its position. A corrected row would have a readable id, so it would be another event, and this one would
        // stay in quarantine.
        if self.event_id.is_none() && self.fault.is_of_the_row() {
            return format!(
                "insert the event again into {table}, with an id that can be read, and discard this one"
            );
        }
        match &self.fault {
            EventFault::ColumnCount { .. } => {
                "this is a bug in Postrider: please report it with the relay's log".to_owned()
            }
            EventFault::Null { column, .. } => {
                format!(
                    "make column {column:?} of {table} NOT NULL, or change the settings that need it"
                )
            }
            EventFault::UnchangedToast { .. } => {
                "check that the publication publishes inserts only".to_owned()
            }
            EventFault::NotUtf8 { .. } => {
                "check server_encoding; a database in SQL_ASCII may hold such text".to_owned()
            }
            EventFault::Unreadable { column, .. } => format!(
                "correct column {column:?} of that row in {table} and release the event, or discard it"
            ),
            EventFault::UuidMalformed { .. }
            | EventFault::BinaryMalformed { .. }
            | EventFault::ByteaMalformed { .. } => {
                "make sure that the server at the database's address is PostgreSQL".to_owned()
            }
            EventFault::BinaryTypeUnknown { column, .. } => format!(
                "leave column {column:?} out of the settings of {table}, or make its type text, \
                 bigint, uuid or timestamptz"
            ),
            EventFault::HeadersMalformed { column, .. } => {
                format!(
                    "write {column:?} as one JSON object of strings; a jsonb column with a CHECK helps"
                )
            }
            EventFault::Topic { .. } => format!(
                "correct the topic settings of {table}; `topic_rules` gives single aggregate types \
                 a topic of their own"
            ),
            EventFault::AttributeReserved { key } => format!("rename the header {key:?}"),
            EventFault::ValueTooLarge { .. }
            | EventFault::OverLimit {
                limit: Limit::Request,
                ..
            } => "store large payloads elsewhere and send a reference".to_owned(),
            EventFault::OverLimit {
                limit: Limit::OrderingKey,
                ..
            } => "use a shorter aggregate id, or ordering = \"bucketed(1000)\", which hashes it"
                .to_owned(),
            EventFault::OverLimit { .. } => {
                "send fewer or shorter attributes; put large values into the payload".to_owned()
            }
        }
    }
}

#[cfg(test)]
mod tests;
