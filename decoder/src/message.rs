//! A message of `pgoutput` protocol 1. Its tag byte gives its kind.

use crate::error::{DecodeError, Fault};
use crate::reader::Reader;
use crate::{
    Begin, Commit, Delete, Insert, LogicalMessage, MessageKind, Origin, Relation, Truncate, Type,
    Update,
};

/// One message of the stream. It borrows from the decoded payload.
///
/// Source: PostgreSQL manual, "Logical Replication Message Formats".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// Starts a committed transaction.
    Begin(Begin),
    /// Ends a committed transaction.
    Commit(Commit),
    /// Names the server from which the transaction was replicated. Follows Begin, if the transaction
    /// has an origin.
    Origin(Origin<'a>),
    /// Describes a table. The server sends it before changes to that table.
    Relation(Relation<'a>),
    /// Names a data type that is not built into PostgreSQL. The server sends it before a Relation
    /// that uses the type.
    Type(Type<'a>),
    /// A new row.
    Insert(Insert<'a>),
    /// A changed row.
    Update(Update<'a>),
    /// A deleted row.
    Delete(Delete<'a>),
    /// Truncated tables.
    Truncate(Truncate<'a>),
    /// Bytes that an application wrote into the WAL.
    Logical(LogicalMessage<'a>),
}

/// Decodes the payload of one [`XLogData`](crate::frame::Frame::XLogData) frame.
///
/// # Errors
///
/// Fails if the payload is not exactly one well-formed message of protocol 1. An error about a
/// message of a later protocol names that message. Offsets in errors count from the start of
/// `payload`.
#[inline]
pub fn decode(payload: &[u8]) -> Result<Message<'_>, DecodeError> {
    let mut reader = Reader::new(MessageKind::UnidentifiedMessage, payload);
    let tag = reader.u8(TAG)?;
    let Some(kind) = MessageKind::of_message_tag(tag) else {
        return Err(reader.unexpected(TAG, tag));
    };
    let mut reader = reader.within(kind);
    let message = match kind {
        MessageKind::Insert => Message::Insert(Insert::read(&mut reader)?),
        MessageKind::Begin => Message::Begin(Begin::read(&mut reader)?),
        MessageKind::Commit => Message::Commit(Commit::read(&mut reader)?),
        MessageKind::Origin => Message::Origin(Origin::read(&mut reader)?),
        MessageKind::Relation => Message::Relation(Relation::read(&mut reader)?),
        MessageKind::Type => Message::Type(Type::read(&mut reader)?),
        MessageKind::Update => Message::Update(Update::read(&mut reader)?),
        MessageKind::Delete => Message::Delete(Delete::read(&mut reader)?),
        MessageKind::Truncate => Message::Truncate(Truncate::read(&mut reader)?),
        MessageKind::LogicalMessage => Message::Logical(LogicalMessage::read(&mut reader)?),
        MessageKind::StreamStart
        | MessageKind::StreamStop
        | MessageKind::StreamCommit
        | MessageKind::StreamAbort
        | MessageKind::BeginPrepare
        | MessageKind::Prepare
        | MessageKind::CommitPrepared
        | MessageKind::RollbackPrepared
        | MessageKind::StreamPrepare
        | MessageKind::XLogData
        | MessageKind::Keepalive
        | MessageKind::UnidentifiedMessage
        | MessageKind::UnidentifiedFrame => return Err(later_protocol(kind)),
    };
    reader.finish()?;
    Ok(message)
}

const TAG: &str = "the tag of a protocol 1 message (1 byte)";

#[cold]
fn later_protocol(message: MessageKind) -> DecodeError {
    let version = message.protocol_version().unwrap_or(u8::MAX);
    DecodeError {
        message,
        offset: 0,
        expected: TAG,
        fault: Fault::LaterProtocol { version },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_later_protocols_are_refused_by_name() {
        for (tag, name, protocol) in [
            (b'S', "Stream Start message", 2),
            (b'E', "Stream Stop message", 2),
            (b'c', "Stream Commit message", 2),
            (b'A', "Stream Abort message", 2),
            (b'b', "Begin Prepare message", 3),
            (b'P', "Prepare message", 3),
            (b'K', "Commit Prepared message", 3),
            (b'r', "Rollback Prepared message", 3),
            (b'p', "Stream Prepare message", 3),
        ] {
            let refused = decode(&[tag, 0, 0]).unwrap_err();
            assert_eq!(refused.message.name(), name);
            assert_eq!(refused.fault, Fault::LaterProtocol { version: protocol });
            assert!(refused.hint().contains("proto_version '1'"));
            assert!(
                refused
                    .to_string()
                    .ends_with(&format!("belongs to protocol {protocol}"))
            );
        }
    }

    #[test]
    fn an_unknown_tag_byte_is_refused_and_shown() {
        for tag in (0..=u8::MAX).filter(|&tag| MessageKind::of_message_tag(tag).is_none()) {
            let refused = decode(&[tag]).unwrap_err();
            assert_eq!(refused.message, MessageKind::UnidentifiedMessage);
            assert_eq!(refused.fault, Fault::UnexpectedByte { found: tag });
            assert_eq!(refused.offset, 0);
        }
    }

    #[test]
    fn an_empty_payload_is_refused() {
        let refused = decode(&[]).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "pgoutput message, byte 0: expected the tag of a protocol 1 message (1 byte), but 0 of \
             1 bytes are left"
        );
    }
}
