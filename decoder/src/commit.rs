//! `Commit`: the last message of each transaction.

use crate::error::DecodeError;
use crate::reader::Reader;
use crate::{Lsn, PgTimestamp};

/// Ends a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Commit {
    /// Not used by protocol 1: always 0. Anything else is refused, as PostgreSQL's own subscriber
    /// does.
    pub flags: u8,
    /// Where the commit record starts. Reported as flushed, it has the transaction sent again.
    pub commit_lsn: Lsn,
    /// The first byte after the commit record. Reported as flushed, it covers the transaction.
    pub end_lsn: Lsn,
    /// When it was committed, by the server's clock.
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
    fn commit_flags_are_refused_since_protocol_1_has_none() {
        let mut payload = PAYLOAD.to_vec();
        payload[1] = 0x80;
        let refused = decode(&payload).unwrap_err();
        assert_eq!(
            (refused.offset, refused.fault),
            (1, Fault::UnknownFlags { found: 0x80 })
        );
    }
}
