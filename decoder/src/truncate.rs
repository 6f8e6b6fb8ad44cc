//! `Truncate`: the tables that one TRUNCATE statement emptied.

use std::iter::FusedIterator;

use crate::Oid;
use crate::error::DecodeError;
use crate::reader::Reader;

/// The published relations that a TRUNCATE emptied. The statement named them, or reached them
/// through `CASCADE` or as child tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncate<'a> {
    /// Whether the statement contained `CASCADE`.
    pub cascade: bool,
    /// Whether the statement contained `RESTART IDENTITY`.
    pub restart_identity: bool,
    /// The emptied relations.
    pub relations: RelationOids<'a>,
}

/// The OIDs of the relations of a [`Truncate`]. They are parsed during iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelationOids<'a> {
    oids: &'a [[u8; 4]],
}

impl<'a> Truncate<'a> {
    const CASCADE: u8 = 1;
    const RESTART_IDENTITY: u8 = 2;

    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let count = reader.length("the number of relations (4 bytes)")?;
        let defined = Self::CASCADE | Self::RESTART_IDENTITY;
        let options = reader.flags("the options of a truncate (1 byte)", defined)?;
        Ok(Self {
            cascade: options & Self::CASCADE != 0,
            restart_identity: options & Self::RESTART_IDENTITY != 0,
            relations: RelationOids::read(reader, count)?,
        })
    }
}

impl<'a> RelationOids<'a> {
    /// Reads `count` OIDs from `reader`.
    fn read(reader: &mut Reader<'a>, count: usize) -> Result<Self, DecodeError> {
        let bytes = reader.bytes(
            "as many OIDs as announced (4 bytes each)",
            count.saturating_mul(4),
        )?;
        let (oids, _) = bytes.as_chunks();
        Ok(Self { oids })
    }

    /// Number of truncated relations.
    pub fn len(&self) -> usize {
        self.oids.len()
    }

    /// Whether there are no relations. The decoder accepts such a message, but the server has no reason
    /// to send one.
    pub fn is_empty(&self) -> bool {
        self.oids.is_empty()
    }

    /// Iterates over the relations in the order of the message.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Oid> + FusedIterator + use<'a> {
        self.oids.iter().map(|&oid| Oid(u32::from_be_bytes(oid)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fault, Message, decode};

    fn truncate(payload: &[u8]) -> Truncate<'_> {
        match decode(payload) {
            Ok(Message::Truncate(truncate)) => truncate,
            other => panic!("not a truncate: {other:?}"),
        }
    }

    #[test]
    fn a_truncate_lists_all_its_relations() {
        let truncate = truncate(b"T\0\0\0\x02\0\0\0\x40\0\0\0\x40\x01");
        let oids: Vec<Oid> = truncate.relations.iter().collect();
        assert_eq!(oids, [Oid(16_384), Oid(16_385)]);
        assert!(!truncate.cascade && !truncate.restart_identity);
    }

    #[test]
    fn each_combination_of_options_is_decoded() {
        for (options, cascade, restart_identity) in [
            (0, false, false),
            (1, true, false),
            (2, false, true),
            (3, true, true),
        ] {
            let payload = [b'T', 0, 0, 0, 0, options];
            let truncate = truncate(&payload);
            assert_eq!(
                (truncate.cascade, truncate.restart_identity),
                (cascade, restart_identity)
            );
            assert!(truncate.relations.is_empty());
        }
    }

    #[test]
    fn a_relation_count_beyond_the_input_is_refused() {
        let refused = decode(b"T\x7F\xFF\xFF\xFF\0\0\0\0\x01").unwrap_err();
        assert_eq!(refused.offset, 6);
        assert_eq!(
            refused.fault,
            Fault::Truncated {
                needed: 0x7FFF_FFFF * 4,
                available: 4
            }
        );
        let refused = decode(b"T\xFF\xFF\xFF\xFF\0").unwrap_err();
        assert_eq!(
            (refused.offset, refused.fault),
            (1, Fault::Negative { found: -1 })
        );
    }
}
