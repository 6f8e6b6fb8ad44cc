//! `Commit`: the last message of each transaction.

use crate::error::DecodeError;
use crate::reader::Reader;
use crate::{Lsn, PgTimestamp};

/// Ends a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Commit {
    /// Always 0, because protocol 1 defines no flags. We refuse other values, as PostgreSQL's own
    /// subscriber does.
    pub flags: u8,
    /// Start of the commit record. If the client reports only this position as flushed, the server
    /// sends the transaction again after a reconnect.
    pub commit_lsn: Lsn,
    /// The first byte after the commit record. If the client reports this position as flushed, the
    /// transaction is confirmed, and the server never sends it again.
    pub end_lsn: Lsn,
    /// Commit time, by the server's clock.
    pub commit_time: PgTimestamp,
}

impl Commit {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            flags: reader.flags("flags, all of them 0 (1 byte)", 0)?,
            commit_lsn: reader.lsn("the commit LSN (8 bytes)")?,
            end_lsn: reader.lsn("the end LSN (8 bytes)")?,
            commit_time: reader.timestamp("the commit time (8 bytes)")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fault, Message, decode};

    const PAYLOAD: &[u8] = b"C\0\0\0\0\0\0\0\x01\x10\0\0\0\0\0\0\x01\x40\0\0\0\0\0\0\0\x07";

    #[test]
    fn commit_has_both_lsns_and_the_time() {
        let expected = Commit {
            flags: 0,
            commit_lsn: Lsn::new(0x110),
            end_lsn: Lsn::new(0x140),
            commit_time: PgTimestamp::from_micros(7),
        };
        assert_eq!(decode(PAYLOAD), Ok(Message::Commit(expected)));
    }

    #[test]
    fn any_commit_flag_is_refused() {
        let mut payload = PAYLOAD.to_vec();
        payload[1] = 0x80;
        let refused = decode(&payload).unwrap_err();
        assert_eq!(
            (refused.offset, refused.fault),
            (1, Fault::UnknownFlags { found: 0x80 })
        );
    }
}
