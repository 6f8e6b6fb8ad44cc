//! `Message`: bytes that an application wrote into the WAL with `pg_logical_emit_message`.
//!
//! The type is called `LogicalMessage`, because everything in the stream is called a message.

use crate::Lsn;
use crate::error::DecodeError;
use crate::reader::Reader;

/// Bytes from an application. The server sends them only if the stream was started with
/// `messages 'true'`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogicalMessage<'a> {
    /// Whether the message belongs to the transaction that wrote it. If not, the server sends the
    /// message between transactions, even if the transaction that wrote it is rolled back.
    pub is_transactional: bool,
    /// Position of the message in the WAL.
    pub lsn: Lsn,
    /// The prefix by which an application recognises its own messages.
    pub prefix: &'a str,
    /// The bytes that the application wrote.
    pub content: &'a [u8],
}

impl<'a> LogicalMessage<'a> {
    const TRANSACTIONAL: u8 = 1;

    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let flags = reader.flags("the flags of the message (1 byte)", Self::TRANSACTIONAL)?;
        let lsn = reader.lsn("the LSN of the message (8 bytes)")?;
        let prefix = reader.string("the prefix of the message (string)")?;
        let length = reader.length("the length of the content (4 bytes)")?;
        let content = reader.bytes("content of the length announced", length)?;
        Ok(Self {
            is_transactional: flags == Self::TRANSACTIONAL,
            lsn,
            prefix,
            content,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fault, Message, decode};

    #[test]
    fn a_logical_message_has_prefix_and_content() {
        let expected = LogicalMessage {
            is_transactional: true,
            lsn: Lsn::new(0x1_0000_00A8),
            prefix: "app",
            content: b"\0\xFF",
        };
        let payload = b"M\x01\0\0\0\x01\0\0\0\xA8app\0\0\0\0\x02\0\xFF";
        assert_eq!(decode(payload), Ok(Message::Logical(expected)));
    }

    #[test]
    fn a_non_transactional_message_is_recognised() {
        let payload = b"M\0\0\0\0\x01\0\0\0\xA8\0\0\0\0\0";
        let Ok(Message::Logical(message)) = decode(payload) else {
            panic!("not a message")
        };
        assert!(!message.is_transactional);
        assert_eq!((message.prefix, message.content), ("", b"".as_slice()));
    }

    #[test]
    fn content_beyond_the_end_is_refused() {
        let refused = decode(b"M\0\0\0\0\x01\0\0\0\xA8\0\x7F\0\0\0").unwrap_err();
        assert_eq!(refused.offset, 15);
        assert_eq!(
            refused.fault,
            Fault::Truncated {
                needed: 0x7F00_0000,
                available: 0
            }
        );
    }
}
