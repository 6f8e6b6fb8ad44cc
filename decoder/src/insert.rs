//! `Insert`: a new row.

use crate::error::DecodeError;
use crate::reader::Reader;
use crate::{Oid, Tuple};

/// A new row in a relation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Insert<'a> {
    /// The relation. An earlier [`Relation`](crate::Relation) of the session describes it.
    pub relation: Oid,
    /// The new row.
    pub tuple: Tuple<'a>,
}

impl<'a> Insert<'a> {
    #[inline]
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        const NEW: &str = "the mark N of a new row (1 byte)";
        let relation = reader.oid("the OID of the relation (4 bytes)")?;
        match reader.u8(NEW)? {
            b'N' => Ok(Self {
                relation,
                tuple: Tuple::read(reader)?,
            }),
            other => Err(reader.unexpected(NEW, other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fault, Message, Value, decode};

    #[test]
    fn an_insert_has_a_relation_and_a_row() {
        let Ok(Message::Insert(insert)) = decode(b"I\0\0\x40\0N\0\x02t\0\0\0\x017n") else {
            panic!("not an insert")
        };
        assert_eq!(insert.relation, Oid(16_384));
        assert_eq!(
            insert.tuple.iter().collect::<Vec<_>>(),
            [Value::Text(b"7"), Value::Null]
        );
    }

    #[test]
    fn values_point_into_the_payload() {
        let payload = b"I\0\0\x40\0N\0\x01t\0\0\0\x03abc";
        let Ok(Message::Insert(insert)) = decode(payload) else {
            panic!("not an insert")
        };
        let Some(Value::Text(text)) = insert.tuple.iter().next() else {
            panic!("not a text")
        };
        assert!(std::ptr::eq(text, &payload[13..16]));
    }

    #[test]
    fn an_old_row_in_an_insert_is_refused() {
        let refused = decode(b"I\0\0\x40\0K\0\x01n").unwrap_err();
        assert_eq!(
            (refused.offset, refused.fault),
            (5, Fault::UnexpectedByte { found: b'K' })
        );
    }

    #[test]
    fn bytes_after_the_row_are_refused() {
        let refused = decode(b"I\0\0\x40\0N\0\x01nn").unwrap_err();
        assert_eq!(
            (refused.offset, refused.fault),
            (9, Fault::TrailingBytes { count: 1 })
        );
    }
}
