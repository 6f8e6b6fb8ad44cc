//! Decoding errors. An error says which message could not be decoded, at which position, and what
//! the protocol expects there.
//!
//! An error contains positions and single bytes, never the value of a column, so it is safe to log.

use thiserror::Error;

use crate::MessageKind;

/// The error for bytes that are neither a message of `pgoutput` protocol 1 nor a replication frame.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}, byte {offset}: expected {expected}, {fault}")]
pub struct DecodeError {
    /// The message that was being decoded.
    pub message: MessageKind,
    /// Position in bytes from the start of the input. At most the input's length.
    pub offset: usize,
    /// What the protocol expects at this position, in words.
    pub expected: &'static str,
    /// How the bytes differ from the expected content.
    pub fault: Fault,
}

/// How bytes can differ from the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Fault {
    /// The input ends within this field.
    #[error("but {available} of {needed} bytes are left")]
    Truncated {
        /// Number of bytes that the field needs.
        needed: usize,
        /// Number of bytes left in the input.
        available: usize,
    },
    /// A string has no terminating zero byte.
    #[error("but the terminating zero byte is missing")]
    UnterminatedString,
    /// A name is not UTF-8. The error's offset is the position of the first invalid byte.
    #[error("but it is not UTF-8")]
    InvalidUtf8,
    /// A count or a length is negative.
    #[error("but it is negative ({found})")]
    Negative {
        /// The number on the wire.
        found: i32,
    },
    /// A byte has a value that is not allowed at this position.
    #[error("but found 0x{found:02X}")]
    UnexpectedByte {
        /// The byte on the wire.
        found: u8,
    },
    /// Flag bits are set that protocol 1 does not define. They could change the meaning of the
    /// message.
    #[error("but bits are set that protocol 1 does not define (0x{found:02X})")]
    UnknownFlags {
        /// The flags on the wire.
        found: u8,
    },
    /// The message is known, but belongs to a later protocol version.
    #[error("but the message belongs to protocol {version}")]
    LaterProtocol {
        /// The first protocol version that has the message.
        version: u8,
    },
    /// Bytes follow the end of the message.
    #[error("but bytes are left over ({count})")]
    TrailingBytes {
        /// The number of bytes.
        count: usize,
    },
}

impl DecodeError {
    /// What the operator can do about the error, in one sentence.
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
                "the message was damaged in transit or does not come from pgoutput: reconnect, so \
                 that the server sends it again; if the error recurs, check the slot's plugin"
            }
        }
    }
}
