//! The part of event ids that distinguishes the physical tables of one captured table.
//!
//! Rows with numbered ids and without `inserted_xid` have event ids that are computed from the table's
//! identity, a suffix and the id. A table that was dropped and created again may number its rows from
//! 1 again, so each physical table has its own suffix: `@OID`. The stream names the OID with each row, so
//! rows of every earlier table in the log keep their event ids. The first table that was captured has no
//! suffix. A copy of a table has the suffix of that table.

use std::collections::BTreeMap;

use crate::error::{Code, Error, Result};

/// Maximum number of tables whose suffix is recorded. Each copy of a table adds one, and so does each
/// former partition of a table that was replaced.
const MAX_TABLES: usize = 256;

/// The suffixes of one captured table, by the OID of the physical table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IdSuffixes {
    /// The suffixes that differ from `@OID`, and those of replaced tables.
    known: BTreeMap<u32, String>,
    /// How often the table moved to another server, where the same OIDs belong to other tables.
    adoptions: u32,
    /// The table in a record that an older version of Postrider wrote. That version published the rows of
    /// every table without a suffix, so earlier tables in the log, whose OIDs are lower, have none either.
    plain_before: Option<u32>,
}

/// The name of `plain_before` among the OIDs.
const PLAIN_BEFORE: &str = "before";

impl IdSuffixes {
    /// The table with this OID is captured for the first time: its rows have no suffix.
    pub(crate) fn first(oid: u32) -> Self {
        Self {
            known: BTreeMap::from([(oid, String::new())]),
            adoptions: 0,
            plain_before: None,
        }
    }

    /// Reads the columns of the capture record of the table `oid`.
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

    /// The content of the column `id_suffixes`.
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

    /// The suffix for the rows of the table with this OID.
    pub(crate) fn of(&self, oid: u32) -> String {
        let is_plain = self.plain_before.is_some_and(|before| oid < before);
        match self.known.get(&oid) {
            Some(suffix) => suffix.clone(),
            None if is_plain => String::new(),
            None => self.own(oid),
        }
    }

    /// The suffix that only the table with this OID has.
    fn own(&self, oid: u32) -> String {
        match self.adoptions {
            0 => format!("@{oid}"),
            adoptions => format!("@{adoptions}.{oid}"),
        }
    }

    /// Gives the rows of the table `new`, which replaces the table `before`, their own suffix. If `before`
    /// was itself recorded by this version, earlier tables have their own suffixes too.
    #[must_use]
    pub(crate) fn with_new(&self, new: u32, before: u32) -> Self {
        let mut changed = self.clone();
        if self.plain_before.is_some() {
            // The OID may be lower, because OIDs begin again after the highest one.
            changed.known.insert(new, self.own(new));
        }
        changed.plain_before = self.plain_before.filter(|plain| *plain == before);
        changed
    }

    /// Gives the rows of the table `copy`, a copy or a partition, the suffix of the table `original`.
    #[must_use]
    pub(crate) fn with_copy(&self, copy: u32, original: u32) -> Self {
        let mut copied = self.clone();
        copied.known.insert(copy, self.of(original));
        // The log has probably no more rows of a forgotten table. If it has, the relay repeats these rows.
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
    fn after_an_adoption_other_tables_have_other_suffixes() {
        let suffixes = IdSuffixes::read(7, Some(r#"{"7": "@3"}"#), 2).unwrap();
        assert_eq!([7, 3].map(|oid| suffixes.of(oid)), ["@3", "@2.3"]);
        let unknown = IdSuffixes::read(7, None, 0).unwrap();
        assert_eq!(unknown.of(7), "");
    }

    /// An older relay has published rows of earlier tables without a suffix, and the log may have more.
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
        // The OID may be lower than that of the earlier table.
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
