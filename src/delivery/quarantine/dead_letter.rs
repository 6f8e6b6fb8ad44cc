//! Encodes dead letters, and keeps track of the dead letters in flight. A dead letter is a message on the
//! dead-letter topic that reports a bad event.
//!
//! A dead letter has the event's data and attributes, as far as they fit. Further attributes say which
//! event is bad, to which topic and key it belongs, and why it could not be published. The letter has no
//! ordering key, so a blocked key cannot hold it up.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
use prost::Message;
use uuid::Uuid;

use crate::event::{EventPosition, EventRef, Group, Standing};
use crate::mapping::limits;

/// Number of bytes of a request that are reserved for the topic's name and the framing.
const REQUEST_OVERHEAD: usize = 1_000;

/// A bad event whose dead letter is in flight. The event is recorded once the letter is stored or
/// refused.
#[derive(Debug)]
pub(crate) struct Letter {
    pub(crate) group: Group,
    pub(crate) origin: EventRef,
    pub(crate) error: Arc<str>,
}

/// The dead letters in flight, by the positions of their events.
#[derive(Debug)]
pub(crate) struct DeadLetters {
    /// Full name of the dead-letter topic, if there is one.
    topic: Option<Arc<str>>,
    in_flight: HashMap<EventPosition, Letter>,
}

impl DeadLetters {
    pub(crate) fn new(topic: Option<Arc<str>>) -> Self {
        Self {
            topic,
            in_flight: HashMap::new(),
        }
    }

    pub(crate) fn none_in_flight(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// The topic for the dead letter of this event. Returns `None` if no topic is configured. Also returns
    /// `None` if the event is released, because it had its dead letter when it was first set aside.
    pub(crate) fn topic_for(&self, origin: &EventRef) -> Option<Arc<str>> {
        let topic = self.topic.clone();
        topic.filter(|_| origin.standing == Standing::New)
    }

    pub(crate) fn sent(&mut self, letter: Letter) {
        self.in_flight.insert(letter.origin.position, letter);
    }

    /// Removes and returns the dead letter of this event. Returns `None` if the message that was
    /// sent to `topic` is not a dead letter.
    pub(crate) fn take(&mut self, topic: &Arc<str>, origin: &EventRef) -> Option<Letter> {
        if self.topic.as_ref() != Some(topic) {
            return None;
        }
        self.in_flight.remove(&origin.position)
    }
}

/// Encodes the dead letter. `original` is the event's own message. If the row could not become a message,
/// `original` has only the payload and perhaps the source id.
pub(crate) fn letter(letter: &Letter, original: PubsubMessage) -> Bytes {
    let Letter {
        group,
        origin,
        error,
    } = letter;
    let own = [
        (
            "event_id",
            Uuid::from_bytes(origin.event_id.uuid).to_string(),
        ),
        ("topic", group.topic.to_string()),
        ("ordering_key", group.ordering_key.to_string()),
        ("error", error.to_string()),
        ("commit_lsn", origin.position.commit.lsn().to_string()),
        ("ordinal", origin.position.ordinal.to_string()),
    ];
    let own = own.into_iter().filter(|(_, value)| !value.is_empty());
    let mut attributes: HashMap<String, String> = own
        .map(|(key, value)| (key.to_owned(), cut(value)))
        .collect();
    let mut theirs: Vec<_> = original.attributes.into_iter().collect();
    theirs.sort_unstable();
    for (key, value) in theirs {
        let fits = attributes.len() < limits::ATTRIBUTES
            && key.len() <= limits::ATTRIBUTE_KEY_BYTES
            && value.len() <= limits::ATTRIBUTE_VALUE_BYTES
            && !limits::is_reserved_attribute(&key);
        if fits {
            attributes.entry(key).or_insert(value);
        }
    }
    let mut message = PubsubMessage {
        data: original.data,
        attributes,
        ..PubsubMessage::default()
    };
    if message.encoded_len() + REQUEST_OVERHEAD > limits::REQUEST_BYTES {
        message.data = Bytes::new();
    }
    message.encode_to_vec().into()
}

/// Shortens a value to the maximum length that Pub/Sub allows.
fn cut(mut value: String) -> String {
    value.truncate(value.floor_char_boundary(limits::ATTRIBUTE_VALUE_BYTES));
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;
    use crate::event::OrderingKey;

    fn read(original: PubsubMessage, error: &str) -> PubsubMessage {
        let about = Letter {
            group: Group {
                topic: "projects/p/topics/t".into(),
                ordering_key: OrderingKey::from("k"),
            },
            origin: Event::for_tests(3).origin,
            error: error.into(),
        };
        PubsubMessage::decode(letter(&about, original)).unwrap()
    }

    #[test]
    fn a_dead_letter_has_the_events_data_and_attributes_and_the_error() {
        let original = PubsubMessage {
            data: "{}".into(),
            attributes: [
                ("tenant".into(), "acme".into()),
                ("error".into(), "x".into()),
            ]
            .into(),
            ordering_key: "k".into(),
            ..PubsubMessage::default()
        };
        let message = read(original, "event-refused: no");
        assert_eq!(message.data, "{}");
        assert_eq!(message.ordering_key, "");
        for (name, value) in [
            ("tenant", "acme"),
            ("error", "event-refused: no"),
            ("topic", "projects/p/topics/t"),
            ("ordering_key", "k"),
            ("commit_lsn", "0/1"),
            ("ordinal", "3"),
        ] {
            assert_eq!(message.attributes[name], value, "{name}");
        }
    }

    #[test]
    fn parts_that_pubsub_would_refuse_are_left_out() {
        let mut attributes: HashMap<String, String> =
            (0..100).map(|n| (format!("k{n}"), String::new())).collect();
        attributes.insert("google_x".into(), "v".into());
        attributes.insert("a".into(), "v".repeat(1_025));
        let original = PubsubMessage {
            data: vec![0; 10_000_000].into(),
            attributes,
            ..PubsubMessage::default()
        };
        let message = read(original, &"é".repeat(1_000));
        assert!(message.data.is_empty());
        assert_eq!(message.attributes.len(), 100);
        assert!(!message.attributes.contains_key("google_x"));
        assert!(!message.attributes.contains_key("a"));
        assert_eq!(message.attributes["error"].len(), 1_024);
    }
}
