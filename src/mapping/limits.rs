//! Pub/Sub's limits on publishing, as the service documents them
//! (<https://cloud.google.com/pubsub/quotas#resource_limits>).
//!
//! The mapping checks these limits rather than the publisher, because only the mapping can name the row
//! in its error. The publisher uses the same numbers to fill its requests.

/// Size in bytes of one encoded `PublishRequest`, including the topic name.
pub const REQUEST_BYTES: usize = 10_000_000;
/// Messages in one `PublishRequest`.
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

/// Maximum length of a project id that we accept, in bytes. Google allows 30 characters; ids of old
/// projects may also begin with a domain and a colon.
const PROJECT_ID_BYTES: usize = 128;

/// Prefix of attribute keys that the service reserves.
const RESERVED_PREFIX: &str = "goog";
/// Prefix of the reserved attribute keys that clients may set anyway. Google's client libraries put
/// the trace context there.
const CLIENT_PREFIX: &str = "googclient_";

/// Whether Pub/Sub refuses an attribute of this name.
pub fn is_reserved_attribute(key: &str) -> bool {
    key.starts_with(RESERVED_PREFIX) && !key.starts_with(CLIENT_PREFIX)
}

/// Whether a project may have this id.
pub fn is_project_id(text: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.:".contains(c);
    (1..=PROJECT_ID_BYTES).contains(&text.len()) && text.chars().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_project_id_is_short_and_has_no_capital_letters() {
        for id in ["my-project-123", "example.com:shop", "p"] {
            assert!(is_project_id(id), "{id}");
        }
        for id in ["", "Shop", "a b", "a\nb", "a/b", &"p".repeat(129)] {
            assert!(!is_project_id(id), "{id}");
        }
    }

    #[test]
    fn only_keys_with_the_services_prefix_are_reserved() {
        assert!(is_reserved_attribute("goog"));
        assert!(is_reserved_attribute("google-thing"));
        assert!(!is_reserved_attribute("googclient_traceparent"));
        assert!(!is_reserved_attribute("goo"));
        assert!(!is_reserved_attribute("x-goog"));
    }
}
