//! The names of a message's attributes.
//!
//! A message can have more attributes: from the headers of its row, and from the columns that the
//! setting `attributes` names. If two attributes have the same name, the first one in this order
//! wins: attributes in [`FIXED`], attributes of the envelope, columns from the setting, headers, the
//! trace context from the column `tracingspancontext`.

/// The event's uuid, by which consumers deduplicate.
pub const EVENT_ID: &str = "event_id";
/// The id of the row as the table has it, if that id is not a uuid.
pub const SOURCE_ID: &str = "source_id";
/// The type of the event, such as `OrderPlaced`.
pub const EVENT_TYPE: &str = "event_type";
/// The kind of aggregate, such as `order`.
pub const AGGREGATE_TYPE: &str = "aggregate_type";
/// The id of the aggregate, such as `order-4711`.
pub const AGGREGATE_ID: &str = "aggregate_id";
/// The version of the aggregate.
pub const VERSION: &str = "version";
/// The version of the payload's schema.
pub const SCHEMA_VERSION: &str = "schema_version";
/// When the event happened: in RFC 3339 if the column contains a point in time, otherwise the text of the
/// column.
pub const OCCURRED_AT: &str = "occurred_at";

/// The attributes of every message, in the order in which they are added. An attribute is left out
/// if the row has no value for it.
pub const FIXED: [&str; 8] = [
    EVENT_ID,
    SOURCE_ID,
    EVENT_TYPE,
    AGGREGATE_TYPE,
    AGGREGATE_ID,
    VERSION,
    SCHEMA_VERSION,
    OCCURRED_AT,
];

/// Media type of the data. With the envelope `raw`, a message has this attribute only if a header
/// sets it.
pub const CONTENT_TYPE: &str = "content-type";

/// The version of CloudEvents. Only the envelope `cloudevents-binary` adds the attributes `ce-*`.
pub const CE_SPECVERSION: &str = "ce-specversion";
/// CloudEvents' `id`: the same as [`EVENT_ID`].
pub const CE_ID: &str = "ce-id";
/// CloudEvents' `source`.
pub const CE_SOURCE: &str = "ce-source";
/// CloudEvents' `type`: the same as [`EVENT_TYPE`].
pub const CE_TYPE: &str = "ce-type";
/// CloudEvents' `time`.
pub const CE_TIME: &str = "ce-time";
/// CloudEvents' `subject`: the same as [`AGGREGATE_ID`].
pub const CE_SUBJECT: &str = "ce-subject";

/// The W3C trace context. Comes from the headers or from the column `tracingspancontext`.
pub const TRACEPARENT: &str = "traceparent";
/// The vendor's part of the trace context. Comes from the headers or from the column
/// `tracingspancontext`.
pub const TRACESTATE: &str = "tracestate";

/// The attributes of the trace context, each with a second name under which Google's client
/// libraries look for it. A message that has one of these attributes has it under both names.
pub const TRACE_ALIASES: [(&str, &str); 2] = [
    (TRACEPARENT, "googclient_traceparent"),
    (TRACESTATE, "googclient_tracestate"),
];

/// The name of the replay that published the message again. Only replayed messages have this attribute.
pub const REPLAY: &str = "replay";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_about_messages_names_every_attribute() {
        let page = include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../docs/reference/mapping.md"
        ));
        let others = [
            CONTENT_TYPE,
            CE_SPECVERSION,
            CE_ID,
            CE_SOURCE,
            CE_TYPE,
            CE_TIME,
            CE_SUBJECT,
            REPLAY,
        ];
        let aliases = TRACE_ALIASES
            .iter()
            .flat_map(|(name, alias)| [*name, *alias]);
        for name in FIXED.into_iter().chain(others).chain(aliases) {
            let quoted = [
                format!("`{name}`"),
                format!("`{name},"),
                format!(" {name},"),
            ];
            let is_named = quoted.iter().any(|quoted| page.contains(quoted));
            assert!(is_named, "mapping.md does not name {name}");
        }
    }
}
