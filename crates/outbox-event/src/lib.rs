//! The contract of an event's message. It is shared by the relay that writes messages, by consumers
//! that read them, and by producers that need to know an event's id in advance.
//!
//! - [`attribute`] contains the names of the attributes.
//! - An [`Envelope`] is the form of the data. With the envelope `protobuf`, the data is a
//!   [`ProtobufEvent`].
//! - [`EventUuids`] computes the attribute `event_id` of a row whose id is not a uuid.
//!
//! A consumer deduplicates by `event_id`, and decodes the data according to the content type:
//!
//! ```
//! use std::collections::HashMap;
//!
//! use outbox_event::{PROTOBUF_MEDIA_TYPE, ProtobufEvent, attribute};
//! use prost::Message;
//!
//! fn read(data: &[u8], attributes: &HashMap<String, String>) -> Option<ProtobufEvent> {
//!     let content_type = attributes.get(attribute::CONTENT_TYPE)?;
//!     let is_protobuf = content_type == PROTOBUF_MEDIA_TYPE;
//!     is_protobuf.then(|| ProtobufEvent::decode(data).ok()).flatten()
//! }
//!
//! let sent = ProtobufEvent { id: "0190163d-8694-739b-aea5-966c26f8ad91".into(), ..Default::default() };
//! let attributes = HashMap::from([
//!     (attribute::EVENT_ID.into(), sent.id.clone()),
//!     (attribute::CONTENT_TYPE.into(), PROTOBUF_MEDIA_TYPE.into()),
//! ]);
//! assert_eq!(read(&sent.encode_to_vec(), &attributes), Some(sent));
//! ```
//!
//! A producer that inserts a numbered row can compute the `event_id` that consumers will see:
//!
//! ```
//! use outbox_event::{EventUuids, TableIdentity};
//!
//! let ids = EventUuids::new(&TableIdentity::new("public.orders"));
//! // Transaction 731 inserted the row with id 7.
//! let event_id = ids.event_uuid("7", Some("731"));
//! // In SQL: select outbox.event_uuid('public.orders', '7', '731')
//! assert_eq!(event_id.to_string(), "b56ec8b4-fabd-f8c5-3ada-4935cae5729a");
//! ```
//!
//! `docs/reference/mapping.md` describes the same contract in prose.
//!
//! **Invariants.** This crate contains plain values and pure functions, without PostgreSQL and
//! without Pub/Sub. A new version may add names, but never changes a name or the id of a row,
//! because messages live longer than programs.
//!
//! **Not here:** how a row becomes a message, whether a row fits into a message, and how a message is
//! sent.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

pub mod attribute;
mod envelope;
mod event_uuid;
mod protobuf_event;

pub use envelope::{
    CLOUDEVENTS_MEDIA_TYPE, CLOUDEVENTS_VERSION, Envelope, PROTOBUF_MEDIA_TYPE, ParseEnvelopeError,
};
pub use event_uuid::{EventUuids, TableIdentity};
pub use protobuf_event::{ProtobufEvent, Timestamp};
