//! Checks that the relation cache behaves like a plain map.

use std::collections::HashMap;

use decoder::{CacheChange, Message, Oid, OwnedRelation, RelationCache, decode};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::encoder::OwnedMessage;
use crate::made_up;

#[derive(Debug, Clone)]
enum Step {
    Insert(OwnedRelation),
    /// The server sends the same description of a relation again.
    Repeat(Oid),
    /// The server describes a relation again, without its last column.
    DropColumn(Oid),
    Reconnect,
}

fn step() -> impl Strategy<Value = Step> {
    let few_oids = || 0..4_u32;
    prop_oneof![
        4 => made_up::relation(few_oids()).prop_map(Step::Insert),
        4 => few_oids().prop_map(|oid| Step::Repeat(Oid(oid))),
        2 => few_oids().prop_map(|oid| Step::DropColumn(Oid(oid))),
        1 => Just(Step::Reconnect),
    ]
}

/// Puts `relation` into `cache`, encoded and decoded as if the server had sent it.
fn describe(cache: &mut RelationCache, relation: &OwnedRelation) -> CacheChange {
    let payload = OwnedMessage::Relation(relation.clone()).encode();
    match decode(&payload) {
        Ok(Message::Relation(relation)) => cache.insert(&relation),
        other => panic!("not a relation: {other:?}"),
    }
}

proptest! {
    #[test]
    fn the_cache_behaves_like_a_map(steps in vec(step(), 0..40)) {
        let mut cache = RelationCache::new();
        let mut model: HashMap<Oid, OwnedRelation> = HashMap::new();
        for step in steps {
            let described = match step {
                Step::Insert(relation) => Some(relation),
                Step::Repeat(oid) => model.get(&oid).cloned(),
                Step::DropColumn(oid) => model.get(&oid).cloned().map(|mut relation| {
                    relation.columns.pop();
                    relation
                }),
                Step::Reconnect => {
                    cache.clear();
                    model.clear();
                    None
                }
            };
            if let Some(relation) = described {
                let expected = match model.get(&relation.oid) {
                    None => CacheChange::Added,
                    Some(known) if *known == relation => CacheChange::Unchanged,
                    Some(_) => CacheChange::Redefined,
                };
                prop_assert_eq!(describe(&mut cache, &relation), expected);
                model.insert(relation.oid, relation);
            }
            prop_assert_eq!(cache.len(), model.len());
            for oid in (0..4).map(Oid) {
                prop_assert_eq!(cache.get(oid), model.get(&oid));
            }
        }
    }
}
