//! Strategies that generate any message of protocol 1.

use decoder::{
    Begin, Commit, Lsn, Oid, OwnedColumn, OwnedRelation, PgTimestamp, ReplicaIdentity, Xid,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use crate::encoder::{Old, OwnedMessage, OwnedValue, Row};

pub(crate) fn message() -> impl Strategy<Value = OwnedMessage> {
    prop_oneof![
        (lsn(), timestamp(), any::<u32>()).prop_map(|(final_lsn, commit_time, xid)| {
            OwnedMessage::Begin(Begin {
                final_lsn,
                commit_time,
                xid: Xid(xid),
            })
        }),
        (lsn(), lsn(), timestamp()).prop_map(|(commit_lsn, end_lsn, commit_time)| {
            OwnedMessage::Commit(Commit {
                flags: 0,
                commit_lsn,
                end_lsn,
                commit_time,
            })
        }),
        (lsn(), name()).prop_map(|(commit_lsn, name)| OwnedMessage::Origin { commit_lsn, name }),
        relation(any::<u32>()).prop_map(OwnedMessage::Relation),
        (oid(), name(), name()).prop_map(|(oid, namespace, name)| OwnedMessage::Type {
            oid,
            namespace,
            name
        }),
        (oid(), row()).prop_map(|(relation, new)| OwnedMessage::Insert { relation, new }),
        (oid(), option::of(old()), row()).prop_map(|(relation, old, new)| OwnedMessage::Update {
            relation,
            old,
            new
        }),
        (oid(), old()).prop_map(|(relation, old)| OwnedMessage::Delete { relation, old }),
        (any::<bool>(), any::<bool>(), vec(oid(), 0..8)).prop_map(
            |(cascade, restart_identity, relations)| OwnedMessage::Truncate {
                cascade,
                restart_identity,
                relations
            }
        ),
        (any::<bool>(), lsn(), name(), content()).prop_map(
            |(is_transactional, lsn, prefix, content)| OwnedMessage::Logical {
                is_transactional,
                lsn,
                prefix,
                content
            }
        ),
    ]
}

/// Generates a relation. `oid` generates its OID.
pub(crate) fn relation(oid: impl Strategy<Value = u32>) -> impl Strategy<Value = OwnedRelation> {
    (oid, name(), name(), replica_identity(), vec(column(), 0..6)).prop_map(
        |(oid, namespace, name, replica_identity, columns)| OwnedRelation {
            oid: Oid(oid),
            namespace,
            name,
            replica_identity,
            columns,
        },
    )
}

fn column() -> impl Strategy<Value = OwnedColumn> {
    (any::<bool>(), name(), oid(), any::<i32>()).prop_map(
        |(is_key, name, type_oid, type_modifier)| OwnedColumn {
            is_key,
            name,
            type_oid,
            type_modifier,
        },
    )
}

fn replica_identity() -> impl Strategy<Value = ReplicaIdentity> {
    prop_oneof![
        Just(ReplicaIdentity::Default),
        Just(ReplicaIdentity::Nothing),
        Just(ReplicaIdentity::Full),
        Just(ReplicaIdentity::Index),
    ]
}

fn old() -> impl Strategy<Value = Old> {
    prop_oneof![row().prop_map(Old::Key), row().prop_map(Old::Full)]
}

fn row() -> impl Strategy<Value = Row> {
    vec(value(), 0..12)
}

fn value() -> impl Strategy<Value = OwnedValue> {
    prop_oneof![
        Just(OwnedValue::Null),
        Just(OwnedValue::UnchangedToast),
        content().prop_map(OwnedValue::Text),
        content().prop_map(OwnedValue::Binary),
    ]
}

fn content() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..40)
}

/// Generates any name that PostgreSQL allows: not empty, and without a zero byte.
fn name() -> impl Strategy<Value = String> {
    "[^\0]{1,12}"
}

pub(crate) fn lsn() -> impl Strategy<Value = Lsn> {
    any::<u64>().prop_map(Lsn::new)
}

pub(crate) fn timestamp() -> impl Strategy<Value = PgTimestamp> {
    any::<i64>().prop_map(PgTimestamp::from_micros)
}

fn oid() -> impl Strategy<Value = Oid> {
    any::<u32>().prop_map(Oid)
}
