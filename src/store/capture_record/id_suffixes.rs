//! Manages the part of event ids that distinguishes the physical tables of one captured table.
//!
//! If the ids of a table are not uuids and the table has no column `inserted_xid`, an event id is computed from the
//! table's identity, a suffix and the row's id. A table that was dropped and created again may number its rows from 1
//! again, so each physical table has its own suffix: `@OID`. The stream contains the OID of each row's table, so rows
//! of earlier tables that are still in the WAL keep their event ids. The first table that was captured has no suffix.
//! A copy of a table has the suffix of the original.

use std::collections::BTreeMap;

use crate::error::{Code, Error, Result};

/// Maximum number of tables whose suffix is recorded. Without a limit the record would grow forever: each
/// copy of a table adds a suffix, and so does each former partition of a replaced table.
const MAX_TABLES: usize = 256;

/// The suffixes of one captured table, by the OID of the physical table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IdSuffixes {
    /// The recorded suffixes. A table without an entry has no suffix if its OID is below `plain_before`,
    /// otherwise the suffix of [`own`](Self::own).
    known: BTreeMap<u32, String>,
    /// Number of times that the record was adopted (`adoption`). New suffixes contain this number, because after an
    /// adoption an OID may belong to another table than before.
    adoptions: u32,
    /// The OID of the table that was captured when Postrider was upgraded from a version without suffixes. `None` if
    /// there was no such upgrade, or if [`with_new`](Self::with_new) has cleared the OID.
    ///
    /// A table with a lower OID is usually older than the upgrade. The WAL may still contain rows of such a table. The
    /// event ids of these rows must stay as they were before the upgrade, so such a table has no suffix.
    plain_before: Option<u32>,
}

/// The key of `plain_before` in the JSON object of OIDs.
const PLAIN_BEFORE: &str = "before";

impl IdSuffixes {
    /// Returns the suffixes for a table that is captured for the first time. Its rows have no suffix.
    pub(crate) fn first(oid: u32) -> Self {
        Self {
            known: BTreeMap::from([(oid, String::new())]),
            adoptions: 0,
            plain_before: None,
        }
    }

    /// Reads the suffixes from the capture record of the table `oid`.
    pub(super) fn read(oid: u32, known: Option<&str>, adoptions: i32) -> Result<Self> {
        let adoptions = adoptions.unsigned_abs();
        let Some(known) = known else {
            return Ok(Self {
                adoptions,
                plain_before: Some(oid),
                ..Self::first(oid)
            });
        };
        let invalid = || {
            Error::new(
                Code::PostgresStatement,
                "outbox.capture holds invalid id_suffixes",
            )
        };
        let mut known: BTreeMap<String, String> =
            serde_json::from_str(known).map_err(|e| invalid().caused_by(e))?;
        let parsed = |oid: &str| oid.parse().map_err(|e| invalid().caused_by(e));
        let plain_before = known.remove(PLAIN_BEFORE);
        let plain_before = plain_before.as_deref().map(parsed).transpose()?;
        let known = known
            .into_iter()
            .map(|(oid, suffix)| Ok((parsed(&oid)?, suffix)));
        Ok(Self {
            known: known.collect::<Result<_>>()?,
            adoptions,
            plain_before,
        })
    }

    /// Returns the content of the column `id_suffixes`.
    pub(super) fn to_json(&self) -> String {
        let mut json = serde_json::json!(self.known);
        if let Some(oid) = self.plain_before {
            json[PLAIN_BEFORE] = oid.to_string().into();
        }
        json.to_string()
    }

    /// Whether the suffix of the table with this OID is recorded.
    pub(crate) fn knows(&self, oid: u32) -> bool {
        self.known.contains_key(&oid)
    }

    /// Returns the suffix for the rows of the table with this OID.
    pub(crate) fn of(&self, oid: u32) -> String {
        let is_plain = self.plain_before.is_some_and(|before| oid < before);
        match self.known.get(&oid) {
            Some(suffix) => suffix.clone(),
            None if is_plain => String::new(),
            None => self.own(oid),
        }
    }

    /// Returns the suffix that only the table with this OID has.
    fn own(&self, oid: u32) -> String {
        match self.adoptions {
            0 => format!("@{oid}"),
            adoptions => format!("@{adoptions}.{oid}"),
        }
    }

    /// Returns the suffixes after the table `new` has replaced the table `before`. The table `new` gets a suffix that
    /// no other table has.
    ///
    /// The first replacement after an upgrade keeps `plain_before`, because the WAL may still contain rows from before
    /// the upgrade. The second replacement clears `plain_before`. After that, [`of`](Self::of) treats every table
    /// without an entry in `known` as a new table, and returns a suffix with its OID.
    #[must_use]
    pub(crate) fn with_new(&self, new: u32, before: u32) -> Self {
        let mut changed = self.clone();
        if self.plain_before.is_some() {
            // The new OID may be lower than `plain_before`, because OIDs wrap around. `of` would take such a table for
            // a table from before the upgrade, and would return no suffix. A recorded suffix prevents this.
            changed.known.insert(new, self.own(new));
        }
        changed.plain_before = self.plain_before.filter(|plain| *plain == before);
        changed
    }

    /// Gives the table `copy` the same suffix as the table `original`. `copy` is a copy of `original`, or was one of
    /// its partitions.
    #[must_use]
    pub(crate) fn with_copy(&self, copy: u32, original: u32) -> Self {
        let mut copied = self.clone();
        copied.known.insert(copy, self.of(original));
        // Forget the table with the lowest OID, because the WAL probably has no more rows of it. If the WAL
        // has such rows, the relay publishes them again with other event ids.
        while copied.known.len() > MAX_TABLES {
            let mut oids = copied.known.keys();
            let oldest = oids.find(|oid| ![copy, original].contains(oid));
            let oldest = *oldest.expect("invariant: more than two tables are known");
            copied.known.remove(&oldest);
        }
        copied
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_table_and_its_copies_have_no_suffix() {
        let suffixes = IdSuffixes::first(7).with_copy(9, 7);
        assert_eq!([7, 9, 11].map(|oid| suffixes.of(oid)), ["", "", "@11"]);
        let suffixes = suffixes.with_copy(12, 11);
        assert_eq!(suffixes.of(12), "@11");
        let read = IdSuffixes::read(12, Some(&suffixes.to_json()), 0).unwrap();
        assert_eq!(read, suffixes);
    }

    #[test]
    fn after_an_adoption_new_suffixes_cannot_equal_earlier_ones() {
        let suffixes = IdSuffixes::read(7, Some(r#"{"7": "@3"}"#), 2).unwrap();
        assert_eq!([7, 3].map(|oid| suffixes.of(oid)), ["@3", "@2.3"]);
        let unknown = IdSuffixes::read(7, None, 0).unwrap();
        assert_eq!(unknown.of(7), "");
    }

    /// An older version published rows of earlier tables without a suffix. Rows of these tables that are still
    /// in the WAL after the upgrade must keep the same event ids.
    #[test]
    fn tables_from_before_an_upgrade_have_no_suffix_until_two_tables_are_recorded() {
        let upgraded = IdSuffixes::read(7, None, 0).unwrap();
        assert_eq!([5, 7, 9].map(|oid| upgraded.of(oid)), ["", "", "@9"]);
        let stored = |suffixes: &IdSuffixes| {
            let read = IdSuffixes::read(7, Some(&suffixes.to_json()), 0).unwrap();
            assert_eq!(read, *suffixes);
            read
        };
        let renamed = stored(&upgraded);
        assert!(!renamed.knows(5) && !renamed.knows(9));
        // The new OID may be lower than the earlier table's OID.
        for new in [3, 9] {
            let first = stored(&renamed.with_new(new, 7));
            let suffixes = [5, 7, new].map(|oid| first.of(oid));
            assert_eq!(suffixes, ["".into(), "".into(), format!("@{new}")]);
            let second = stored(&first.with_new(11, new));
            let suffixes = [5, 7, new, 11].map(|oid| second.of(oid));
            assert_eq!(
                suffixes,
                ["@5".into(), "".into(), format!("@{new}"), "@11".into()]
            );
        }
    }

    #[test]
    fn the_number_of_known_tables_is_bounded() {
        let many = 1..1_000;
        let suffixes = many.fold(IdSuffixes::first(1), |s, oid| s.with_copy(oid + 1, oid));
        assert_eq!(suffixes.known.len(), MAX_TABLES);
        assert_eq!(suffixes.of(1_000), "");
    }
}
