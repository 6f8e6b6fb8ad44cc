//! Frames of the streaming replication protocol, which are the bodies of `CopyData` messages.
//!
//! Not here: the `CopyData` envelope around a frame (its tag `d` and its length). The code that owns
//! the connection adds and removes the envelope.
//!
//! Source: PostgreSQL manual, "Streaming Replication Protocol", `START_REPLICATION`.

use bytes::{BufMut, BytesMut};

use crate::error::DecodeError;
use crate::reader::Reader;
use crate::{Lsn, MessageKind, PgTimestamp};

/// A frame from the server. It is the body of one `CopyData` message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame<'a> {
    /// A piece of the stream. With `pgoutput` it is exactly one message.
    XLogData {
        /// Position of the message in the WAL; 0/0 for a message without a position, such as Relation and
        /// Type. These positions do not always increase from one transaction to the next, so they must not be
        /// used to confirm or to skip changes.
        wal_start: Lsn,
        /// The server's position in the WAL. With logical decoding it is the same as `wal_start`.
        wal_end: Lsn,
        /// Send time, by the server's clock.
        sent_at: PgTimestamp,
        /// One message, to be decoded with [`decode`](crate::decode).
        payload: &'a [u8],
    },
    /// A heartbeat of the server.
    Keepalive {
        /// The position up to which the server has read the WAL. The server has sent every transaction that
        /// committed before this position.
        wal_end: Lsn,
        /// Send time, by the server's clock.
        sent_at: PgTimestamp,
        /// Whether the server wants a [`StandbyStatus`] now. A server that gets none ends the session
        /// after `wal_sender_timeout`.
        reply_requested: bool,
    },
}

/// Decodes the body of one `CopyData` message from the server.
///
/// # Errors
///
/// Fails if the body is not a well-formed frame. The payload of WAL data is not decoded, so an
/// invalid payload is no error here.
#[inline]
pub fn decode_frame(body: &[u8]) -> Result<Frame<'_>, DecodeError> {
    const TAG: &str = "the tag w or k of a frame (1 byte)";
    let mut reader = Reader::new(MessageKind::UnidentifiedFrame, body);
    match reader.u8(TAG)? {
        b'w' => read_xlog_data(reader.within(MessageKind::XLogData)),
        b'k' => read_keepalive(reader.within(MessageKind::Keepalive)),
        other => Err(reader.unexpected(TAG, other)),
    }
}

#[inline]
fn read_xlog_data(mut reader: Reader<'_>) -> Result<Frame<'_>, DecodeError> {
    Ok(Frame::XLogData {
        wal_start: reader.lsn("the start of the data in the WAL (8 bytes)")?,
        wal_end: reader.lsn("the end of the WAL on the server (8 bytes)")?,
        sent_at: reader.timestamp("the server's clock (8 bytes)")?,
        payload: reader.rest(),
    })
}

fn read_keepalive(mut reader: Reader<'_>) -> Result<Frame<'_>, DecodeError> {
    const REPLY: &str = "whether a reply is requested, 0 or 1 (1 byte)";
    let frame = Frame::Keepalive {
        wal_end: reader.lsn("the end of the WAL on the server (8 bytes)")?,
        sent_at: reader.timestamp("the server's clock (8 bytes)")?,
        reply_requested: reader.flags(REPLY, 1)? == 1,
    };
    reader.finish()?;
    Ok(frame)
}

/// The client's report of its progress. The server moves the slot's `confirmed_flush_lsn` to `flushed`. From
/// then on, the server sends no transaction that ends at `flushed` or earlier, and can remove the WAL that
/// only such transactions need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StandbyStatus {
    /// The position up to which the client has received everything.
    pub written: Lsn,
    /// The position up to which everything is durable. Only this field moves the slot's confirmed
    /// position.
    pub flushed: Lsn,
    /// The position up to which everything is applied. `pg_stat_replication` shows it, and
    /// `synchronous_commit = remote_apply` waits for it.
    pub applied: Lsn,
    /// Send time, by the client's clock.
    pub sent_at: PgTimestamp,
    /// Whether the client wants a keepalive at once, to find out whether the server is alive.
    pub reply_requested: bool,
}

impl StandbyStatus {
    /// Length of the encoded form in bytes.
    pub const ENCODED_LEN: usize = 1 + 8 + 8 + 8 + 8 + 1;

    /// Encodes the status message as the body of a `CopyData` message, and appends it to `buffer`.
    pub fn encode(&self, buffer: &mut BytesMut) {
        buffer.reserve(Self::ENCODED_LEN);
        buffer.put_u8(b'r');
        buffer.put_u64(self.written.as_u64());
        buffer.put_u64(self.flushed.as_u64());
        buffer.put_u64(self.applied.as_u64());
        buffer.put_i64(self.sent_at.as_micros());
        buffer.put_u8(self.reply_requested.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fault;

    #[test]
    fn a_wal_data_frame_carries_one_payload() {
        let body = b"w\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\0\x03payload";
        let expected = Frame::XLogData {
            wal_start: Lsn::new(0x100),
            wal_end: Lsn::new(0x200),
            sent_at: PgTimestamp::from_micros(3),
            payload: b"payload",
        };
        assert_eq!(decode_frame(body), Ok(expected));
    }

    #[test]
    fn a_keepalive_says_whether_it_wants_a_reply() {
        for (byte, reply_requested) in [(0, false), (1, true)] {
            let body = [b"k\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\0\x03".as_slice(), &[byte]].concat();
            let expected = Frame::Keepalive {
                wal_end: Lsn::new(0x200),
                sent_at: PgTimestamp::from_micros(3),
                reply_requested,
            };
            assert_eq!(decode_frame(&body), Ok(expected));
        }
    }

    #[test]
    fn a_truncated_frame_is_refused_by_name() {
        let refused = decode_frame(b"w\0\0\0").unwrap_err();
        assert_eq!(
            (refused.message, refused.offset),
            (MessageKind::XLogData, 1)
        );
        assert_eq!(
            refused.fault,
            Fault::Truncated {
                needed: 8,
                available: 3
            }
        );
        let refused = decode_frame(b"k").unwrap_err();
        assert_eq!(refused.message, MessageKind::Keepalive);
        assert_eq!(
            decode_frame(b"").unwrap_err().message,
            MessageKind::UnidentifiedFrame
        );
    }

    #[test]
    fn bytes_after_a_keepalive_are_refused() {
        let refused = decode_frame(b"k\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0!").unwrap_err();
        assert_eq!(
            (refused.offset, refused.fault),
            (18, Fault::TrailingBytes { count: 1 })
        );
    }

    #[test]
    fn an_unknown_frame_is_refused_by_its_tag() {
        let refused = decode_frame(b"s").unwrap_err();
        assert_eq!(
            (refused.offset, refused.fault),
            (0, Fault::UnexpectedByte { found: b's' })
        );
    }

    #[test]
    fn a_status_is_encoded_as_in_the_manual() {
        let status = StandbyStatus {
            written: Lsn::new(0x0102_0304_0506_0708),
            flushed: Lsn::new(2),
            applied: Lsn::new(3),
            sent_at: PgTimestamp::from_micros(-1),
            reply_requested: true,
        };
        let mut buffer = BytesMut::new();
        status.encode(&mut buffer);
        assert_eq!(buffer.len(), StandbyStatus::ENCODED_LEN);
        assert_eq!(
            &buffer[..],
            b"r\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x03\
              \xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01"
        );
    }
}
