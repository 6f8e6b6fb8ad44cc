//! Pub/Sub's limits on what may be published, as the service documents them
//! (<https://cloud.google.com/pubsub/quotas#resource_limits>).
//!
//! Checked here, before the publisher, since only here the error can name the row. The publisher
//! fills its requests by the same numbers.

/// Bytes of one encoded `PublishRequest`, topic name included.
pub const REQUEST_BYTES: usize = 10_000_000;
/// Messages of one `PublishRequest`.
pub const REQUEST_MESSAGES: usize = 1_000;
/// Bytes of an ordering key.
pub const ORDERING_KEY_BYTES: usize = 1_024;
/// Attributes of one message.
pub const ATTRIBUTES: usize = 100;
/// Bytes of an attribute's key.
pub const ATTRIBUTE_KEY_BYTES: usize = 256;
/// Bytes of an attribute's value.
pub const ATTRIBUTE_VALUE_BYTES: usize = 1_024;
/// Characters of a topic's id, the last part of its name.
pub const TOPIC_ID_CHARS: std::ops::RangeInclusive<usize> = 3..=255;

/// Prefix of attribute keys that the service keeps for itself.
const RESERVED_PREFIX: &str = "goog";
/// Attribute keys under the reserved prefix that clients may set: Google's own client libraries
/// carry the trace context there.
const CLIENT_PREFIX: &str = "googclient_";

/// Whether Pub/Sub refuses an attribute of this name.
pub fn is_reserved_attribute(key: &str) -> bool {
    key.starts_with(RESERVED_PREFIX) && !key.starts_with(CLIENT_PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_keys_that_the_service_keeps_for_itself_are_reserved() {
        assert!(is_reserved_attribute("goog"));
        assert!(is_reserved_attribute("google-thing"));
        assert!(!is_reserved_attribute("googclient_traceparent"));
        assert!(!is_reserved_attribute("goo"));
        assert!(!is_reserved_attribute("x-goog"));
    }
}
