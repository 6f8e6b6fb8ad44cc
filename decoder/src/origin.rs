//! `Origin`: the server from which a transaction was replicated.

use crate::Lsn;
use crate::error::DecodeError;
use crate::reader::Reader;

/// The origin of a transaction. The server sends it after Begin, if the session that wrote the
/// transaction had a replication origin (`pg_replication_origin_session_setup`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin<'a> {
    /// Position of the commit on the origin. It must never be mixed with positions of this server.
    pub commit_lsn: Lsn,
    /// The name of the origin.
    pub name: &'a str,
}

impl<'a> Origin<'a> {
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(Self {
            commit_lsn: reader.lsn("the commit LSN on the origin (8 bytes)")?,
            name: reader.string("the name of the origin (string)")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Message, decode};

    #[test]
    fn origin_has_a_position_and_a_name() {
        let expected = Origin {
            commit_lsn: Lsn::new(0x2_0000_0001),
            name: "west",
        };
        assert_eq!(
            decode(b"O\0\0\0\x02\0\0\0\x01west\0"),
            Ok(Message::Origin(expected))
        );
    }
}
