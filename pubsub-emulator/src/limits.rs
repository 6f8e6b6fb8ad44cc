//! The rules by which the service refuses publish requests, with the service's wording where we
//! know it.
//!
//! The limits come from <https://cloud.google.com/pubsub/quotas#resource_limits>. A request is
//! accepted or refused as a whole, and the refusal reports the first violation that was found.

use tonic::{Code, Status};

use crate::wire::MessageView;

pub(crate) const MAX_MESSAGES: usize = 1_000;
/// Maximum size of the encoded request, including the name of the topic.
pub(crate) const MAX_REQUEST_BYTES: usize = 10_000_000;
pub(crate) const MAX_ORDERING_KEY_BYTES: usize = 1_024;
pub(crate) const MAX_ATTRIBUTES: usize = 100;
pub(crate) const MAX_ATTRIBUTE_KEY_BYTES: usize = 256;
pub(crate) const MAX_ATTRIBUTE_VALUE_BYTES: usize = 1_024;
/// Maximum size of an encoded `Acknowledge` or `ModifyAckDeadline` request.
pub(crate) const MAX_ACK_REQUEST_BYTES: usize = 524_288;
/// Prefix of the attribute keys that are reserved for the service.
const RESERVED_PREFIX: &str = "goog";
/// Prefix of the reserved keys that clients may use: the service's client libraries send trace contexts under
/// them.
const CLIENT_PREFIX: &str = "googclient_";
const QUOTAS: &str = "Refer to https://cloud.google.com/pubsub/quotas for more information.";

/// Why a publish request is refused. As in the service, the text names the field but not the message,
/// so a client has to bisect the batch to find the bad message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error(
        "The value for message_count is too small. You passed 0 in the request, but the minimum \
         value is 1."
    )]
    NoMessages,
    #[error(
        "The value for message_count is too large. You passed {count} in the request, but the \
         maximum value is {MAX_MESSAGES}."
    )]
    TooManyMessages { count: usize },
    #[error(
        "The value for request_size is too large. You passed {bytes} in the request, but the \
         maximum value is {MAX_REQUEST_BYTES}."
    )]
    RequestTooLarge { bytes: usize },
    #[error("One or more messages in the publish request could not be decoded.")]
    Malformed,
    #[error(
        "One or more messages in the publish request is empty. Each message must contain either \
         non-empty data, or at least one attribute."
    )]
    EmptyMessage,
    #[error(
        "In a single publish request, all messages must have no ordering key or they must all \
         have the same ordering key. [code=539b]"
    )]
    MixedOrderingKeys,
    #[error(
        "The ordering_key in the request is too long. The length is {bytes} bytes, but the \
         maximum allowed is {MAX_ORDERING_KEY_BYTES}. {QUOTAS}"
    )]
    OrderingKeyTooLong { bytes: usize },
    #[error(
        "One of the messages in the request has too many attributes. The number of attributes is \
         {count}, but the maximum allowed is {MAX_ATTRIBUTES}. {QUOTAS}"
    )]
    TooManyAttributes { count: usize },
    #[error(
        "The attribute {key:?} in the request has a key that is too long. The length is {bytes} \
         characters, but the maximum allowed is {MAX_ATTRIBUTE_KEY_BYTES}. {QUOTAS}"
    )]
    AttributeKeyTooLong { key: String, bytes: usize },
    #[error(
        "The attribute {key:?} in the request has a value that is too long. The length is {bytes} \
         characters, but the maximum allowed is {MAX_ATTRIBUTE_VALUE_BYTES}. {QUOTAS}"
    )]
    AttributeValueTooLong { key: String, bytes: usize },
    #[error(
        "The attribute {key:?} in the request has a key that is reserved. Attribute keys must not \
         start with \"goog\"."
    )]
    AttributeKeyReserved { key: String },
}

impl Refusal {
    /// The status code with which the service refuses the request.
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::MixedOrderingKeys => Code::FailedPrecondition,
            Self::NoMessages
            | Self::TooManyMessages { .. }
            | Self::RequestTooLarge { .. }
            | Self::Malformed
            | Self::EmptyMessage
            | Self::OrderingKeyTooLong { .. }
            | Self::TooManyAttributes { .. }
            | Self::AttributeKeyTooLong { .. }
            | Self::AttributeValueTooLong { .. }
            | Self::AttributeKeyReserved { .. } => Code::InvalidArgument,
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        Status::new(refusal.code(), refusal.to_string())
    }
}

/// Checks a request whose encoded size is `request_bytes`.
pub(crate) fn check_publish(
    request_bytes: usize,
    messages: &[MessageView<'_>],
) -> Result<(), Refusal> {
    if request_bytes > MAX_REQUEST_BYTES {
        return Err(Refusal::RequestTooLarge {
            bytes: request_bytes,
        });
    }
    let Some(first) = messages.first() else {
        return Err(Refusal::NoMessages);
    };
    if messages.len() > MAX_MESSAGES {
        return Err(Refusal::TooManyMessages {
            count: messages.len(),
        });
    }
    for message in messages {
        check_message(*message)?;
        if message.ordering_key != first.ordering_key {
            return Err(Refusal::MixedOrderingKeys);
        }
    }
    Ok(())
}

fn check_message(message: MessageView<'_>) -> Result<(), Refusal> {
    let bytes = message.ordering_key.len();
    if bytes > MAX_ORDERING_KEY_BYTES {
        return Err(Refusal::OrderingKeyTooLong { bytes });
    }
    let mut count = 0;
    for (key, value) in message.attributes() {
        count += 1;
        check_attribute(key, value)?;
    }
    if count > MAX_ATTRIBUTES {
        return Err(Refusal::TooManyAttributes { count });
    }
    if count == 0 && message.data.is_empty() {
        return Err(Refusal::EmptyMessage);
    }
    Ok(())
}

fn check_attribute(key: &str, value: &str) -> Result<(), Refusal> {
    if key.len() > MAX_ATTRIBUTE_KEY_BYTES {
        return Err(Refusal::AttributeKeyTooLong {
            key: key.to_owned(),
            bytes: key.len(),
        });
    }
    if key.starts_with(RESERVED_PREFIX) && !key.starts_with(CLIENT_PREFIX) {
        return Err(Refusal::AttributeKeyReserved {
            key: key.to_owned(),
        });
    }
    if value.len() > MAX_ATTRIBUTE_VALUE_BYTES {
        let (key, bytes) = (key.to_owned(), value.len());
        return Err(Refusal::AttributeValueTooLong { key, bytes });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::proto::{PublishRequest, PubsubMessage};

    fn check(messages: &[PubsubMessage]) -> Result<(), Refusal> {
        let request = PublishRequest {
            topic: "projects/p/topics/abc".to_owned(),
            messages: messages.to_vec(),
        };
        check_request(&request)
    }

    fn check_request(request: &PublishRequest) -> Result<(), Refusal> {
        let encoded: Vec<Vec<u8>> = request
            .messages
            .iter()
            .map(Message::encode_to_vec)
            .collect();
        let views: Vec<_> = encoded
            .iter()
            .map(|bytes| MessageView::parse(bytes).expect("valid"))
            .collect();
        check_publish(request.encoded_len(), &views)
    }

    fn data(bytes: usize) -> PubsubMessage {
        PubsubMessage {
            data: vec![b'x'; bytes].into(),
            ..Default::default()
        }
    }

    fn attribute(key: &str, value: &str) -> PubsubMessage {
        let attributes = [(key.to_owned(), value.to_owned())].into();
        PubsubMessage {
            attributes,
            ..Default::default()
        }
    }

    fn with_key(ordering_key: &str) -> PubsubMessage {
        PubsubMessage {
            ordering_key: ordering_key.to_owned(),
            ..data(1)
        }
    }

    #[test]
    fn a_request_of_a_thousand_messages_is_the_largest() {
        assert_eq!(check(&vec![data(1); 1_000]), Ok(()));
        assert_eq!(
            check(&vec![data(1); 1_001]),
            Err(Refusal::TooManyMessages { count: 1_001 })
        );
        assert_eq!(check(&[]), Err(Refusal::NoMessages));
    }

    #[test]
    fn the_encoded_request_with_its_topic_may_have_ten_million_bytes() {
        let mut request = PublishRequest {
            topic: "projects/p/topics/abc".to_owned(),
            messages: vec![data(9_999_900)],
        };
        let room = 10_000_000 - request.encoded_len();
        request.messages = vec![data(9_999_900 + room)];
        assert_eq!(request.encoded_len(), 10_000_000);
        assert_eq!(check_request(&request), Ok(()));
        request.topic.push('d');
        assert_eq!(
            check_request(&request),
            Err(Refusal::RequestTooLarge { bytes: 10_000_001 })
        );
    }

    #[test]
    fn an_ordering_key_has_at_most_1024_bytes() {
        assert_eq!(check(&[with_key(&"k".repeat(1_024))]), Ok(()));
        let refusal = Refusal::OrderingKeyTooLong { bytes: 1_025 };
        assert_eq!(
            check(&[with_key(""), with_key(&"k".repeat(1_025))]),
            Err(refusal)
        );
    }

    #[test]
    fn one_request_has_one_ordering_key() {
        assert_eq!(check(&[with_key("a"), with_key("a")]), Ok(()));
        assert_eq!(
            check(&[with_key("a"), with_key("b")]),
            Err(Refusal::MixedOrderingKeys)
        );
        assert_eq!(
            check(&[with_key("a"), with_key("")]),
            Err(Refusal::MixedOrderingKeys)
        );
        assert_eq!(Refusal::MixedOrderingKeys.code(), Code::FailedPrecondition);
    }

    #[test]
    fn attributes_above_their_documented_limits_are_refused() {
        assert_eq!(
            check(&[attribute(&"k".repeat(256), &"v".repeat(1_024))]),
            Ok(())
        );
        let long_key = Refusal::AttributeKeyTooLong {
            key: "k".repeat(257),
            bytes: 257,
        };
        assert_eq!(check(&[attribute(&"k".repeat(257), "v")]), Err(long_key));
        let long_value = Refusal::AttributeValueTooLong {
            key: "k".to_owned(),
            bytes: 1_025,
        };
        assert_eq!(
            check(&[attribute("k", &"v".repeat(1_025))]),
            Err(long_value)
        );

        let many = |count: usize| PubsubMessage {
            attributes: (0..count).map(|n| (n.to_string(), String::new())).collect(),
            ..Default::default()
        };
        assert_eq!(check(&[many(100)]), Ok(()));
        assert_eq!(
            check(&[many(101)]),
            Err(Refusal::TooManyAttributes { count: 101 })
        );
    }

    #[test]
    fn the_services_own_attribute_keys_are_reserved_except_for_trace_contexts() {
        let reserved = Refusal::AttributeKeyReserved {
            key: "googfoo".to_owned(),
        };
        assert_eq!(check(&[attribute("googfoo", "v")]), Err(reserved));
        assert_eq!(check(&[attribute("googclient_traceparent", "v")]), Ok(()));
    }

    #[test]
    fn an_empty_message_is_refused_even_with_an_ordering_key() {
        let empty = PubsubMessage {
            ordering_key: "k".to_owned(),
            ..Default::default()
        };
        assert_eq!(check(&[with_key("k"), empty]), Err(Refusal::EmptyMessage));
        assert_eq!(check(&[attribute("k", "")]), Ok(()));
    }

    #[test]
    fn refusals_are_worded_as_the_service_words_them() {
        let refusal = check(&[attribute("item_id", &"v".repeat(1_993))]).expect_err("too long");
        assert_eq!(
            Status::from(refusal).message(),
            "The attribute \"item_id\" in the request has a value that is too long. The length is \
             1993 characters, but the maximum allowed is 1024. Refer to \
             https://cloud.google.com/pubsub/quotas for more information."
        );
    }
}
