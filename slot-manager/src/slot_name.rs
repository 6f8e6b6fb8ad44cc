//! The name of a replication slot, validated on construction.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// Maximum length of a slot's name in bytes: `NAMEDATALEN - 1` in standard builds.
const LONGEST_BYTES: usize = 63;

/// A name that PostgreSQL accepts for a slot: `^[a-z0-9_]{1,63}$`.
///
/// The name needs no quotes, neither in SQL nor in replication commands.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct SlotName(String);

/// The error for a text that PostgreSQL would refuse as the name of a slot.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{input:?} cannot name a replication slot: use 1 to 63 lower-case letters, digits and \
     underscores, such as postrider_orders"
)]
pub struct InvalidSlotName {
    /// The text as it was given.
    pub input: String,
}

impl SlotName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SlotName {
    type Err = InvalidSlotName;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
        if (1..=LONGEST_BYTES).contains(&input.len()) && input.bytes().all(allowed) {
            return Ok(Self(input.to_owned()));
        }
        Err(InvalidSlotName {
            input: input.to_owned(),
        })
    }
}

impl fmt::Display for SlotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_postgresql_accepts_are_accepted() {
        for name in ["a", "0", "_", "postrider_2", &"x".repeat(63)] {
            assert_eq!(name.parse::<SlotName>().expect(name).as_str(), name);
        }
    }

    #[test]
    fn names_that_postgresql_refuses_are_refused() {
        for name in ["", "A", "a-b", "a b", "a;drop", "ä", "a'", &"x".repeat(64)] {
            assert!(name.parse::<SlotName>().is_err(), "{name}");
        }
    }
}
