//! The body of a request: one gRPC message, as a sequence of parts.
//!
//! Small messages are copied into a common part, because an additional part costs more than the copy. A large
//! message becomes a part of its own without a copy, so the whole message is in memory only once. Later code
//! copies only the few frames that are about to be sent.
//!
//! Sources: gRPC over HTTP/2, "Length-Prefixed-Message"; google/pubsub/v1/pubsub.proto,
//! `PublishRequest { string topic = 1; repeated PubsubMessage messages = 2; }`.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};

const TOPIC: u32 = 1;
const MESSAGES: u32 = 2;

/// Length in bytes of the gRPC header: one byte that says whether the message is compressed, and
/// four bytes with the message's length.
pub(super) const GRPC_HEADER: usize = 5;

/// Size in bytes from which a message becomes a part of its own.
const OWN_PART: usize = 4 << 10;

/// The bytes of a body that have not been sent yet. No part is empty, except the first part of an
/// empty body.
#[derive(Debug, Clone, Default)]
pub(super) struct RequestBody {
    first: Bytes,
    rest: VecDeque<Bytes>,
    bytes: usize,
}

impl RequestBody {
    /// Builds the body of a `PublishRequest` from encoded `PubsubMessage`s.
    pub(super) fn publish<'a>(
        topic: &str,
        messages: impl Iterator<Item = &'a Bytes> + Clone,
    ) -> Self {
        let field = |number, len| key_len(number) + encoded_len_varint(len as u64) + len;
        let all = messages
            .clone()
            .map(|message| field(MESSAGES, message.len()));
        let all = field(TOPIC, topic.len()) + all.sum::<usize>();
        let own_parts = messages.clone().filter(|message| message.len() >= OWN_PART);
        let copied = all - own_parts.map(Bytes::len).sum::<usize>();
        // Allocate exactly this size, because freezing a full buffer into a part needs no further
        // allocation.
        let mut copies = BytesMut::with_capacity(GRPC_HEADER + copied);
        header(all, &mut copies);
        key(TOPIC, topic.len(), &mut copies);
        copies.put_slice(topic.as_bytes());
        let mut body = Self::default();
        for message in messages {
            key(MESSAGES, message.len(), &mut copies);
            if message.len() < OWN_PART {
                copies.put_slice(message);
            } else {
                body.push(copies.split().freeze());
                body.push(message.clone());
            }
        }
        body.push(copies.freeze());
        body
    }

    /// Builds the body of any request other than `Publish`.
    pub(super) fn of(request: &impl Message) -> Self {
        let len = request.encoded_len();
        let mut bytes = BytesMut::with_capacity(GRPC_HEADER + len);
        header(len, &mut bytes);
        request.encode_raw(&mut bytes);
        let mut body = Self::default();
        body.push(bytes.freeze());
        body
    }

    fn push(&mut self, part: Bytes) {
        if part.is_empty() {
            return;
        }
        self.bytes += part.len();
        if self.first.is_empty() {
            self.first = part;
        } else {
            self.rest.push_back(part);
        }
    }

    /// Splits off the first `bytes` bytes, or everything if fewer are left.
    pub(super) fn split_to(&mut self, bytes: usize) -> Self {
        if bytes >= self.bytes {
            return std::mem::take(self);
        }
        let mut front = Self::default();
        while front.bytes < bytes {
            let of_this_part = self.first.len().min(bytes - front.bytes);
            front.push(self.first.slice(..of_this_part));
            self.advance(of_this_part);
        }
        front
    }
}

impl Buf for RequestBody {
    fn remaining(&self) -> usize {
        self.bytes
    }

    fn chunk(&self) -> &[u8] {
        &self.first
    }

    fn chunks_vectored<'a>(&'a self, into: &mut [IoSlice<'a>]) -> usize {
        let parts = std::iter::once(&self.first).chain(&self.rest);
        let parts = parts.filter(|part| !part.is_empty());
        let slots = into.iter_mut().zip(parts);
        slots.map(|(slot, part)| *slot = IoSlice::new(part)).count()
    }

    fn advance(&mut self, mut bytes: usize) {
        assert!(bytes <= self.bytes, "beyond the end of a body");
        self.bytes -= bytes;
        while bytes > 0 {
            let of_this_part = self.first.len().min(bytes);
            self.first.advance(of_this_part);
            bytes -= of_this_part;
            if self.first.is_empty() {
                self.first = self.rest.pop_front().unwrap_or_default();
            }
        }
    }
}

fn header(len: usize, out: &mut BytesMut) {
    out.put_u8(0);
    // No request comes near 4 GiB, because Pub/Sub's limit is 10 MB.
    out.put_u32(u32::try_from(len).expect("invariant: a request is short"));
}

fn key(number: u32, len: usize, out: &mut BytesMut) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(len as u64, out);
}

#[cfg(test)]
mod tests {
    use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::{PublishRequest, PubsubMessage};
    use proptest::prelude::*;

    use super::*;

    /// Builds a request of Google's own type, with a message for each of these lengths of data. Also returns its
    /// encoded messages.
    fn request(lengths: &[usize]) -> (PublishRequest, Vec<Bytes>) {
        let message = |(n, len): (usize, &usize)| PubsubMessage {
            data: vec![n as u8; *len].into(),
            ordering_key: "k".into(),
            ..PubsubMessage::default()
        };
        let request = PublishRequest {
            topic: "projects/p/topics/t".into(),
            messages: lengths.iter().enumerate().map(message).collect(),
        };
        let encoded = |message: &PubsubMessage| Bytes::from(message.encode_to_vec());
        let messages = request.messages.iter().map(encoded).collect();
        (request, messages)
    }

    /// Takes a body apart piece by piece, and returns all its bytes. `pieces` has the sizes of the pieces. If the body
    /// is longer than all of them together, the sizes repeat.
    fn taken_off(mut body: RequestBody, pieces: &[usize]) -> Vec<u8> {
        let mut all = Vec::new();
        for piece in pieces.iter().cycle() {
            let mut front = body.split_to(*piece);
            assert!(front.remaining() == *piece || body.remaining() == 0);
            let mut slices = [IoSlice::new(&[]); 3];
            let filled = front.chunks_vectored(&mut slices);
            let seen = slices[..filled].iter().flat_map(|slice| slice.iter());
            let seen: Vec<u8> = seen.copied().collect();
            all.extend_from_slice(&seen);
            front.advance(seen.len());
            all.extend(front.copy_to_bytes(front.remaining()));
            if body.remaining() == 0 {
                return all;
            }
        }
        all
    }

    proptest! {
        #[test]
        fn googles_types_decode_our_request_however_it_is_split(
            lengths in prop::collection::vec(prop_oneof![0usize..300, 4_000usize..9_000], 1..12),
            pieces in prop::collection::vec(1usize..10_000, 1..5),
        ) {
            let (request, messages) = request(&lengths);
            for body in [RequestBody::publish(&request.topic, messages.iter()), RequestBody::of(&request)] {
                let bytes = taken_off(body.clone(), &pieces);
                prop_assert_eq!(bytes.len(), body.remaining());
                let (header, message) = bytes.split_at(GRPC_HEADER);
                prop_assert_eq!(header[0], 0);
                prop_assert_eq!(&header[1..], (message.len() as u32).to_be_bytes());
                prop_assert_eq!(&PublishRequest::decode(message).unwrap(), &request);
            }
        }
    }

    #[test]
    fn large_messages_are_not_copied_and_small_ones_share_one_part() {
        let (request, messages) = request(&[10, 20, 30]);
        let body = RequestBody::publish(&request.topic, messages.iter());
        assert!(body.rest.is_empty());
        let (request, messages) = self::request(&[10, 1_000_000, 30]);
        let body = RequestBody::publish(&request.topic, messages.iter());
        assert_eq!(body.rest.len(), 2);
        assert_eq!(body.rest[0].as_ptr(), messages[1].as_ptr());
    }
}
