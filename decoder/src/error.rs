//! Why bytes could not be decoded: in which message, at which byte, what should have been there.
//!
//! An error carries positions and single bytes, never a column's value, so that it can be logged.

use thiserror::Error;

use crate::MessageKind;

/// Bytes that are not a message of `pgoutput` protocol 1, or not a replication frame.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}, byte {offset}: expected {expected}, {fault}")]
pub struct DecodeError {
    /// What was being decoded.
    pub message: MessageKind,
    /// Where, in bytes from the start of the input. At most the input's length.
    pub offset: usize,
    /// What the protocol has at this place, in words.
    pub expected: &'static str,
    /// What was there instead.
    pub fault: Fault,
}

/// What was found instead of what the protocol has there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Fault {
    /// The input ends inside of this field.
    #[error("but {available} of {needed} bytes are left")]
    Truncated {
        /// Bytes that the field takes.
        needed: usize,
        /// Bytes that are left in the input.
        available: usize,
    },
    /// A string without the zero byte that ends it.
    #[error("but no zero byte ends it")]
    UnterminatedString,
    /// A name that is not UTF-8; the offset is that of the first bad byte.
    #[error("but it is not UTF-8")]
    InvalidUtf8,
    /// A count or length below zero.
    #[error("but it is negative ({found})")]
    Negative {
        /// The number on the wire.
        found: i32,
    },
    /// A byte that is none of those allowed here.
    #[error("but found 0x{found:02X}")]
    UnexpectedByte {
        /// The byte on the wire.
        found: u8,
    },
    /// Flag bits that protocol 1 does not define. They could change what the message means.
    #[error("but bits are set that protocol 1 does not define (0x{found:02X})")]
    UnknownFlags {
        /// The flags on the wire.
        found: u8,
    },
    /// A known message that protocol 1 does not have.
    #[error("but the message belongs to protocol {version}")]
    LaterProtocol {
        /// The first protocol version that has it.
        version: u8,
    },
    /// Bytes after the end of the message.
    #[error("but bytes are left over ({count})")]
    TrailingBytes {
        /// How many.
        count: usize,
    },
}

impl DecodeError {
    /// What the operator can do about it, in one sentence.
    pub const fn hint(&self) -> &'static str {
        match self.fault {
            Fault::LaterProtocol { .. } => {
                "start replication with proto_version '1' and without the options streaming and \
                 two_phase"
            }
            Fault::InvalidUtf8 => {
                "set client_encoding to UTF8 on the replication connection; a database in \
                 SQL_ASCII must have names in UTF-8"
            }
            Fault::UnexpectedByte { .. } | Fault::UnknownFlags { .. } => {
                "check that the slot's plugin is pgoutput and that replication was started with \
                 proto_version '1'"
            }
            Fault::Truncated { .. }
            | Fault::UnterminatedString
            | Fault::Negative { .. }
            | Fault::TrailingBytes { .. } => {
                "the message was damaged on its way or does not come from pgoutput: reconnect, so \
                 that the server sends it again, and check the slot's plugin if it comes back"
            }
        }
    }
}
