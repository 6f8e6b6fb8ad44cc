//! `Begin`: the first message of each transaction.

use crate::error::DecodeError;
use crate::reader::Reader;
use crate::{Lsn, PgTimestamp, Xid};

/// Starts a transaction. The server sends only committed transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Begin {
    /// Start of the commit record: the same position as [`Commit::commit_lsn`](crate::Commit).
    pub final_lsn: Lsn,
    /// Commit time, by the server's clock.
    pub commit_time: PgTimestamp,
    /// The id of the transaction.
    pub xid: Xid,
}

impl Begin {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            final_lsn: reader.lsn("the final LSN (8 bytes)")?,
            commit_time: reader.timestamp("the commit time (8 bytes)")?,
            xid: Xid(reader.u32("the transaction id (4 bytes)")?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Message, decode};

    #[test]
    fn begin_has_lsn_time_and_transaction() {
        let payload = b"B\0\0\0\x16\xB3\x74\xD8\x48\0\0\0\0\0\x0F\x42\x40\0\0\x02\xE9";
        let expected = Begin {
            final_lsn: Lsn::new(0x16_B374_D848),
            commit_time: PgTimestamp::from_micros(1_000_000),
            xid: Xid(745),
        };
        assert_eq!(decode(payload), Ok(Message::Begin(expected)));
    }
}
