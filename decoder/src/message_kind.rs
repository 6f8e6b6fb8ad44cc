//! The names and tag bytes of everything that a walsender can send while it streams.
//!
//! Messages of later protocol versions have a name here, although the crate does not decode them. So
//! if a stream was started with the wrong options, the error names the message instead of a byte.

use std::fmt;

/// The kind of the decoded input: a `pgoutput` message or a replication frame. The last two variants stand for
/// input without a known tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(
    missing_docs,
    reason = "the variants are the manual's names of the messages"
)]
pub enum MessageKind {
    Begin,
    Commit,
    Origin,
    Relation,
    Type,
    Insert,
    Update,
    Delete,
    Truncate,
    LogicalMessage,
    StreamStart,
    StreamStop,
    StreamCommit,
    StreamAbort,
    BeginPrepare,
    Prepare,
    CommitPrepared,
    RollbackPrepared,
    StreamPrepare,
    XLogData,
    Keepalive,
    /// A `pgoutput` message whose tag is missing or unknown.
    UnidentifiedMessage,
    /// A replication frame whose tag is missing or unknown.
    UnidentifiedFrame,
}

impl MessageKind {
    /// Returns the `pgoutput` message that starts with `tag`, in any protocol version.
    pub const fn of_message_tag(tag: u8) -> Option<Self> {
        Some(match tag {
            b'B' => Self::Begin,
            b'C' => Self::Commit,
            b'O' => Self::Origin,
            b'R' => Self::Relation,
            b'Y' => Self::Type,
            b'I' => Self::Insert,
            b'U' => Self::Update,
            b'D' => Self::Delete,
            b'T' => Self::Truncate,
            b'M' => Self::LogicalMessage,
            b'S' => Self::StreamStart,
            b'E' => Self::StreamStop,
            b'c' => Self::StreamCommit,
            b'A' => Self::StreamAbort,
            b'b' => Self::BeginPrepare,
            b'P' => Self::Prepare,
            b'K' => Self::CommitPrepared,
            b'r' => Self::RollbackPrepared,
            b'p' => Self::StreamPrepare,
            _ => return None,
        })
    }

    /// The name that the PostgreSQL manual uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Begin => "Begin message",
            Self::Commit => "Commit message",
            Self::Origin => "Origin message",
            Self::Relation => "Relation message",
            Self::Type => "Type message",
            Self::Insert => "Insert message",
            Self::Update => "Update message",
            Self::Delete => "Delete message",
            Self::Truncate => "Truncate message",
            Self::LogicalMessage => "logical decoding Message",
            Self::StreamStart => "Stream Start message",
            Self::StreamStop => "Stream Stop message",
            Self::StreamCommit => "Stream Commit message",
            Self::StreamAbort => "Stream Abort message",
            Self::BeginPrepare => "Begin Prepare message",
            Self::Prepare => "Prepare message",
            Self::CommitPrepared => "Commit Prepared message",
            Self::RollbackPrepared => "Rollback Prepared message",
            Self::StreamPrepare => "Stream Prepare message",
            Self::XLogData => "XLogData frame",
            Self::Keepalive => "primary keepalive frame",
            Self::UnidentifiedMessage => "pgoutput message",
            Self::UnidentifiedFrame => "replication frame",
        }
    }

    /// The lowest `proto_version` with which the server can send this message. `None` for frames,
    /// which have no version, and for unidentified messages.
    pub const fn protocol_version(self) -> Option<u8> {
        match self {
            Self::Begin
            | Self::Commit
            | Self::Origin
            | Self::Relation
            | Self::Type
            | Self::Insert
            | Self::Update
            | Self::Delete
            | Self::Truncate
            | Self::LogicalMessage => Some(1),
            Self::StreamStart | Self::StreamStop | Self::StreamCommit | Self::StreamAbort => {
                Some(2)
            }
            Self::BeginPrepare
            | Self::Prepare
            | Self::CommitPrepared
            | Self::RollbackPrepared
            | Self::StreamPrepare => Some(3),
            Self::XLogData
            | Self::Keepalive
            | Self::UnidentifiedMessage
            | Self::UnidentifiedFrame => None,
        }
    }
}

impl fmt::Display for MessageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
