//! A checked cursor over one message. All other code of this crate reads bytes from the wire
//! through this cursor.
//!
//! The argument `expected` of the methods describes a value in words, for use in an error. Numbers
//! are big-endian.

use crate::error::{DecodeError, Fault};
use crate::{Lsn, MessageKind, Oid, PgTimestamp};

/// A cursor: the unread rest of a message, and the kind of the message.
#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    message: MessageKind,
    input_len: usize,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Creates a reader at the beginning of `input`.
    pub(crate) fn new(message: MessageKind, input: &'a [u8]) -> Self {
        Self {
            message,
            input_len: input.len(),
            rest: input,
        }
    }

    /// Returns this reader with another kind of message, at the same position. The caller has just read
    /// the tag, so it knows the kind.
    pub(crate) fn within(self, message: MessageKind) -> Self {
        Self { message, ..self }
    }

    /// Number of bytes that have been read already.
    pub(crate) fn offset(&self) -> usize {
        self.input_len - self.rest.len()
    }

    /// The bytes that have not been read yet.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    #[inline]
    fn array<const N: usize>(&mut self, expected: &'static str) -> Result<[u8; N], DecodeError> {
        let Some((head, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(self.truncated(expected, N));
        };
        self.rest = rest;
        Ok(*head)
    }

    #[inline]
    pub(crate) fn u8(&mut self, expected: &'static str) -> Result<u8, DecodeError> {
        self.array::<1>(expected).map(|[byte]| byte)
    }

    #[inline]
    pub(crate) fn u32(&mut self, expected: &'static str) -> Result<u32, DecodeError> {
        self.array(expected).map(u32::from_be_bytes)
    }

    #[inline]
    pub(crate) fn i32(&mut self, expected: &'static str) -> Result<i32, DecodeError> {
        self.array(expected).map(i32::from_be_bytes)
    }

    pub(crate) fn lsn(&mut self, expected: &'static str) -> Result<Lsn, DecodeError> {
        self.array(expected)
            .map(|bytes| Lsn::new(u64::from_be_bytes(bytes)))
    }

    pub(crate) fn timestamp(&mut self, expected: &'static str) -> Result<PgTimestamp, DecodeError> {
        self.array(expected)
            .map(|bytes| PgTimestamp::from_micros(i64::from_be_bytes(bytes)))
    }

    #[inline]
    pub(crate) fn oid(&mut self, expected: &'static str) -> Result<Oid, DecodeError> {
        self.u32(expected).map(Oid)
    }

    /// Reads an `Int16` that is a number of columns.
    #[inline]
    pub(crate) fn column_count(&mut self, expected: &'static str) -> Result<u16, DecodeError> {
        let start = self.offset();
        let count = i16::from_be_bytes(self.array(expected)?);
        u16::try_from(count).map_err(|_| {
            self.fault_at(
                start,
                expected,
                Fault::Negative {
                    found: count.into(),
                },
            )
        })
    }

    /// Reads an `Int32` that is a count or a length. Does not check that the message has as many bytes
    /// left. If it has fewer, the caller's next read fails.
    #[inline]
    pub(crate) fn length(&mut self, expected: &'static str) -> Result<usize, DecodeError> {
        let start = self.offset();
        let length = self.i32(expected)?;
        usize::try_from(length)
            .map_err(|_| self.fault_at(start, expected, Fault::Negative { found: length }))
    }

    /// Reads the next `length` bytes.
    #[inline]
    pub(crate) fn bytes(
        &mut self,
        expected: &'static str,
        length: usize,
    ) -> Result<&'a [u8], DecodeError> {
        let Some((head, rest)) = self.rest.split_at_checked(length) else {
            return Err(self.truncated(expected, length));
        };
        self.rest = rest;
        Ok(head)
    }

    /// Reads `tag`, a length and that many bytes, and returns the bytes. This is the fast path for the
    /// usual value. If the input has another form, returns `None` and consumes nothing, so that the caller
    /// can read field by field and report any error.
    #[inline]
    pub(crate) fn sized(&mut self, tag: u8) -> Option<&'a [u8]> {
        let (&[found, length @ ..], after) = self.rest.split_first_chunk::<5>()?;
        let length = usize::try_from(i32::from_be_bytes(length)).ok()?;
        let (bytes, rest) = after.split_at_checked(length)?;
        if found != tag {
            return None;
        }
        self.rest = rest;
        Some(bytes)
    }

    /// Reads a zero-terminated `String`, and returns it without the zero byte.
    pub(crate) fn string(&mut self, expected: &'static str) -> Result<&'a str, DecodeError> {
        let start = self.offset();
        let Some(end) = self.rest.iter().position(|&byte| byte == 0) else {
            return Err(self.fault_at(start, expected, Fault::UnterminatedString));
        };
        let text = self.bytes(expected, end)?;
        self.u8(expected)?;
        std::str::from_utf8(text).map_err(|error| {
            self.fault_at(start + error.valid_up_to(), expected, Fault::InvalidUtf8)
        })
    }

    /// Reads a byte of flags, of which only the bits in `defined` may be set.
    pub(crate) fn flags(&mut self, expected: &'static str, defined: u8) -> Result<u8, DecodeError> {
        let start = self.offset();
        let found = self.u8(expected)?;
        if found & !defined != 0 {
            return Err(self.fault_at(start, expected, Fault::UnknownFlags { found }));
        }
        Ok(found)
    }

    /// Checks that the message ends here.
    #[inline]
    pub(crate) fn finish(self) -> Result<(), DecodeError> {
        if self.rest.is_empty() {
            return Ok(());
        }
        let count = self.rest.len();
        Err(self.fault_at(
            self.offset(),
            "the end of the message",
            Fault::TrailingBytes { count },
        ))
    }

    /// Builds the error for the last byte read, which is not allowed at its position.
    #[cold]
    pub(crate) fn unexpected(&self, expected: &'static str, found: u8) -> DecodeError {
        self.fault_at(
            self.offset().saturating_sub(1),
            expected,
            Fault::UnexpectedByte { found },
        )
    }

    #[cold]
    fn truncated(&self, expected: &'static str, needed: usize) -> DecodeError {
        let available = self.rest.len();
        self.fault_at(
            self.offset(),
            expected,
            Fault::Truncated { needed, available },
        )
    }

    #[cold]
    fn fault_at(&self, offset: usize, expected: &'static str, fault: Fault) -> DecodeError {
        DecodeError {
            message: self.message,
            offset,
            expected,
            fault,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(input: &[u8]) -> Reader<'_> {
        Reader::new(MessageKind::Begin, input)
    }

    fn error(offset: usize, fault: Fault) -> DecodeError {
        DecodeError {
            message: MessageKind::Begin,
            offset,
            expected: "it",
            fault,
        }
    }

    #[test]
    fn numbers_are_big_endian_and_move_the_offset() {
        let mut reader = reader(b"\x01\x00\x00\x00\x02\xFF\xFF\xFF\xFE\x00\x03");
        assert_eq!(reader.u8("it"), Ok(1));
        assert_eq!(reader.u32("it"), Ok(2));
        assert_eq!(reader.i32("it"), Ok(-2));
        assert_eq!(reader.offset(), 9);
        assert_eq!(reader.column_count("it"), Ok(3));
        assert_eq!(reader.finish(), Ok(()));
    }

    #[test]
    fn a_truncated_number_reports_the_bytes_needed_and_left() {
        let mut reader = reader(b"\x01\x02\x03");
        let expected = error(
            0,
            Fault::Truncated {
                needed: 8,
                available: 3,
            },
        );
        assert_eq!(reader.lsn("it"), Err(expected));
    }

    #[test]
    fn negative_counts_and_lengths_are_refused_at_their_offset() {
        let mut counts = reader(b"\x80\x00");
        assert_eq!(
            counts.column_count("it"),
            Err(error(0, Fault::Negative { found: -32_768 }))
        );
        let mut lengths = reader(b"!\xFF\xFF\xFF\xFF");
        lengths.u8("it").unwrap();
        assert_eq!(
            lengths.length("it"),
            Err(error(1, Fault::Negative { found: -1 }))
        );
    }

    #[test]
    fn a_length_beyond_the_input_reads_nothing() {
        let mut reader = reader(b"abc");
        let expected = error(
            0,
            Fault::Truncated {
                needed: 2_147_483_647,
                available: 3,
            },
        );
        assert_eq!(reader.bytes("it", 2_147_483_647), Err(expected));
        assert_eq!(reader.rest(), b"abc");
    }

    #[test]
    fn a_string_ends_at_its_zero_byte() {
        let mut reader = reader("höhe\0\0x".as_bytes());
        assert_eq!(reader.string("it"), Ok("höhe"));
        assert_eq!(reader.string("it"), Ok(""));
        assert_eq!(
            reader.string("it"),
            Err(error(7, Fault::UnterminatedString))
        );
    }

    #[test]
    fn a_string_in_another_encoding_is_refused_at_the_bad_byte() {
        let mut reader = reader(b"h\xF6he\0");
        assert_eq!(reader.string("it"), Err(error(1, Fault::InvalidUtf8)));
    }

    #[test]
    fn undefined_flags_are_refused() {
        let mut reader = reader(b"\x03\x05");
        assert_eq!(reader.flags("it", 3), Ok(3));
        assert_eq!(
            reader.flags("it", 3),
            Err(error(1, Fault::UnknownFlags { found: 5 }))
        );
    }

    #[test]
    fn trailing_bytes_are_counted() {
        let mut reader = reader(b"abc");
        reader.u8("it").unwrap();
        let refused = reader.finish().unwrap_err();
        assert_eq!(
            (refused.offset, refused.fault),
            (1, Fault::TrailingBytes { count: 2 })
        );
    }
}
