//! The envelopes: the forms that a message's data can have, with their names in the settings and
//! their media types.
//!
//! An envelope changes the data and may add attributes. It never removes any. With every envelope a message
//! has the fixed attributes and the headers, so subscription filters work with all envelopes.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Value of the attribute `content-type` with the envelope `protobuf`.
pub const PROTOBUF_MEDIA_TYPE: &str = "application/protobuf; messageType=postrider.v1.Event";

/// Value of the attribute `content-type` with the envelope `cloudevents-structured`.
pub const CLOUDEVENTS_MEDIA_TYPE: &str = "application/cloudevents+json";

/// The version of the CloudEvents specification. Binary and structured messages use the same version.
pub const CLOUDEVENTS_VERSION: &str = "1.0";

/// The form of a message's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Envelope {
    /// The payload, unchanged.
    #[default]
    Raw,
    /// CloudEvents 1.0 in binary mode: the payload unchanged, and the event's context in attributes
    /// `ce-*`.
    CloudeventsBinary,
    /// CloudEvents 1.0 in structured mode: one JSON document with the event's context and the
    /// payload.
    CloudeventsStructured,
    /// Our own Protobuf message, [`ProtobufEvent`](crate::ProtobufEvent).
    Protobuf,
}

const NAMES: [(&str, Envelope); 4] = [
    ("raw", Envelope::Raw),
    ("cloudevents-binary", Envelope::CloudeventsBinary),
    ("cloudevents-structured", Envelope::CloudeventsStructured),
    ("protobuf", Envelope::Protobuf),
];

/// The error for a text that is not the name of an [`Envelope`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{input:?} is not an envelope: write raw, cloudevents-binary, cloudevents-structured or protobuf"
)]
pub struct ParseEnvelopeError {
    /// The text as it was given.
    pub input: String,
}

impl FromStr for Envelope {
    type Err = ParseEnvelopeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = NAMES.iter().find(|(name, _)| *name == text);
        found
            .map(|(_, envelope)| *envelope)
            .ok_or_else(|| ParseEnvelopeError { input: text.into() })
    }
}

impl fmt::Display for Envelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Envelope::Raw => "raw",
            Envelope::CloudeventsBinary => "cloudevents-binary",
            Envelope::CloudeventsStructured => "cloudevents-structured",
            Envelope::Protobuf => "protobuf",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_envelope_survives_a_round_trip_through_its_name() {
        for (name, envelope) in NAMES {
            assert_eq!(name.parse(), Ok(envelope));
            assert_eq!(envelope.to_string(), name);
        }
        assert!("Raw".parse::<Envelope>().is_err());
    }
}
