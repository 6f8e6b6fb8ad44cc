//! The identity of an event.
//!
//! The dispatch table and the subscribers know events by uuid. A uuid id is that uuid. Any other id
//! (a `bigserial`, a text) becomes `md5('schema.table:' || id || ':' || inserted_xid)` read as a
//! uuid: the same on every run, different for each table, and the same that
//! `outbox.event_uuid('schema.table', id, inserted_xid)` gives in SQL. The transaction is part of it,
//! since a table that was made anew may number its rows from 1 again; a table without that column
//! has the id alone. Whether an id is hashed depends on the column's type alone, never on the value:
//! SQL has to agree.

use std::fmt;
use std::sync::Arc;

use md5::{Digest, Md5};
use slot_manager::QualifiedName;
use uuid::Uuid;

use super::EventPosition;
use super::error::EventFault;
use crate::printable::printable;

/// Characters of an id that logs, errors and the records of other events show.
pub(crate) const SHOWN_CHARS: usize = 128;

/// Characters of a uuid as text.
pub(super) const UUID_CHARS: usize = uuid::fmt::Hyphenated::LENGTH;

/// The name, `schema.table`, that stands for a table in the identities of its events.
///
/// Events whose ids are not uuids are known by it, so that it has to stay the same as long as the
/// table is captured, whatever the table is called meanwhile.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TableIdentity {
    name: Arc<str>,
    added_xids: Arc<[u64]>,
}

impl TableIdentity {
    /// The identity that was fixed earlier.
    pub fn new(schema_and_table: &str) -> Self {
        Self {
            name: schema_and_table.into(),
            added_xids: Arc::default(),
        }
    }

    /// The same table, whose rows show one of these transactions in `inserted_xid` when they are older
    /// than that column.
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

    /// What `inserted_xid` tells of a row, if it tells something.
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
    /// The identity of a table that is captured under this name for the first time.
    fn from(table: &QualifiedName) -> Self {
        Self::new(&format!("{}.{}", table.schema, table.name))
    }
}

impl fmt::Display for TableIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

/// The identity of an event, as the dispatch table records it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EventId {
    /// The 16 bytes of the uuid, in the order in which it is written.
    pub uuid: [u8; 16],
    /// `schema.table:id` when the id is not a uuid, else `None`.
    pub source_id: Option<Box<str>>,
}

impl EventId {
    /// The identity of a row whose id cannot be read: its place in the log, as
    /// `schema.table@commit LSN/ordinal`.
    pub(super) fn of_place(table: &TableIdentity, at: EventPosition) -> Self {
        let source_id = format!("{table}@{}/{}", at.commit_lsn, at.ordinal);
        Self {
            uuid: Md5::digest(&source_id).into(),
            source_id: Some(source_id.into()),
        }
    }

    /// The uuid as the attribute `event_id` carries it.
    pub(super) fn uuid_text<'b>(&self, buffer: &'b mut [u8; UUID_CHARS]) -> &'b str {
        Uuid::from_bytes(self.uuid)
            .hyphenated()
            .encode_lower(buffer)
    }

    /// Its text, as far as it is shown to people.
    pub(crate) fn shown(&self) -> String {
        let start: String = self.to_string().chars().take(SHOWN_CHARS).collect();
        printable(&start).into_owned()
    }

    /// Bytes of its text where it is not a uuid: there is no bound on them.
    pub(crate) fn text_bytes(&self) -> usize {
        self.source_id.as_deref().map_or(0, str::len)
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source_id {
            Some(source_id) => f.write_str(source_id),
            None => Uuid::from_bytes(self.uuid).fmt(f),
        }
    }
}

/// How the id column of one table becomes an [`EventId`].
#[derive(Debug, Clone)]
pub(super) enum EventIds {
    /// The column is a uuid.
    Uuid,
    /// It is something else.
    Hashed {
        /// `schema.table:`
        prefix: Box<str>,
        /// MD5 that has taken in the prefix.
        seeded: Md5,
        table: TableIdentity,
    },
}

impl EventIds {
    /// For a table, by its identity and whether its id column has the type uuid.
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

    /// Whether it takes the transaction that inserted a row to tell its event from others.
    pub(super) fn need_xid(&self) -> bool {
        matches!(self, Self::Hashed { .. })
    }

    /// The identity of the event with this id, in a row that this transaction inserted.
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
    fn of_a_long_id_only_so_much_is_shown_as_people_read() {
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
    fn a_uuid_column_without_a_uuid_is_an_error_that_names_it() {
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
