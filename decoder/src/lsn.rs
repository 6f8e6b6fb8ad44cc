//! A position in the WAL.
//!
//! [`Lsn`] stands for positions of any kind. It does not say whether a position may be confirmed to the
//! server. The code that confirms positions must decide that.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A log sequence number: the byte offset in the WAL of one cluster and timeline.
///
/// Displayed and parsed like PostgreSQL's `pg_lsn`, as two hexadecimal halves: `16/B374D848`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Lsn(u64);

impl Lsn {
    /// `0/0`, which PostgreSQL calls invalid, because no record starts there. A client that starts
    /// replication at `0/0` gets the stream from the slot's own position.
    pub const ZERO: Self = Self(0);

    /// The position at this offset in bytes from the start of the WAL.
    pub const fn new(offset: u64) -> Self {
        Self(offset)
    }

    /// The offset in bytes from the start of the WAL.
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// Number of WAL bytes from `earlier` to this position; `None` if `earlier` is in fact later.
    pub const fn bytes_since(self, earlier: Self) -> Option<u64> {
        self.0.checked_sub(earlier.0)
    }
}

impl From<u64> for Lsn {
    fn from(offset: u64) -> Self {
        Self(offset)
    }
}

impl From<Lsn> for u64 {
    fn from(lsn: Lsn) -> Self {
        lsn.0
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (high, low) = (self.0 >> 32, self.0 & 0xFFFF_FFFF);
        if f.width().is_none() {
            return write!(f, "{high:X}/{low:X}");
        }
        f.pad(&format!("{high:X}/{low:X}"))
    }
}

/// The error for a text that is not an LSN.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{input:?} is not an LSN: write two hexadecimal numbers of up to 8 digits with a slash between \
     them, such as 16/B374D848"
)]
pub struct ParseLsnError {
    /// The text as it was given.
    pub input: String,
}

impl FromStr for Lsn {
    type Err = ParseLsnError;

    /// Accepts the same texts as PostgreSQL's `pg_lsn`: upper or lower case, with or without
    /// leading zeros.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.split_once('/')
            .and_then(|(high, low)| Some(Self(parse_half(high)? << 32 | parse_half(low)?)))
            .ok_or_else(|| ParseLsnError {
                input: text.to_owned(),
            })
    }
}

/// Parses one half of an LSN: 1 to 8 hexadecimal digits. Unlike `from_str_radix`, accepts no sign.
fn parse_half(digits: &str) -> Option<u64> {
    let well_formed =
        (1..=8).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
    well_formed
        .then(|| u64::from_str_radix(digits, 16).ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_lsn_is_displayed_as_in_postgresql() {
        assert_eq!(Lsn::new(0x16_B374_D848).to_string(), "16/B374D848");
        assert_eq!(Lsn::ZERO.to_string(), "0/0");
        assert_eq!(Lsn::new(u64::MAX).to_string(), "FFFFFFFF/FFFFFFFF");
        assert_eq!(format!("[{:>8}]", Lsn::new(0x1_0000_0002)), "[     1/2]");
    }

    #[test]
    fn an_lsn_is_parsed_in_either_case_and_with_leading_zeros() {
        assert_eq!("16/B374D848".parse(), Ok(Lsn::new(0x16_B374_D848)));
        assert_eq!("16/b374d848".parse(), Ok(Lsn::new(0x16_B374_D848)));
        assert_eq!("0/0000001A".parse(), Ok(Lsn::new(0x1A)));
    }

    #[test]
    fn a_text_that_postgresql_refuses_as_an_lsn_is_refused_and_shown() {
        for text in [
            "",
            "/",
            "16",
            "1/",
            "/1",
            "1/2/3",
            "G/1",
            "+1/2",
            "1/-2",
            "123456789/0",
            " 1/2",
        ] {
            let refused = text.parse::<Lsn>();
            assert_eq!(
                refused,
                Err(ParseLsnError {
                    input: text.to_owned()
                })
            );
        }
    }

    #[test]
    fn bytes_since_is_none_if_the_other_position_is_later() {
        let (earlier, later) = (Lsn::new(100), Lsn::new(0x1_0000_0000));
        assert_eq!(later.bytes_since(earlier), Some(0x1_0000_0000 - 100));
        assert_eq!(later.bytes_since(later), Some(0));
        assert_eq!(earlier.bytes_since(later), None);
    }
}
