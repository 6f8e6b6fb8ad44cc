//! Computes the identity of an event.
//!
//! If the id column is a uuid, this uuid identifies the event. Any other id is hashed to a uuid
//! ([`EventUuids`]); the dispatch table then also records the id as text, `schema.table:id`.

use md5::{Digest, Md5};
use outbox_event::{EventUuids, TableIdentity};
use uuid::Uuid;

use super::error::EventFault;
use crate::event::{EventId, EventPosition};

/// Returns the identity of an event whose id cannot be read: a hash of the event's position, written as
/// `schema.table@commit LSN/ordinal`.
pub(super) fn id_of_position(table: &TableIdentity, at: EventPosition) -> EventId {
    let source_id = format!("{table}@{}/{}", at.commit.lsn(), at.ordinal);
    EventId {
        uuid: Md5::digest(&source_id).into(),
        source_id: Some(source_id.into()),
    }
}

/// The rule by which an id of one table becomes an [`EventId`].
#[derive(Debug, Clone)]
pub(super) enum EventIds {
    /// The column is a uuid.
    Uuid,
    /// The column has another type.
    Hashed {
        /// `schema.table:`
        prefix: Box<str>,
        uuids: Box<EventUuids>,
    },
}

impl EventIds {
    /// Creates the rule for a table with this identity. `is_uuid` says whether the table's id column has
    /// the type uuid.
    pub(super) fn new(table: &TableIdentity, is_uuid: bool) -> Self {
        if is_uuid {
            return Self::Uuid;
        }
        Self::Hashed {
            prefix: format!("{table}:").into(),
            uuids: Box::new(EventUuids::new(table)),
        }
    }

    /// Whether an event id is computed from the row's `inserted_xid` as well as its id. If the table has no such
    /// column, the id alone is used.
    pub(super) fn need_xid(&self) -> bool {
        matches!(self, Self::Hashed { .. })
    }

    /// Computes the identity of an event, from its id and from the transaction that inserted its row.
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
            Self::Hashed { prefix, uuids } => Ok(EventId {
                uuid: uuids.event_uuid(id, inserted_xid).into_bytes(),
                source_id: Some([prefix, id].concat().into()),
            }),
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
    fn any_other_id_is_hashed_and_also_kept_as_text() {
        // The expected value is the result of: select md5('public.a:7')::uuid
        let id = EventIds::new(&TableIdentity::new("public.a"), false)
            .event_id("7", None, "id")
            .unwrap();
        let expected = Uuid::parse_str("c7bc7e8d-cd25-14db-6df3-35ec723877bc").unwrap();
        assert_eq!(id.uuid, expected.into_bytes());
        assert_eq!(id.source_id.as_deref(), Some("public.a:7"));
        assert_eq!(id.to_string(), "public.a:7");
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
