//! Google's error details, which say more than the gRPC code. This module reads only those parts of
//! `google.rpc.Status` that change how we react, and the name of the reason, which we show to
//! operators.
//!
//! The domain of an error says who reports the error. The domain `googleapis.com` belongs to Google's service
//! infrastructure, which reports a disabled API, for example. Such an error is never the fault of the messages.
//! Pub/Sub itself uses the domain `pubsub.googleapis.com`. Its reasons can blame a message. For example, the
//! reason INVALID_JSON_AVRO_MESSAGE says that a message does not fit its topic's schema.
//!
//! Sources: google/rpc/status.proto and error_details.proto; google/api/error_reason.proto for the domain
//! `googleapis.com`.

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use prost::Message;
use tonic::Status;
use tonic::codegen::http::HeaderMap;

const ERROR_INFO: &str = "type.googleapis.com/google.rpc.ErrorInfo";
const BAD_REQUEST: &str = "type.googleapis.com/google.rpc.BadRequest";

/// The error domain of Google's service infrastructure.
pub(super) const INFRASTRUCTURE: &str = "googleapis.com";

/// The field of a `PublishRequest` that names the topic. If this field is wrong, the messages are
/// not at fault.
const TOPIC_FIELD: &str = "topic";

/// Accepts base64 with and without padding, because both forms occur.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Removes error details that are not base64, because tonic panics on them.
pub(super) fn remove_unreadable(headers: &mut HeaderMap) {
    let details = headers.get(Status::GRPC_STATUS_DETAILS);
    if details.is_some_and(|text| BASE64.decode(text).is_err()) {
        headers.remove(Status::GRPC_STATUS_DETAILS);
    }
}

#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

#[derive(Clone, PartialEq, Message)]
struct ErrorInfo {
    #[prost(string, tag = "1")]
    reason: String,
    #[prost(string, tag = "2")]
    domain: String,
}

#[derive(Clone, PartialEq, Message)]
struct BadRequest {
    #[prost(message, repeated, tag = "1")]
    field_violations: Vec<FieldViolation>,
}

#[derive(Clone, PartialEq, Message)]
struct FieldViolation {
    #[prost(string, tag = "1")]
    field: String,
}

/// The relevant error details of one answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Details {
    /// Google's name for the reason, if the answer has one.
    pub(super) reason: Option<String>,
    /// The domain of the reason.
    pub(super) domain: Option<String>,
    /// Whether the details blame something other than the messages.
    pub(super) not_the_messages: bool,
}

impl Details {
    /// Reads the bytes of a `google.rpc.Status`. Ignores parts that cannot be decoded.
    pub(super) fn read(bytes: &[u8]) -> Self {
        let mut details = Self::default();
        let status = RpcStatus::decode(bytes).unwrap_or_default();
        for any in &status.details {
            match any.type_url.as_str() {
                ERROR_INFO => {
                    let info = ErrorInfo::decode(any.value.as_slice()).unwrap_or_default();
                    details.not_the_messages |= info.domain == INFRASTRUCTURE;
                    details.reason = Some(info.reason).filter(|reason| !reason.is_empty());
                    details.domain = Some(info.domain);
                }
                BAD_REQUEST => {
                    let bad = BadRequest::decode(any.value.as_slice()).unwrap_or_default();
                    let mut fields = bad.field_violations.iter();
                    details.not_the_messages |= fields.any(|at| at.field == TOPIC_FIELD);
                }
                _ => {}
            }
        }
        details
    }
}

/// Builds a `google.rpc.Status` with an ErrorInfo, or with a BadRequest about one field.
#[cfg(test)]
pub(super) mod made_up {
    use super::*;

    pub(in super::super) fn error_info(domain: &str, reason: &str) -> Vec<u8> {
        let info = ErrorInfo {
            reason: reason.into(),
            domain: domain.into(),
        };
        status(ERROR_INFO, info.encode_to_vec())
    }

    pub(in super::super) fn bad_field(field: &str) -> Vec<u8> {
        let violation = FieldViolation {
            field: field.into(),
        };
        let bad = BadRequest {
            field_violations: vec![violation],
        };
        status(BAD_REQUEST, bad.encode_to_vec())
    }

    fn status(type_url: &str, value: Vec<u8>) -> Vec<u8> {
        let any = prost_types::Any {
            type_url: type_url.into(),
            value,
        };
        RpcStatus { details: vec![any] }.encode_to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_is_ignored() {
        assert_eq!(Details::read(b"\xFF\xFF\x00"), Details::default());
        assert_eq!(Details::read(b""), Details::default());
    }

    #[test]
    fn a_schema_mismatch_is_named_and_blamed_on_the_messages() {
        let bytes = made_up::error_info("pubsub.googleapis.com", "INVALID_JSON_AVRO_MESSAGE");
        let details = Details::read(&bytes);
        assert_eq!(details.reason.as_deref(), Some("INVALID_JSON_AVRO_MESSAGE"));
        assert!(!details.not_the_messages);
    }
}
