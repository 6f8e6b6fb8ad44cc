//! Pub/Sub's answer: the ids of the stored messages.
//!
//! One string contains all ids of an answer, and a list contains the offsets at which the ids begin. This
//! avoids millions of allocations, because an id needs no string of its own: the relay only copies it into its
//! dispatch row.
//!
//! Source: google/pubsub/v1/pubsub.proto, `PublishResponse { repeated string message_ids = 1; }`.

use bytes::{Buf, BufMut};
use prost::encoding::{
    DecodeContext, WireType, encode_key, encode_varint, encoded_len_varint, key_len, skip_field,
    string,
};
use prost::{DecodeError, Message};

const MESSAGE_IDS: u32 = 1;

/// The ids of stored messages, in the order in which the messages were sent.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct MessageIds {
    text: String,
    count: usize,
    /// The offset in `text` at which each id begins, except the first id.
    later: Vec<usize>,
    /// Scratch space for decoding one id, kept to reuse its memory.
    reading: String,
}

impl MessageIds {
    /// The number of ids.
    #[inline]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are no ids.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The id of the message with index `n` in the request.
    #[inline]
    pub fn get(&self, n: usize) -> Option<&str> {
        if n >= self.count {
            return None;
        }
        let start = n.checked_sub(1).map_or(0, |n| self.later[n]);
        let end = self.later.get(n).copied().unwrap_or(self.text.len());
        Some(&self.text[start..end])
    }

    fn push(&mut self, id: &str) {
        self.begin();
        self.text.push_str(id);
    }

    /// Begins another id at the current end of `text`.
    fn begin(&mut self) {
        if self.count > 0 {
            self.later.push(self.text.len());
        }
        self.count += 1;
    }

    /// Returns the ids of the messages with these indexes.
    pub fn of(&self, numbers: &[usize]) -> Self {
        let mut ids = Self::default();
        for id in numbers.iter().filter_map(|n| self.get(*n)) {
            ids.push(id);
        }
        ids
    }
}

impl Message for MessageIds {
    fn encode_raw(&self, out: &mut impl BufMut) {
        for id in (0..self.len()).filter_map(|n| self.get(n)) {
            encode_key(MESSAGE_IDS, WireType::LengthDelimited, out);
            encode_varint(id.len() as u64, out);
            out.put_slice(id.as_bytes());
        }
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        bytes: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        if tag != MESSAGE_IDS {
            return skip_field(wire_type, tag, bytes, context);
        }
        string::merge(wire_type, &mut self.reading, bytes, context)?;
        self.begin();
        match self.count {
            // A response usually has one id, so swap the strings instead of copying.
            1 => std::mem::swap(&mut self.text, &mut self.reading),
            _ => self.text.push_str(&self.reading),
        }
        Ok(())
    }

    fn encoded_len(&self) -> usize {
        let ids = (0..self.len()).filter_map(|n| self.get(n));
        ids.map(|id| key_len(MESSAGE_IDS) + encoded_len_varint(id.len() as u64) + id.len())
            .sum()
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PublishResponse;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_answer_of_pubsub_is_decoded_and_unknown_fields_are_skipped(
            message_ids in prop::collection::vec("\\PC{0,20}", 0..20),
            unknown in 2u32..100,
        ) {
            let answer = PublishResponse { message_ids: message_ids.clone() };
            let mut bytes = answer.encode_to_vec();
            encode_key(unknown, WireType::Varint, &mut bytes);
            encode_varint(7, &mut bytes);
            let ids = MessageIds::decode(bytes.as_slice()).unwrap();
            prop_assert_eq!(ids.len(), message_ids.len());
            for (n, id) in message_ids.iter().enumerate() {
                prop_assert_eq!(ids.get(n), Some(id.as_str()));
            }
            prop_assert_eq!(ids.get(message_ids.len()), None);
            prop_assert_eq!(ids.encode_to_vec(), answer.encode_to_vec());
            prop_assert_eq!(ids.encoded_len(), answer.encoded_len());
        }

        #[test]
        fn bytes_that_are_not_an_answer_are_an_error_and_not_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..60),
        ) {
            let expected = PublishResponse::decode(bytes.as_slice()).map(|a| a.message_ids);
            let found = MessageIds::decode(bytes.as_slice())
                .map(|ids| (0..ids.len()).map(|n| ids.get(n).unwrap().to_owned()).collect::<Vec<_>>());
            prop_assert_eq!(found.ok(), expected.ok());
        }
    }

    #[test]
    fn ids_can_be_selected_by_message_number() {
        let mut ids = MessageIds::default();
        for id in ["11", "", "333"] {
            ids.push(id);
        }
        let some = ids.of(&[0, 2]);
        assert_eq!(
            (some.get(0), some.get(1), some.len()),
            (Some("11"), Some("333"), 2)
        );
    }
}
