//! Writes the data of a message: copies bytes, or decodes hexadecimal digits during the copy.

/// The data of a message, before it is copied into the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageData<'a> {
    /// Bytes to copy unchanged.
    Plain(&'a [u8]),
    /// Hexadecimal digits to decode while copying.
    Bytea(Bytea<'a>),
}

impl MessageData<'_> {
    /// Number of bytes that [`write`](Self::write) appends.
    pub(super) fn len(&self) -> usize {
        match self {
            MessageData::Plain(bytes) => bytes.len(),
            MessageData::Bytea(bytea) => bytea.len(),
        }
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        match self {
            MessageData::Plain(bytes) => out.extend_from_slice(bytes),
            MessageData::Bytea(bytea) => bytea.write(out),
        }
    }
}

/// A `bytea` in its text form `\x0123...`, without the prefix `\x`. The digits have been checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bytea<'a>(&'a [u8]);

impl<'a> Bytea<'a> {
    /// Parses the text form. Returns `None` for any other text, such as the format that PostgreSQL uses
    /// with `bytea_output = escape`.
    pub(super) fn parse(text: &'a [u8]) -> Option<Self> {
        let digits = text.strip_prefix(b"\\x")?;
        // Check all digits without an early exit, so that the compiler can check many at once.
        let bad = digits
            .iter()
            .fold(0, |bad, &digit| bad | NIBBLES[usize::from(digit)])
            & NOT_HEX;
        (digits.len() % 2 == 0 && bad == 0).then_some(Self(digits))
    }

    /// Number of decoded bytes.
    pub(super) fn len(&self) -> usize {
        self.0.len() / 2
    }

    /// Appends the decoded bytes.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.extend(
            self.0
                .chunks_exact(2)
                .map(|pair| NIBBLES[usize::from(pair[0])] << 4 | NIBBLES[usize::from(pair[1])]),
        );
    }
}

/// The entry in [`NIBBLES`] for each byte that is not a hexadecimal digit.
const NOT_HEX: u8 = 0x80;

/// Value of each hexadecimal digit; [`NOT_HEX`] for any other byte.
static NIBBLES: [u8; 256] = {
    let mut table = [NOT_HEX; 256];
    let mut value = 0;
    while value < 16 {
        table[b"0123456789abcdef"[value] as usize] = value as u8;
        table[b"0123456789ABCDEF"[value] as usize] = value as u8;
        value += 1;
    }
    table
};
