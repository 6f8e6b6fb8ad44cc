//! Puts arbitrary sequences of messages into the relation cache, and compares the cache with a
//! plain map.
//!
//! The input is a sequence of payloads. Each is preceded by its length in two bytes. A length of
//! zero stands for a reconnect.

use std::collections::HashMap;

use decoder::{CacheChange, Message, OwnedRelation, RelationCache, decode};

/// Panics if the cache and the map differ.
pub(crate) fn check_input(input: &[u8]) {
    let mut cache = RelationCache::new();
    let mut model = HashMap::new();
    let mut rest = input;
    while let Some((length, behind)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_be_bytes(*length)).min(behind.len());
        let (payload, behind) = behind.split_at(length);
        rest = behind;
        if payload.is_empty() {
            cache.clear();
            model.clear();
        } else if let Ok(Message::Relation(relation)) = decode(payload) {
            let change = cache.insert(&relation);
            let described = OwnedRelation::from(&relation);
            let expected = match model.insert(relation.oid, described.clone()) {
                None => CacheChange::Added,
                Some(known) if known == described => CacheChange::Unchanged,
                Some(_) => CacheChange::Redefined,
            };
            assert_eq!(change, expected);
            assert_eq!(cache.get(relation.oid), Some(&described));
        }
        assert_eq!(cache.len(), model.len());
    }
}
