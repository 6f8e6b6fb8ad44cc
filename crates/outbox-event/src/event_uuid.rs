//! Computes the `event_id` of a row whose id is not a uuid.
//!
//! The dispatch table and the subscribers identify events by uuid. If the id column is a uuid, its value is
//! used unchanged. Any other id (a `bigserial`, a text) becomes `md5('schema.table:' || id || ':' ||
//! inserted_xid)`, read as a uuid. This uuid is the same on every run, and differs between tables. In SQL,
//! `outbox.event_uuid('schema.table', id, inserted_xid)` computes the same uuid.
//!
//! A table that was dropped and created again may number its rows from 1 again. The transaction in the hash
//! gives the new rows other uuids than the old rows. If the transaction is unknown, for example because the
//! table has no column `inserted_xid`, a suffix of the name distinguishes the tables: the hash of a row in the
//! new table is `md5('schema.table@OID:' || id)` ([`TableIdentity::with_suffix`]).
//!
//! Whether an id is hashed depends only on the column's type, never on the value, so that Rust and SQL always
//! agree.

use std::fmt;
use std::sync::Arc;

use md5::{Digest, Md5};
use uuid::Uuid;

/// The name `schema.table` that represents a table in the ids of its events.
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
    /// Creates the identity of a table. For a captured table, the name is the one under which the
    /// table was first captured. For any other table, it is the current name.
    pub fn new(schema_and_table: &str) -> Self {
        Self {
            name: schema_and_table.into(),
            added_xids: Arc::default(),
            suffix: "".into(),
        }
    }

    /// Sets the transactions that added the column `inserted_xid` to the table. In the rows that exist at that
    /// time, PostgreSQL sets the new column to the transaction that added it. So the column does not say which
    /// transaction inserted these rows.
    #[must_use]
    pub fn with_added_xids(self, added_xids: &[u64]) -> Self {
        Self {
            added_xids: added_xids.into(),
            ..self
        }
    }

    /// Sets the suffix that follows `schema.table` in the hash of a row whose `inserted_xid` is unknown.
    ///
    /// The suffix distinguishes tables that have had the same name. If a table was dropped and created again,
    /// the new table may number its rows from 1 again. With the suffix, the new rows still get other uuids than
    /// the old rows. The first captured table of a name has an empty suffix. A later table has a suffix such as
    /// `@16402`, which contains its OID.
    #[must_use]
    pub fn with_suffix(self, suffix: &str) -> Self {
        Self {
            suffix: suffix.into(),
            ..self
        }
    }

    /// The name `schema.table`.
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// Returns the transaction that inserted the row, or `None` if that transaction is unknown. It is unknown
    /// without a value of `inserted_xid`. It is also unknown if the value is a transaction that added the
    /// column, because such a row is older than the column.
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
    /// MD5 state after hashing `schema.table:`.
    seeded: Md5,
    /// MD5 state after hashing `schema.table`, the suffix and `:`.
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

    /// Computes the `event_id` of the row with this id. `inserted_xid` is the value of the row's column of
    /// this name, or `None` for a table without that column. Both arguments are in PostgreSQL's text form.
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
    fn in_a_recreated_table_rows_without_a_transaction_id_get_new_event_ids() {
        let again = || table("public.a").with_suffix("@9");
        let without = event_uuid(again(), "7", None);
        assert_eq!(without, event_uuid(table("public.a@9"), "7", None));
        let with = event_uuid(table("public.a"), "7", Some("731"));
        assert_eq!(event_uuid(again(), "7", Some("731")), with);
        let added = again().with_added_xids(&[731]);
        assert_eq!(event_uuid(added, "7", Some("731")), without);
    }

    #[test]
    fn the_transaction_that_added_inserted_xid_does_not_change_event_ids() {
        let migrated = || table("public.a").with_added_xids(&[700, 731]);
        let without = event_uuid(table("public.a"), "7", None);
        assert_eq!(event_uuid(migrated(), "7", Some("731")), without);
        let later = event_uuid(table("public.a"), "7", Some("732"));
        assert_eq!(event_uuid(migrated(), "7", Some("732")), later);
        assert_ne!(later, without);
    }
}
