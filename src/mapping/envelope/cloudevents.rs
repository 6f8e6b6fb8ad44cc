//! Writes CloudEvents 1.0: the attributes of the binary mode, as Google's binding for Pub/Sub defines them
//! (<https://github.com/googleapis/google-cloudevents>, `docs/spec/pubsub.md`), and the JSON document of the
//! structured mode (<https://github.com/cloudevents/spec>, `cloudevents/formats/json-format.md`).
//!
//! | CloudEvents | from |
//! |---|---|
//! | `id` | the attribute `event_id` |
//! | `source` | the setting `source` |
//! | `type` | `event_type` |
//! | `subject` | `aggregateid`, unless null or empty |
//! | `time` | `occurred_at`, or the commit time if `occurred_at` has no time with a known UTC offset |
//! | `datacontenttype` | the header `content-type`, or derived from the type of the payload column |

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use outbox_event::{CLOUDEVENTS_VERSION, attribute};

use super::{Attributes, EventContext, EventFault, MessageData};
use crate::mapping::payload::ContentKind;

/// Attributes of the distributed tracing extension, copied from the attributes of the message.
const EXTENSIONS: [&str; 2] = [attribute::TRACEPARENT, attribute::TRACESTATE];

/// Adds the context attributes of the binary mode.
pub(super) fn add_attributes(
    event: &EventContext<'_>,
    attributes: &mut Attributes,
) -> Result<(), EventFault> {
    attributes.add(attribute::CE_SPECVERSION, CLOUDEVENTS_VERSION)?;
    attributes.add(attribute::CE_ID, event.event_id)?;
    attributes.add(attribute::CE_SOURCE, event.source)?;
    attributes.add(attribute::CE_TYPE, event.event_type)?;
    match event.occurred_at {
        Some((_, rfc3339)) => attributes.add(attribute::CE_TIME, rfc3339)?,
        None => attributes.add(attribute::CE_TIME, &event.at.time.to_string())?,
    }
    if let Some(subject) = subject(event) {
        attributes.add(attribute::CE_SUBJECT, subject)?;
    }
    attributes.add(attribute::CONTENT_TYPE, event.content_type())
}

/// Replaces `out` with the document of the structured mode. The document contains a JSON payload exactly
/// as PostgreSQL printed it, text as a string, and bytes in base64.
pub(super) fn write_document(
    event: &EventContext<'_>,
    attributes: &Attributes,
    out: &mut Vec<u8>,
) -> Result<(), EventFault> {
    out.clear();
    out.extend_from_slice(b"{\"specversion\":\"1.0\"");
    member(out, "id", event.event_id);
    member(out, "source", event.source);
    member(out, "type", event.event_type);
    if let Some(subject) = subject(event) {
        member(out, "subject", subject);
    }
    match event.occurred_at {
        Some((_, rfc3339)) => member(out, "time", rfc3339),
        None => member(out, "time", &event.at.time.to_string()),
    }
    for extension in EXTENSIONS {
        if let Some(value) = attributes.get(extension) {
            member(out, extension, value);
        }
    }
    if let Some(payload) = event.row.payload {
        member(out, "datacontenttype", event.content_type());
        write_data(payload, event, out)?;
    }
    out.push(b'}');
    Ok(())
}

fn write_data(
    payload: MessageData<'_>,
    event: &EventContext<'_>,
    out: &mut Vec<u8>,
) -> Result<(), EventFault> {
    match (event.row.content_kind, payload) {
        (ContentKind::Json, json) => {
            out.extend_from_slice(b",\"data\":");
            json.write(out);
        }
        (ContentKind::Text, MessageData::Plain(text)) => {
            let text = std::str::from_utf8(text).map_err(|_| EventFault::NotUtf8 {
                column: event.payload_column.to_owned(),
            })?;
            member(out, "data", text);
        }
        (ContentKind::Binary | ContentKind::Text, bytes) => {
            let mut decoded = Vec::with_capacity(bytes.len());
            bytes.write(&mut decoded);
            out.extend_from_slice(b",\"data_base64\":\"");
            out.extend_from_slice(STANDARD.encode(decoded).as_bytes());
            out.push(b'"');
        }
    }
    Ok(())
}

fn subject<'a>(event: &EventContext<'a>) -> Option<&'a str> {
    event.row.aggregate_id.filter(|id| !id.is_empty())
}

/// Appends `,"name":"value"`.
fn member(out: &mut Vec<u8>, name: &str, value: &str) {
    out.extend_from_slice(b",\"");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
    serde_json::to_writer(out, value).expect("invariant: a string can always be written to a Vec");
}
