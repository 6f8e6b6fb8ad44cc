//! The identity of an event.
//!
//! The dispatch table and the subscribers identify events by uuid. If the id is a uuid, it is used
//! as it is. Any other id (a `bigserial`, a text) becomes
//! `md5('schema.table:' || id || ':' || inserted_xid)` read as a uuid. This uuid is the same on
//! every run, differs between tables, and equals the result of
//! `outbox.event_uuid('schema.table', id, inserted_xid)` in SQL. The transaction is included
//! because a table that was dropped and created again may number its rows from 1 again. For a table
//! without the column `inserted_xid`, only the id is hashed. Whether an id is hashed depends on the
//! column's type alone, never on the value, because SQL has to agree.

use std::fmt;
use std::sync::Arc;

use md5::{Digest, Md5};
use slot_manager::QualifiedName;
use uuid::Uuid;

use super::error::EventFault;
use crate::event::{EventId, EventPosition};

/// The name `schema.table` that identifies a table in the ids of its events.
///
/// Event ids that are not uuids are derived from it. So it has to stay the same for as long as the
/// table is captured, even if the table is renamed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TableIdentity {
    name: Arc<str>,
    added_xids: Arc<[u64]>,
}

impl TableIdentity {
    /// An identity that was fixed earlier.
    pub fn new(schema_and_table: &str) -> Self {
        Self {
            name: schema_and_table.into(),
            added_xids: Arc::default(),
        }
    }

    /// Adds the transactions that created the column `inserted_xid`. Rows older than that column
    /// all show one of these transactions in it.
    #[must_use]
    pub fn with_added_xids(self, added_xids: &[u64]) -> Self {
        Self {
            added_xids: added_xids.into(),
            ..self
        }
    }

    /// `schema.table`.
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// The value of `inserted_xid`, unless it only says that the row is older than the column.
    fn told<'x>(&self, inserted_xid: Option<&'x str>) -> Option<&'x str> {
        let is_told = |xid: &&str| {
            self.added_xids.is_empty()
                || !xid
                    .parse()
                    .is_ok_and(|xid: u64| self.added_xids.contains(&xid))
        };
        inserted_xid.filter(is_told)
    }
}

impl From<&QualifiedName> for TableIdentity {
    /// The identity of a table that is captured for the first time, under this name.
    fn from(table: &QualifiedName) -> Self {
        Self::new(&format!("{}.{}", table.schema, table.name))
    }
}

impl fmt::Display for TableIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

/// The identity of a row whose id cannot be read. It is made from the position in the log, as
/// `schema.table@commit LSN/ordinal`.
pub(super) fn id_of_place(table: &TableIdentity, at: EventPosition) -> EventId {
    let source_id = format!("{table}@{}/{}", at.commit_lsn, at.ordinal);
    EventId {
        uuid: Md5::digest(&source_id).into(),
        source_id: Some(source_id.into()),
    }
}

/// How the id column of one table becomes an [`EventId`].
#[derive(Debug, Clone)]
pub(super) enum EventIds {
    /// The column is a uuid.
    Uuid,
    /// The column has another type.
    Hashed {
        /// `schema.table:`
        prefix: Box<str>,
        /// MD5 state after the prefix.
        seeded: Md5,
        table: TableIdentity,
    },
}

impl EventIds {
    /// For a table with this identity. `is_uuid` says whether its id column has type uuid.
    pub(super) fn new(table: &TableIdentity, is_uuid: bool) -> Self {
        if is_uuid {
            return Self::Uuid;
        }
        let prefix = format!("{table}:");
        let seeded = Md5::new_with_prefix(&prefix);
        Self::Hashed {
            prefix: prefix.into(),
            seeded,
            table: table.clone(),
        }
    }

    /// Whether the transaction that inserted a row is part of the event's identity.
    pub(super) fn need_xid(&self) -> bool {
        matches!(self, Self::Hashed { .. })
    }

    /// The identity of an event, from its id and from the transaction that inserted its row.
    pub(super) fn event_id(
        &self,
        id: &str,
        inserted_xid: Option<&str>,
        column: &str,
    ) -> Result<EventId, EventFault> {
        match self {
            Self::Uuid => match Uuid::try_parse_ascii(id.as_bytes()) {
                Ok(uuid) => Ok(EventId {
                    uuid: uuid.into_bytes(),
                    source_id: None,
                }),
                Err(_) => Err(EventFault::UuidMalformed {
                    column: column.to_owned(),
                }),
            },
            Self::Hashed {
                prefix,
                seeded,
                table,
            } => {
                let mut hash = seeded.clone().chain_update(id);
                if let Some(xid) = table.told(inserted_xid) {
                    hash = hash.chain_update(":").chain_update(xid);
                }
                Ok(EventId {
                    uuid: hash.finalize().into(),
                    source_id: Some([prefix, id].concat().into()),
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::SHOWN_CHARS;

    #[test]
    fn a_uuid_id_is_the_event_id_itself() {
        let text = "5a246b35-2bea-4931-9cfc-3e071ccb09c0";
        let id = EventIds::new(&TableIdentity::new("outbox.events"), true)
            .event_id(text, None, "id")
            .unwrap();
        assert_eq!(id.uuid[..4], [0x5a, 0x24, 0x6b, 0x35]);
        assert_eq!(id.source_id, None);
        assert_eq!(id.to_string(), text);
    }

    #[test]
    fn a_long_id_is_shortened_for_display() {
        let ids = EventIds::new(&TableIdentity::new("public.a"), false);
        let id = ids.event_id(&"\u{e9}".repeat(100_000), None, "id").unwrap();
        assert_eq!(id.shown().chars().count(), SHOWN_CHARS);
        assert!(id.to_string().starts_with(&id.shown()));
    }

    #[test]
    fn any_other_id_is_hashed_as_sql_hashes_it() {
        // select md5('public.a:7')::uuid
        let id = EventIds::new(&TableIdentity::new("public.a"), false)
            .event_id("7", None, "id")
            .unwrap();
        let expected = Uuid::parse_str("c7bc7e8d-cd25-14db-6df3-35ec723877bc").unwrap();
        assert_eq!(id.uuid, expected.into_bytes());
        assert_eq!(id.source_id.as_deref(), Some("public.a:7"));
        assert_eq!(id.to_string(), "public.a:7");
    }

    #[test]
    fn the_same_id_in_two_tables_is_two_events() {
        let of = |table| {
            EventIds::new(&TableIdentity::new(table), false)
                .event_id("7", None, "id")
                .unwrap()
        };
        assert_ne!(of("public.a").uuid, of("public.b").uuid);
    }

    #[test]
    fn a_value_that_is_not_a_uuid_in_a_uuid_column_is_an_error_that_names_the_column() {
        let refused = EventIds::new(&TableIdentity::new("t"), true)
            .event_id("seven", None, "key")
            .unwrap_err();
        assert_eq!(
            refused,
            EventFault::UuidMalformed {
                column: "key".to_owned()
            }
        );
    }
}
