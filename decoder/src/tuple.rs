//! `TupleData`: the columns of one row, in Insert, Update and Delete.
//!
//! This is the hot path of the crate. Each row is traversed twice: once to check it during
//! decoding, and once to read its values. Neither traversal allocates.

use std::iter::FusedIterator;

use crate::MessageKind;
use crate::error::DecodeError;
use crate::reader::Reader;

/// The columns of one row, in the same order as in the row's [`Relation`](crate::Relation).
///
/// This type does not check that the number of columns is the same as in the relation, so the
/// caller must compare them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuple<'a> {
    columns: u16,
    body: &'a [u8],
}

/// The value of one column in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// SQL's NULL.
    Null,
    /// A large value that an UPDATE did not change. The server does not send such a value, so it is unknown here.
    UnchangedToast,
    /// The text form of the value, as `SELECT` would print it, in the client encoding.
    Text(&'a [u8]),
    /// The output of the type's binary send function. The server sends it only if the stream was
    /// started with `binary 'true'`, and only for types that have such a function.
    Binary(&'a [u8]),
}

impl<'a> Tuple<'a> {
    /// Reads a row from `reader` and checks each of its columns.
    #[inline]
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let columns = reader.column_count("the number of columns (2 bytes)")?;
        let start = reader.rest();
        for _ in 0..columns {
            Value::read(reader)?;
        }
        Ok(Self {
            columns,
            body: &start[..start.len() - reader.rest().len()],
        })
    }

    /// Number of columns in the row.
    pub fn len(&self) -> usize {
        self.columns.into()
    }

    /// Whether the row has no columns.
    pub fn is_empty(&self) -> bool {
        self.columns == 0
    }

    /// Iterates over the values in the order of the columns.
    #[inline]
    pub fn iter(&self) -> Values<'a> {
        Values {
            remaining: self.columns,
            reader: Reader::new(MessageKind::Insert, self.body),
        }
    }
}

impl<'a> IntoIterator for Tuple<'a> {
    type Item = Value<'a>;
    type IntoIter = Values<'a>;

    fn into_iter(self) -> Values<'a> {
        self.iter()
    }
}

impl<'a> IntoIterator for &Tuple<'a> {
    type Item = Value<'a>;
    type IntoIter = Values<'a>;

    fn into_iter(self) -> Values<'a> {
        self.iter()
    }
}

impl<'a> Value<'a> {
    #[inline]
    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        if let Some(text) = reader.sized(b't') {
            return Ok(Self::Text(text));
        }
        let (value, rest) = Self::read_other(reader.clone())?;
        *reader = rest;
        Ok(value)
    }

    /// Reads a value of any kind, field by field, and returns it with the advanced reader. Takes the
    /// reader by value, so that the reader of the caller's loop can stay in registers.
    #[inline(never)]
    fn read_other(mut reader: Reader<'a>) -> Result<(Self, Reader<'a>), DecodeError> {
        const KIND: &str = "a column's kind n, u, t or b (1 byte)";
        match reader.u8(KIND)? {
            b't' => Self::sized_bytes(&mut reader).map(Self::Text),
            b'n' => Ok(Self::Null),
            b'b' => Self::sized_bytes(&mut reader).map(Self::Binary),
            b'u' => Ok(Self::UnchangedToast),
            other => Err(reader.unexpected(KIND, other)),
        }
        .map(|value| (value, reader))
    }

    fn sized_bytes(reader: &mut Reader<'a>) -> Result<&'a [u8], DecodeError> {
        let length = reader.length("the length of a value (4 bytes)")?;
        reader.bytes("a value of the length announced", length)
    }
}

/// Iterates over the values of a row. Decoding has already checked all of them.
#[derive(Debug, Clone)]
pub struct Values<'a> {
    remaining: u16,
    reader: Reader<'a>,
}

impl<'a> Iterator for Values<'a> {
    type Item = Value<'a>;

    #[inline]
    fn next(&mut self) -> Option<Value<'a>> {
        self.remaining = self.remaining.checked_sub(1)?;
        Value::read(&mut self.reader).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let remaining = usize::from(self.remaining);
        (remaining, Some(remaining))
    }
}

impl ExactSizeIterator for Values<'_> {}
impl FusedIterator for Values<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fault;

    fn read(input: &[u8]) -> Result<Tuple<'_>, DecodeError> {
        let mut reader = Reader::new(MessageKind::Insert, input);
        let tuple = Tuple::read(&mut reader)?;
        reader.finish()?;
        Ok(tuple)
    }

    #[test]
    fn each_kind_of_value_is_decoded() {
        let tuple = read(b"\0\x05nut\0\0\0\x02hit\0\0\0\0b\0\0\0\x01\xFF").unwrap();
        let values: Vec<Value<'_>> = tuple.iter().collect();
        assert_eq!(
            values,
            [
                Value::Null,
                Value::UnchangedToast,
                Value::Text(b"hi"),
                Value::Text(b""),
                Value::Binary(b"\xFF"),
            ]
        );
    }

    #[test]
    fn the_iterator_knows_how_many_values_are_left() {
        let tuple = read(b"\0\x02nn").unwrap();
        let mut values = tuple.iter();
        assert_eq!((tuple.len(), values.len()), (2, 2));
        values.next();
        assert_eq!(values.len(), 1);
        values.next();
        assert_eq!(
            (values.next(), values.next(), values.len()),
            (None, None, 0)
        );
    }

    #[test]
    fn a_row_may_have_no_columns() {
        let tuple = read(b"\0\0").unwrap();
        assert!(tuple.is_empty());
        assert_eq!(tuple.iter().next(), None);
    }

    #[test]
    fn a_value_longer_than_the_message_is_refused() {
        let refused = read(b"\0\x01t\x7F\xFF\xFF\xFFab").unwrap_err();
        assert_eq!(refused.offset, 7);
        assert_eq!(
            refused.fault,
            Fault::Truncated {
                needed: 0x7FFF_FFFF,
                available: 2
            }
        );
    }

    #[test]
    fn a_negative_length_is_refused() {
        let refused = read(b"\0\x01t\xFF\xFF\xFF\xFF").unwrap_err();
        assert_eq!(
            (refused.offset, refused.fault),
            (3, Fault::Negative { found: -1 })
        );
    }

    #[test]
    fn an_unknown_kind_of_value_is_refused() {
        let refused = read(b"\0\x02nx").unwrap_err();
        assert_eq!(
            (refused.offset, refused.fault),
            (3, Fault::UnexpectedByte { found: b'x' })
        );
    }
}
