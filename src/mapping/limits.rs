//! Pub/Sub's limits on publishing, as the service documents them
//! (<https://cloud.google.com/pubsub/quotas#resource_limits>).
//!
//! The mapping checks these limits, not the publisher, because only the mapping can name the faulty row in its
//! error.

/// Maximum size in bytes of one encoded `PublishRequest`, including the topic name.
pub const REQUEST_BYTES: usize = 10_000_000;
/// Maximum length of an ordering key, in bytes.
pub const ORDERING_KEY_BYTES: usize = 1_024;
/// Maximum number of attributes of one message.
pub const ATTRIBUTES: usize = 100;
/// Maximum length of an attribute's name, in bytes.
pub const ATTRIBUTE_KEY_BYTES: usize = 256;
/// Maximum length of an attribute's value, in bytes.
pub const ATTRIBUTE_VALUE_BYTES: usize = 1_024;
/// Allowed lengths of a topic's id (the last part of its name), in characters.
pub const TOPIC_ID_CHARS: std::ops::RangeInclusive<usize> = 3..=255;

/// Maximum length of a project id, in bytes. Google's limit is 30 characters, but we accept more, because the ids of
/// old projects can begin with a domain and a colon.
const PROJECT_ID_BYTES: usize = 128;

/// Prefix of the attribute names that Pub/Sub reserves.
const RESERVED_PREFIX: &str = "goog";
/// Prefix of the reserved attribute names that clients may set anyway. Google's client libraries use them
/// for the trace context.
const CLIENT_PREFIX: &str = "googclient_";

/// Whether Pub/Sub refuses an attribute of this name.
pub fn is_reserved_attribute(key: &str) -> bool {
    key.starts_with(RESERVED_PREFIX) && !key.starts_with(CLIENT_PREFIX)
}

/// Whether this text could be a project id.
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
