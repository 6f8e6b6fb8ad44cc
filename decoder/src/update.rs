//! `Update`: a changed row, and the parts of the old row that the server sends.

use crate::error::DecodeError;
use crate::reader::Reader;
use crate::{Oid, Tuple};

/// A changed row in a relation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Update<'a> {
    /// The relation. An earlier [`Relation`](crate::Relation) of the session describes it.
    pub relation: Oid,
    /// The row before the update. The server sends it if the replica identity is full or the update
    /// changed the key.
    pub old: Option<OldRow<'a>>,
    /// The row after the update. Large values that did not change are
    /// [`UnchangedToast`](crate::Value::UnchangedToast).
    pub new: Tuple<'a>,
}

/// The parts of the old row that the replica identity includes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OldRow<'a> {
    /// The columns of the key. All other columns are NULL here, even if they had a value.
    Key(Tuple<'a>),
    /// All columns (`REPLICA IDENTITY FULL`).
    Full(Tuple<'a>),
}

impl<'a> Update<'a> {
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        const OLD_OR_NEW: &str = "the mark K, O or N of an old or new row (1 byte)";
        const NEW: &str = "the mark N of a new row (1 byte)";
        let relation = reader.oid("the OID of the relation (4 bytes)")?;
        let old = match reader.u8(OLD_OR_NEW)? {
            b'N' => {
                return Ok(Self {
                    relation,
                    old: None,
                    new: Tuple::read(reader)?,
                });
            }
            b'K' => OldRow::Key(Tuple::read(reader)?),
            b'O' => OldRow::Full(Tuple::read(reader)?),
            other => return Err(reader.unexpected(OLD_OR_NEW, other)),
        };
        match reader.u8(NEW)? {
            b'N' => Ok(Self {
                relation,
                old: Some(old),
                new: Tuple::read(reader)?,
            }),
            other => Err(reader.unexpected(NEW, other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fault, Message, Value, decode};

    fn update(payload: &[u8]) -> Update<'_> {
        match decode(payload) {
            Ok(Message::Update(update)) => update,
            other => panic!("not an update: {other:?}"),
        }
    }

    #[test]
    fn an_update_without_a_key_change_has_only_the_new_row() {
        let update = update(b"U\0\0\x40\0N\0\x01t\0\0\0\x01b");
        assert_eq!((update.relation, update.old), (Oid(16_384), None));
        assert_eq!(update.new.iter().collect::<Vec<_>>(), [Value::Text(b"b")]);
    }

    #[test]
    fn an_update_of_the_key_has_the_old_key() {
        let update = update(b"U\0\0\x40\0K\0\x01t\0\0\0\x01aN\0\x01t\0\0\0\x01b");
        let Some(OldRow::Key(key)) = update.old else {
            panic!("no key")
        };
        assert_eq!(key.iter().collect::<Vec<_>>(), [Value::Text(b"a")]);
        assert_eq!(update.new.iter().collect::<Vec<_>>(), [Value::Text(b"b")]);
    }

    #[test]
    fn an_update_with_full_identity_has_the_whole_old_row() {
        let update = update(b"U\0\0\x40\0O\0\x01nN\0\x01u");
        let Some(OldRow::Full(row)) = update.old else {
            panic!("no old row")
        };
        assert_eq!(row.iter().collect::<Vec<_>>(), [Value::Null]);
        assert_eq!(
            update.new.iter().collect::<Vec<_>>(),
            [Value::UnchangedToast]
        );
    }

    #[test]
    fn an_update_with_two_old_rows_or_an_unknown_mark_is_refused() {
        let two = decode(b"U\0\0\x40\0K\0\0O\0\0N\0\0").unwrap_err();
        assert_eq!(
            (two.offset, two.fault),
            (8, Fault::UnexpectedByte { found: b'O' })
        );
        let unknown = decode(b"U\0\0\x40\0X\0\0").unwrap_err();
        assert_eq!(
            (unknown.offset, unknown.fault),
            (5, Fault::UnexpectedByte { found: b'X' })
        );
    }
}
