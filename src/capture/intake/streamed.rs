//! A captured table as the stream needs it. The log may have rows of earlier tables with the same name.

use decoder::{Oid, OwnedColumn, OwnedRelation};
use outbox_event::TableIdentity;

use crate::mapping::{INSERTED_XID, TableSettings};
use crate::store::capture_record::IdSuffixes;

/// A table of the settings, with the properties that the stream needs.
#[derive(Debug)]
pub(crate) struct Streamed {
    pub(crate) settings: TableSettings,
    /// The table's current OID.
    pub(crate) oid: Oid,
    pub(crate) identity: TableIdentity,
    /// The suffixes in the event ids of earlier tables in the log. `None` if all tables have the same event
    /// ids.
    pub(crate) id_suffixes: Option<IdSuffixes>,
    /// Whether every row has a value in `inserted_xid`, so that event ids may depend on that value.
    pub(crate) always_has_inserted_xid: bool,
}

impl Streamed {
    /// The name in event ids for the table with this OID, which may be an earlier table of the same name.
    pub(super) fn identity_of(&self, relation: Oid) -> TableIdentity {
        match &self.id_suffixes {
            Some(suffixes) if relation != self.oid => {
                self.identity.clone().with_suffix(&suffixes.of(relation.0))
            }
            _ => self.identity.clone(),
        }
    }

    /// Whether the identity in the event ids of a relation's rows is known. The caller needs it only if the
    /// ids are not uuids.
    pub(super) fn is_certain(&self, relation: &OwnedRelation) -> bool {
        relation.oid == self.oid
            || place_of_inserted_xid(relation).is_some()
            || self
                .id_suffixes
                .as_ref()
                .is_none_or(|suffixes| suffixes.knows(relation.oid.0))
    }
}

/// The position of the column `inserted_xid`, if the relation has one.
pub(super) fn place_of_inserted_xid(relation: &OwnedRelation) -> Option<usize> {
    const XID8: Oid = Oid(5069);
    let is_it = |column: &OwnedColumn| column.name == INSERTED_XID && column.type_oid == XID8;
    relation.columns.iter().position(is_it)
}
