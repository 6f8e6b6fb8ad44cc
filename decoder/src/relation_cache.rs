//! Stores the relations that the server has described in the current session.
//!
//! The server repeats a Relation whenever something *might* have changed, for example after an
//! `ANALYZE`. The cache compares each new description with the previous one. So code that derives
//! something from a relation, such as column positions, needs to derive it again only if the
//! relation has really changed.

use std::collections::HashMap;

use crate::{Column, Oid, Relation, ReplicaIdentity};

/// Owned copies of the described relations, by OID.
///
/// The cache holds one entry per relation that the server has described in the session.
#[derive(Debug, Clone, Default)]
pub struct RelationCache {
    relations: HashMap<Oid, OwnedRelation>,
}

/// The effect of an [`insert`](RelationCache::insert) on the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "values derived from the relation are out of date unless it is unchanged"]
pub enum CacheChange {
    /// The relation was new.
    Added,
    /// The relation was known, and its description is the same.
    Unchanged,
    /// The relation was known, and its name, replica identity or columns have changed.
    Redefined,
}

/// A [`Relation`] that owns its names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedRelation {
    /// The OID by which changes refer to the table.
    pub oid: Oid,
    /// The table's schema.
    pub namespace: String,
    /// The table's name within the schema.
    pub name: String,
    /// Which parts of the old row an UPDATE or a DELETE includes.
    pub replica_identity: ReplicaIdentity,
    /// The published columns. Tuples have their columns in the same order.
    pub columns: Vec<OwnedColumn>,
}

/// A [`Column`] that owns its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedColumn {
    /// Whether the column belongs to the replica identity.
    pub is_key: bool,
    /// The column's name.
    pub name: String,
    /// The column's data type (`pg_type.oid`).
    pub type_oid: Oid,
    /// The modifier of the data type (`pg_attribute.atttypmod`); -1 if there is none.
    pub type_modifier: i32,
}

impl RelationCache {
    /// Creates an empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// Stores `relation`, and replaces an earlier description with the same OID.
    pub fn insert(&mut self, relation: &Relation<'_>) -> CacheChange {
        match self.relations.get_mut(&relation.oid) {
            Some(known) if known.describes(relation) => CacheChange::Unchanged,
            Some(known) => {
                *known = OwnedRelation::from(relation);
                CacheChange::Redefined
            }
            None => {
                self.relations
                    .insert(relation.oid, OwnedRelation::from(relation));
                CacheChange::Added
            }
        }
    }

    /// Returns the relation with this OID, if the server has described it.
    pub fn get(&self, oid: Oid) -> Option<&OwnedRelation> {
        self.relations.get(&oid)
    }

    /// Iterates over all relations, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &OwnedRelation> {
        self.relations.values()
    }

    /// Number of relations in the cache.
    pub fn len(&self) -> usize {
        self.relations.len()
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.relations.is_empty()
    }

    /// Removes everything. Call this after each reconnect, because an OID can belong to another table in the
    /// new session. The server describes all relations again in each session.
    pub fn clear(&mut self) {
        self.relations.clear();
    }
}

impl OwnedRelation {
    /// Whether `relation` is equal to this stored description. Allocates nothing.
    fn describes(&self, relation: &Relation<'_>) -> bool {
        let Self {
            oid,
            namespace,
            name,
            replica_identity,
            columns,
        } = self;
        *oid == relation.oid
            && namespace == relation.namespace
            && name == relation.name
            && *replica_identity == relation.replica_identity
            && columns
                .iter()
                .map(OwnedColumn::borrowed)
                .eq(relation.columns)
    }
}

impl From<&Relation<'_>> for OwnedRelation {
    fn from(relation: &Relation<'_>) -> Self {
        Self {
            oid: relation.oid,
            namespace: relation.namespace.to_owned(),
            name: relation.name.to_owned(),
            replica_identity: relation.replica_identity,
            columns: relation.columns.iter().map(OwnedColumn::from).collect(),
        }
    }
}

impl OwnedColumn {
    fn borrowed(&self) -> Column<'_> {
        let Self {
            is_key,
            ref name,
            type_oid,
            type_modifier,
        } = *self;
        Column {
            is_key,
            name,
            type_oid,
            type_modifier,
        }
    }
}

impl From<Column<'_>> for OwnedColumn {
    fn from(column: Column<'_>) -> Self {
        let Column {
            is_key,
            name,
            type_oid,
            type_modifier,
        } = column;
        Self {
            is_key,
            name: name.to_owned(),
            type_oid,
            type_modifier,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Message, decode};

    /// Builds a Relation for the table `s.t` with OID 5. Its columns have the type `text` and are
    /// not part of the replica identity.
    fn payload(replica_identity: u8, columns: &[&str]) -> Vec<u8> {
        let mut payload = b"R\0\0\0\x05s\0t\0".to_vec();
        payload.extend([replica_identity, 0, columns.len() as u8]);
        for name in columns {
            payload.push(0);
            payload.extend(name.as_bytes());
            payload.extend(b"\0\0\0\0\x19\xFF\xFF\xFF\xFF");
        }
        payload
    }

    fn insert(cache: &mut RelationCache, payload: &[u8]) -> CacheChange {
        match decode(payload) {
            Ok(Message::Relation(relation)) => cache.insert(&relation),
            other => panic!("not a relation: {other:?}"),
        }
    }

    #[test]
    fn a_repeated_relation_is_unchanged_and_a_different_one_is_redefined() {
        let mut cache = RelationCache::new();
        assert_eq!(
            insert(&mut cache, &payload(b'd', &["a"])),
            CacheChange::Added
        );
        assert_eq!(
            insert(&mut cache, &payload(b'd', &["a"])),
            CacheChange::Unchanged
        );
        assert_eq!(
            insert(&mut cache, &payload(b'd', &["a", "b"])),
            CacheChange::Redefined
        );
        assert_eq!(
            insert(&mut cache, &payload(b'd', &["b", "a"])),
            CacheChange::Redefined
        );
        assert_eq!(
            insert(&mut cache, &payload(b'f', &["b", "a"])),
            CacheChange::Redefined
        );
        assert_eq!(
            insert(&mut cache, &payload(b'f', &["b"])),
            CacheChange::Redefined
        );
        let names: Vec<_> = cache
            .get(Oid(5))
            .unwrap()
            .columns
            .iter()
            .map(|c| &c.name)
            .collect();
        assert_eq!(names, ["b"]);
        assert_eq!(cache.len(), 1);
    }

    #[test]
    fn after_clear_every_relation_is_new() {
        let mut cache = RelationCache::new();
        assert_eq!(
            insert(&mut cache, &payload(b'd', &["a"])),
            CacheChange::Added
        );
        cache.clear();
        assert!(cache.is_empty());
        assert_eq!(cache.get(Oid(5)), None);
        assert_eq!(
            insert(&mut cache, &payload(b'd', &["a"])),
            CacheChange::Added
        );
    }
}
