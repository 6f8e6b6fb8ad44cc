//! `Delete`: a deleted row.

use crate::error::DecodeError;
use crate::reader::Reader;
use crate::{Oid, OldRow, Tuple};

/// A deleted row of a relation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delete<'a> {
    /// The relation. An earlier [`Relation`](crate::Relation) of the session describes it.
    pub relation: Oid,
    /// The old row, or the part of it that the replica identity includes.
    pub old: OldRow<'a>,
}

impl<'a> Delete<'a> {
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        const OLD: &str = "the mark K or O of an old row (1 byte)";
        let relation = reader.oid("the OID of the relation (4 bytes)")?;
        let old = match reader.u8(OLD)? {
            b'K' => OldRow::Key(Tuple::read(reader)?),
            b'O' => OldRow::Full(Tuple::read(reader)?),
            other => return Err(reader.unexpected(OLD, other)),
        };
        Ok(Self { relation, old })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fault, Message, Value, decode};

    fn old_row(payload: &[u8]) -> OldRow<'_> {
        match decode(payload) {
            Ok(Message::Delete(delete)) => delete.old,
            other => panic!("not a delete: {other:?}"),
        }
    }

    #[test]
    fn a_delete_has_the_key_or_the_whole_row() {
        let OldRow::Key(key) = old_row(b"D\0\0\x40\0K\0\x01t\0\0\0\x01a") else {
            panic!("no key")
        };
        assert_eq!(key.iter().collect::<Vec<_>>(), [Value::Text(b"a")]);
        let OldRow::Full(row) = old_row(b"D\0\0\x40\0O\0\x01n") else {
            panic!("no row")
        };
        assert_eq!(row.iter().collect::<Vec<_>>(), [Value::Null]);
    }

    #[test]
    fn a_new_row_in_a_delete_is_refused() {
        let refused = decode(b"D\0\0\x40\0N\0\0").unwrap_err();
        assert_eq!(
            (refused.offset, refused.fault),
            (5, Fault::UnexpectedByte { found: b'N' })
        );
    }
}
