//! The wire form of `Publish`: a topic and ready-made messages out, their ids in.
//!
//! Source: google/pubsub/v1/pubsub.proto, `PublishRequest { string topic = 1; repeated
//! PubsubMessage messages = 2; }`.

use bytes::BufMut;
use prost::encoding::{WireType, encode_key, encode_varint};
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, EncodeBuf, Encoder};
use tonic_prost::ProstDecoder;

use super::{MessageIds, PublishRequest};

const TOPIC: u32 = 1;
const MESSAGES: u32 = 2;

/// Tag and length of a field, at most.
const FRAMING: usize = 6;

/// What precedes each message of gRPC: a flag and its length.
const GRPC_HEADER: usize = 5;

/// What an answer may need for each of its ids: 19 digits with their framing, and some to spare.
const ID: usize = 24;

/// Knows how large one request and its answer are, so that each has a buffer of its size. The
/// usual ones, of 8 KiB each, cost a small request more than all else that the allocator does.
#[derive(Debug, Clone, Copy)]
pub(super) struct PublishCodec {
    request_bytes: usize,
    answer_bytes: usize,
}

impl PublishCodec {
    pub(super) fn new(request: &PublishRequest) -> Self {
        let messages = request
            .messages
            .iter()
            .map(|message| message.len() + FRAMING);
        Self {
            request_bytes: GRPC_HEADER + request.topic.len() + FRAMING + messages.sum::<usize>(),
            answer_bytes: GRPC_HEADER + request.messages.len() * ID,
        }
    }
}

/// A buffer of `bytes`, sent when it is complete.
fn buffer(bytes: usize) -> BufferSettings {
    BufferSettings::new(bytes, bytes)
}

impl Codec for PublishCodec {
    type Encode = PublishRequest;
    type Decode = MessageIds;
    type Encoder = PublishEncoder;
    type Decoder = ProstDecoder<MessageIds>;

    fn encoder(&mut self) -> PublishEncoder {
        PublishEncoder {
            bytes: self.request_bytes,
        }
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::new(buffer(self.answer_bytes))
    }
}

#[derive(Debug)]
pub(super) struct PublishEncoder {
    bytes: usize,
}

impl Encoder for PublishEncoder {
    type Item = PublishRequest;
    type Error = Status;

    fn encode(&mut self, request: PublishRequest, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        encode(&request, out);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffer(self.bytes)
    }
}

fn encode(request: &PublishRequest, out: &mut impl BufMut) {
    field(TOPIC, request.topic.as_bytes(), out);
    for message in &request.messages {
        field(MESSAGES, message, out);
    }
}

fn field(number: u32, bytes: &[u8], out: &mut impl BufMut) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.put_slice(bytes);
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use googleapis_tonic_google_pubsub_v1::google::pubsub::v1 as pubsub;
    use prost::Message;

    use super::*;

    #[test]
    fn the_service_reads_what_we_write() {
        let messages: Vec<pubsub::PubsubMessage> = (0..3)
            .map(|n| pubsub::PubsubMessage {
                data: vec![n; 300].into(),
                ordering_key: "k".into(),
                ..Default::default()
            })
            .collect();
        let request = PublishRequest {
            topic: "projects/p/topics/t".into(),
            messages: messages
                .iter()
                .map(|m| Bytes::from(m.encode_to_vec()))
                .collect(),
        };
        let mut bytes = Vec::new();
        encode(&request, &mut bytes);
        let read = pubsub::PublishRequest::decode(bytes.as_slice()).unwrap();
        assert_eq!(
            read,
            pubsub::PublishRequest {
                topic: "projects/p/topics/t".into(),
                messages
            }
        );
    }
}
