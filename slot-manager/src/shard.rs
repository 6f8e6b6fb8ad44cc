//! One of several relays on one database: its names, its share of the rows, its places.
//!
//! A walsender reads all of the log on one core, and there is one for each slot. So several relays
//! may serve one database, each with a slot and a publication of its own, whose row filter lets
//! through the rows of one share: those whose key hashes to it. Which relay has recorded an event
//! is told by its place, since ordinals of shard `i` of `n` leave the rest `i` when divided by `n`.
//!
//! *Layout* is the number of shards; without shards it is 1. Shares and places of one layout mean
//! nothing in another.
//!
//! **Not here:** how a layout gives way to another, which is the relay's to decide.

use std::fmt;
use std::str::FromStr;

use crate::SlotName;
use crate::slot_name::InvalidSlotName;

/// The first major whose publications have row filters.
pub const ROW_FILTERS_MAJOR: u32 = 15;

/// Ordinals are multiplied by the number of shards and must fit into `int`: with this many a
/// transaction may still have 134 million rows in each share.
const MOST_SHARDS: u32 = 16;

/// PostgreSQL cuts longer application names off, and the relay's writer goes by
/// `postrider dispatch SLOT`: those of two shards must differ.
const LONGEST_SLOT_BYTES: usize = 63 - "postrider dispatch ".len();

/// The function that hashes a column of a built-in type (by its oid, which never changes), for the
/// types that a key may have. Row filters take immutable built-in functions only, and no cast that
/// goes through text. Whole numbers of all sizes hash alike.
pub const KEY_TYPES: [(u32, &str, &str); 6] = [
    (25, "text", "hashtext"),
    (1043, "varchar", "hashtext"),
    (21, "smallint", "hashint2"),
    (23, "integer", "hashint4"),
    (20, "bigint", "hashint8"),
    (2950, "uuid", "uuid_hash"),
];

/// The shard `index` of `of`, written `index/of`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shard {
    index: u32,
    of: u32,
}

/// A text that names no shard.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{input:?} is not a shard: write 0/4 for the first of four, with 2 to {MOST_SHARDS} of them"
)]
pub struct ParseShardError {
    /// The text as it was given.
    pub input: String,
}

impl Shard {
    fn new(index: u32, of: u32) -> Option<Self> {
        ((2..=MOST_SHARDS).contains(&of) && index < of).then_some(Self { index, of })
    }

    /// All shards of this layout.
    pub fn all(self) -> impl Iterator<Item = Self> {
        (0..self.of).map(move |index| Self { index, ..self })
    }

    /// Every shard of every layout; `None` is the relay without shards.
    pub(crate) fn every() -> impl Iterator<Item = Option<Self>> {
        let layouts = (2..=MOST_SHARDS).filter_map(|of| Self::new(0, of));
        std::iter::once(None).chain(layouts.flat_map(|first| first.all().map(Some)))
    }

    fn suffix(self) -> String {
        format!("_{}of{}", self.index, self.of)
    }

    /// The name of its slot.
    ///
    /// # Errors
    /// It would be too long.
    pub fn slot(self, base: &SlotName) -> Result<SlotName, InvalidSlotName> {
        let name = format!("{base}{}", self.suffix());
        match name.len() <= LONGEST_SLOT_BYTES {
            true => name.parse(),
            false => Err(InvalidSlotName { input: name }),
        }
    }

    /// The name of its publication.
    #[must_use]
    pub fn publication(self, base: &str) -> String {
        format!("{base}{}", self.suffix())
    }

    /// The base name and the shard that a slot's name is made of; `None` for any other name.
    #[must_use]
    pub fn of_slot(name: &str) -> Option<(&str, Self)> {
        let (base, shard) = name.rsplit_once('_')?;
        let shard = shard.replacen("of", "/", 1).parse().ok()?;
        (!base.is_empty()).then_some((base, shard))
    }

    /// The ordinal of the `nth` insert; `None` when it would not fit into `int`.
    #[must_use]
    pub fn ordinal(self, nth: u32) -> Option<u32> {
        let ordinal = nth.checked_mul(self.of)?.checked_add(self.index)?;
        i32::try_from(ordinal).is_ok().then_some(ordinal)
    }

    /// The first `nth` whose ordinal is greater than `last`, whatever layout that comes from.
    #[must_use]
    pub fn nth_after(self, last: u32) -> u32 {
        last / self.of + 1
    }

    /// The condition that a place is of this shard; `ordinal` is an expression.
    #[must_use]
    pub fn owns_sql(self, ordinal: &str) -> String {
        let Self { index, of } = self;
        format!("pg_catalog.mod({ordinal}, {of}) = {index}")
    }

    /// The condition that a row is in the share; `column` is the key as SQL takes it, and null is in
    /// the share 0. `None` when keys of that type cannot be hashed.
    #[must_use]
    pub fn share_sql(self, column: &str, type_oid: u32) -> Option<String> {
        let (_, _, hash) = KEY_TYPES.iter().find(|(oid, ..)| *oid == type_oid)?;
        let (before, behind) = self.share_sql_around(column);
        Some(format!("{before}{hash}{behind}"))
    }

    /// What stands before and behind the name of the function that hashes the key.
    #[must_use]
    pub fn share_sql_around(self, column: &str) -> (&'static str, String) {
        let Self { index, of } = self;
        (
            "pg_catalog.mod(pg_catalog.int4and(coalesce(pg_catalog.",
            format!("({column}), 0), 2147483647), {of}) = {index}"),
        )
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}

impl FromStr for Shard {
    type Err = ParseShardError;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        let parsed = input.split_once('/').and_then(|(index, of)| {
            let shard = Self::new(index.parse().ok()?, of.parse().ok()?)?;
            // One form only: it becomes part of names.
            (shard.to_string() == input).then_some(shard)
        });
        parsed.ok_or_else(|| ParseShardError {
            input: input.to_owned(),
        })
    }
}

/// How many shards there are; 1 without.
#[must_use]
pub fn layout(shard: Option<Shard>) -> u32 {
    shard.map_or(1, |shard| shard.of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(text: &str) -> Shard {
        text.parse().expect(text)
    }

    #[test]
    fn shards_are_read_in_one_form_alone() {
        for text in ["0/2", "1/2", "15/16", "9/10"] {
            assert_eq!(shard(text).to_string(), text);
        }
        for text in [
            "", "0", "0/1", "2/2", "0/17", "00/2", "+0/2", "0/02", " 0/2", "0/2/2", "-1/2",
        ] {
            assert!(text.parse::<Shard>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_slots_name_tells_its_shard() {
        let base = "my_slot".parse().expect("a name");
        let name = shard("3/16").slot(&base).expect("short");
        assert_eq!(name.as_str(), "my_slot_3of16");
        assert_eq!(
            Shard::of_slot(name.as_str()),
            Some(("my_slot", shard("3/16")))
        );
        for name in [
            "my_slot",
            "my_slot_3of",
            "my_slot_3of3",
            "my_slot_03of4",
            "_0of2",
            "0of2",
        ] {
            assert_eq!(Shard::of_slot(name), None, "{name}");
        }
    }

    #[test]
    fn a_slots_name_is_short_enough_for_the_application_name() {
        let base = |bytes| "x".repeat(bytes).parse::<SlotName>().expect("a name");
        assert!(shard("0/2").slot(&base(39)).is_ok());
        assert!(shard("0/2").slot(&base(40)).is_err());
    }

    #[test]
    fn ordinals_of_two_shards_never_meet_and_never_wrap() {
        let (a, b) = (shard("0/2"), shard("1/2"));
        assert_eq!((a.ordinal(1), b.ordinal(1)), (Some(2), Some(3)));
        assert_eq!((a.ordinal(2), b.ordinal(2)), (Some(4), Some(5)));
        let last = i32::MAX.unsigned_abs();
        assert_eq!(b.ordinal(last / 2), Some(last));
        assert_eq!(a.ordinal(last / 2 + 1), None);
        assert_eq!(a.ordinal(u32::MAX), None);
    }

    #[test]
    fn the_next_ordinal_is_beyond_those_of_every_layout() {
        for last in 0..50 {
            for text in ["0/2", "1/2", "2/3", "15/16"] {
                let next = shard(text).ordinal(shard(text).nth_after(last));
                assert!(next.is_some_and(|next| next > last), "{text} after {last}");
            }
        }
    }
}
