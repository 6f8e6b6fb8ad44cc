//! Defines the ordering key, within which Pub/Sub keeps order.

use std::fmt;
use std::sync::Arc;

/// The ordering key of one message; empty if the message is unordered. Clones share one copy of the text.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct OrderingKey(Option<Arc<str>>);

impl OrderingKey {
    /// The key of unordered messages.
    pub const UNORDERED: Self = Self(None);

    /// The key as text; empty when unordered.
    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or_default()
    }

    /// Whether the message has no ordering key.
    pub fn is_unordered(&self) -> bool {
        self.0.is_none()
    }
}

impl From<&str> for OrderingKey {
    /// Converts a text to a key. The empty text means unordered, as in a `PubsubMessage`.
    fn from(key: &str) -> Self {
        Self((!key.is_empty()).then(|| key.into()))
    }
}

impl AsRef<str> for OrderingKey {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Display for OrderingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
