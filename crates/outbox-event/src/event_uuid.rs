//! The `event_id` of a row whose id is not a uuid.
//!
//! The dispatch table and the subscribers identify events by uuid. An id that is a uuid is used unchanged. Any
//! other id (a `bigserial`, a text) becomes `md5('schema.table:' || id || ':' || inserted_xid)` read as a uuid.
//! This uuid is the same on every run, differs between tables, and equals the result of
//! `outbox.event_uuid('schema.table', id, inserted_xid)` in SQL. The transaction is included because a table
//! that was dropped and created again may number its rows from 1 again. For a row without `inserted_xid`, only
//! the name and the id are hashed, and the name is `schema.table@OID` if the table was created again
//! ([`TableIdentity::with_suffix`]). Whether an id is hashed depends on the column's type alone, never on the
//! value, because SQL has to agree.

use std::fmt;
use std::sync::Arc;

use md5::{Digest, Md5};
use uuid::Uuid;

/// The name `schema.table` that identifies a table in the ids of its events.
///
/// If the id of a row is not a uuid, the row's `event_id` is derived from this name. So the name has to stay
/// the same for as long as the table is captured, even if the table is renamed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TableIdentity {
    name: Arc<str>,
    added_xids: Arc<[u64]>,
    suffix: Arc<str>,
}

impl TableIdentity {
    /// The identity of a table by its name: the current name, or the name under which the table was first
    /// captured.
    pub fn new(schema_and_table: &str) -> Self {
        Self {
            name: schema_and_table.into(),
            added_xids: Arc::default(),
            suffix: "".into(),
        }
    }

    /// Adds the transactions that created the column `inserted_xid`. In rows that are older than the column,
    /// the column names one of these transactions.
    #[must_use]
    pub fn with_added_xids(self, added_xids: &[u64]) -> Self {
        Self {
            added_xids: added_xids.into(),
            ..self
        }
    }

    /// Sets the text that follows `schema.table` in the ids of rows without a known `inserted_xid`. Each
    /// physical table has its own text, such as `@16402`, because a table that was created again may number
    /// its rows from 1 again.
    #[must_use]
    pub fn with_suffix(self, suffix: &str) -> Self {
        Self {
            suffix: suffix.into(),
            ..self
        }
    }

    /// `schema.table`.
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// The transaction that inserted the row. `None` if it is unknown, because `inserted_xid` names a transaction
    /// that added the column: the row is older than the column.
    fn known_xid<'x>(&self, inserted_xid: Option<&'x str>) -> Option<&'x str> {
        let is_known = |xid: &&str| {
            self.added_xids.is_empty()
                || !xid
                    .parse()
                    .is_ok_and(|xid: u64| self.added_xids.contains(&xid))
        };
        inserted_xid.filter(is_known)
    }
}

impl fmt::Display for TableIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

/// Computes the `event_id` of each row of a table whose row ids are not uuids.
#[derive(Debug, Clone)]
pub struct EventUuids {
    table: TableIdentity,
    /// MD5 state after `schema.table:`.
    seeded: Md5,
    /// MD5 state after `schema.table`, the suffix and `:`.
    seeded_without_xid: Md5,
}

impl EventUuids {
    /// Prepares the computation for the table with this identity.
    pub fn new(table: &TableIdentity) -> Self {
        Self {
            table: table.clone(),
            seeded: Md5::new_with_prefix(format!("{table}:")),
            seeded_without_xid: Md5::new_with_prefix(format!("{table}{}:", table.suffix)),
        }
    }

    /// The `event_id` of the row with this id. `inserted_xid` is the transaction that inserted the row, or
    /// `None` for a table without that column. `id` and `inserted_xid` are in PostgreSQL's text form.
    #[inline]
    pub fn event_uuid(&self, id: &str, inserted_xid: Option<&str>) -> Uuid {
        let hash = match self.table.known_xid(inserted_xid) {
            Some(xid) => {
                let hash = self.seeded.clone().chain_update(id);
                hash.chain_update(":").chain_update(xid)
            }
            None => self.seeded_without_xid.clone().chain_update(id),
        };
        Uuid::from_bytes(hash.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event_uuid(table: TableIdentity, id: &str, inserted_xid: Option<&str>) -> String {
        let ids = EventUuids::new(&table);
        ids.event_uuid(id, inserted_xid).to_string()
    }

    fn table(name: &str) -> TableIdentity {
        TableIdentity::new(name)
    }

    #[test]
    fn an_id_is_hashed_as_sql_hashes_it() {
        // select md5('public.a:7')::uuid
        let expected = "c7bc7e8d-cd25-14db-6df3-35ec723877bc";
        assert_eq!(event_uuid(table("public.a"), "7", None), expected);
        // select md5('public.a:7:731')::uuid
        let expected = "4bef8b82-7819-d670-3203-f7d3bd6444fb";
        assert_eq!(event_uuid(table("public.a"), "7", Some("731")), expected);
    }

    #[test]
    fn the_same_id_in_two_tables_is_two_events() {
        let of = |name| event_uuid(table(name), "7", None);
        assert_ne!(of("public.a"), of("public.b"));
    }

    #[test]
    fn a_table_that_was_created_again_has_other_ids_for_rows_without_a_transaction() {
        let again = || table("public.a").with_suffix("@9");
        let without = event_uuid(again(), "7", None);
        assert_eq!(without, event_uuid(table("public.a@9"), "7", None));
        let with = event_uuid(table("public.a"), "7", Some("731"));
        assert_eq!(event_uuid(again(), "7", Some("731")), with);
        let added = again().with_added_xids(&[731]);
        assert_eq!(event_uuid(added, "7", Some("731")), without);
    }

    #[test]
    fn the_transaction_that_added_the_column_does_not_count() {
        let migrated = || table("public.a").with_added_xids(&[700, 731]);
        let without = event_uuid(table("public.a"), "7", None);
        assert_eq!(event_uuid(migrated(), "7", Some("731")), without);
        let later = event_uuid(table("public.a"), "7", Some("732"));
        assert_eq!(event_uuid(migrated(), "7", Some("732")), later);
        assert_ne!(later, without);
    }
}
