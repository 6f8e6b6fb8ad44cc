//! Adds the attribute `replay` to a replayed message.

use bytes::Bytes;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
use outbox_event::attribute::REPLAY;
use prost::Message;

use super::limits;
use super::wire::fits_a_request;

/// Adds the name of the replay to the message as an attribute. If the message has no room for another
/// attribute, returns the message unchanged.
pub fn marked(message: Bytes, topic: &str, replay: &str) -> Bytes {
    let Ok(mut marked) = PubsubMessage::decode(message.clone()) else {
        return message;
    };
    marked
        .attributes
        .insert(REPLAY.to_owned(), replay.to_owned());
    if marked.attributes.len() > limits::ATTRIBUTES
        || !fits_a_request(topic.len(), marked.encoded_len())
    {
        return message;
    }
    marked.encode_to_vec().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_without_room_for_the_attribute_stays_as_it_is() {
        let topic = "projects/p/topics/t";
        let read = |bytes: Bytes| PubsubMessage::decode(bytes).unwrap();
        let message = |attributes: usize, data: usize| {
            let pairs = (0..attributes).map(|n| (n.to_string(), String::new()));
            let message = PubsubMessage {
                data: vec![7; data].into(),
                attributes: pairs.collect(),
                ..PubsubMessage::default()
            };
            Bytes::from(message.encode_to_vec())
        };
        let found = read(marked(message(99, 10), topic, "r1"));
        assert_eq!(
            (found.attributes.len(), &*found.attributes[REPLAY]),
            (100, "r1")
        );
        for full in [message(100, 10), message(0, limits::REQUEST_BYTES - 40)] {
            assert_eq!(marked(full.clone(), topic, "r1"), full);
        }
    }
}
