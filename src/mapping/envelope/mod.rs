//! Applies the envelope: the form of a message's data, and the attributes that the form adds.
//!
//! | envelope | data | additional attributes |
//! |---|---|---|
//! | `raw` | the payload | none |
//! | `cloudevents-binary` | the payload | `ce-*`, `content-type` of the payload |
//! | `cloudevents-structured` | a JSON document that contains the payload | `content-type` |
//! | `protobuf` | an encoded [`ProtobufEvent`](outbox_event::ProtobufEvent) | `content-type` |

mod cloudevents;
mod protobuf;

use outbox_event::{CLOUDEVENTS_MEDIA_TYPE, Envelope, PROTOBUF_MEDIA_TYPE, attribute};

use super::attributes::Attributes;
use super::columns::OutboxRow;
use super::data::MessageData;
use super::error::EventFault;
use super::headers::Headers;
use super::timestamp::CivilTime;
use crate::event::CommittedAt;

/// The parts of an event that envelopes use.
#[derive(Debug)]
pub(super) struct EventContext<'a> {
    pub(super) row: &'a OutboxRow<'a>,
    /// The uuid by which consumers and the dispatch table identify the event.
    pub(super) event_id: &'a str,
    /// The id in the table, if the id column is not a uuid.
    pub(super) source_id: Option<&'a str>,
    /// The event type; empty if it is null. Never empty if the envelope needs an event type.
    pub(super) event_type: &'a str,
    /// The name of the payload column.
    pub(super) payload_column: &'a str,
    /// CloudEvents' `source`.
    pub(super) source: &'a str,
    pub(super) headers: &'a Headers,
    /// The time in the column `occurred_at`, and its RFC 3339 form. `None` if the column has no time with a known
    /// UTC offset.
    pub(super) occurred_at: Option<(CivilTime, &'a str)>,
    pub(super) at: CommittedAt,
}

impl EventContext<'_> {
    /// The payload's media type: from the headers, or derived from the type of its column.
    fn content_type(&self) -> &str {
        self.headers
            .content_type()
            .unwrap_or_else(|| self.row.content_kind.media_type())
    }
}

/// Why the envelope needs an event type, as text for an error. `None` if the envelope needs none.
pub(super) fn needs_event_type(envelope: Envelope) -> Option<&'static str> {
    match envelope {
        Envelope::Raw | Envelope::Protobuf => None,
        Envelope::CloudeventsBinary | Envelope::CloudeventsStructured => {
            Some("the CloudEvents type")
        }
    }
}

/// Adds the envelope's own attributes. Must be called before the headers are added, because the first
/// attribute of a name wins.
pub(super) fn add_attributes(
    envelope: Envelope,
    event: &EventContext<'_>,
    attributes: &mut Attributes,
) -> Result<(), EventFault> {
    match envelope {
        Envelope::Raw => Ok(()),
        Envelope::CloudeventsBinary => cloudevents::add_attributes(event, attributes),
        Envelope::CloudeventsStructured => {
            attributes.add(attribute::CONTENT_TYPE, CLOUDEVENTS_MEDIA_TYPE)
        }
        Envelope::Protobuf => attributes.add(attribute::CONTENT_TYPE, PROTOBUF_MEDIA_TYPE),
    }
}

/// Returns the message's data: the payload itself, or a document that this function writes to `scratch`.
pub(super) fn body<'a>(
    envelope: Envelope,
    event: &EventContext<'a>,
    attributes: &Attributes,
    scratch: &'a mut Vec<u8>,
) -> Result<MessageData<'a>, EventFault> {
    match envelope {
        Envelope::Raw | Envelope::CloudeventsBinary => {
            return Ok(event.row.payload.unwrap_or(MessageData::Plain(b"")));
        }
        Envelope::CloudeventsStructured => {
            cloudevents::write_document(event, attributes, scratch)?;
        }
        Envelope::Protobuf => protobuf::write_event(event, scratch),
    }
    Ok(MessageData::Plain(scratch))
}
