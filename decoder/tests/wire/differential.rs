//! Compares our decoder, field by field, with the independent decoder `pg_walstream`. The inputs are all
//! captured messages, generated messages, and damaged messages that our decoder accepts.
//!
//! These tests cannot find an error that both decoders share. The tests in `captured.rs` can, because
//! they compare with values that the server itself reported.

use decoder::frame::{Frame, decode_frame};
use decoder::{
    Begin, Commit, Lsn, Oid, OwnedColumn, OwnedRelation, PgTimestamp, ReplicaIdentity, Xid, decode,
};
use pg_walstream::{
    LogicalReplicationMessage as Theirs, LogicalReplicationParser, TupleData,
    parse_keepalive_message,
};
use proptest::prelude::*;

use crate::encoder::{Old, OwnedMessage, OwnedValue, Row, encode_frame};
use crate::fixture::every_scenario;
use crate::made_up;

/// Decodes with `pg_walstream`, and converts the result to our types; `None` if `pg_walstream` refuses the
/// message.
fn other(payload: &[u8]) -> Option<OwnedMessage> {
    let mut parser = LogicalReplicationParser::with_protocol_version(1);
    in_our_terms(parser.parse_wal_message(payload).ok()?.message)
}

/// Converts a message to our types; `None` for a message that protocol 1 does not have.
fn in_our_terms(message: Theirs) -> Option<OwnedMessage> {
    Some(match message {
        Theirs::Begin {
            final_lsn,
            timestamp,
            xid,
        } => OwnedMessage::Begin(Begin {
            final_lsn: Lsn::new(final_lsn),
            commit_time: PgTimestamp::from_micros(timestamp),
            xid: Xid(xid),
        }),
        Theirs::Commit {
            flags,
            commit_lsn,
            end_lsn,
            timestamp,
        } => OwnedMessage::Commit(Commit {
            flags,
            commit_lsn: Lsn::new(commit_lsn),
            end_lsn: Lsn::new(end_lsn),
            commit_time: PgTimestamp::from_micros(timestamp),
        }),
        Theirs::Origin {
            origin_lsn,
            origin_name,
        } => OwnedMessage::Origin {
            commit_lsn: Lsn::new(origin_lsn),
            name: origin_name,
        },
        Theirs::Relation {
            relation_id,
            namespace,
            relation_name,
            replica_identity,
            columns,
        } => OwnedMessage::Relation(OwnedRelation {
            oid: Oid(relation_id),
            namespace: schema(&namespace),
            name: relation_name.to_string(),
            replica_identity: identity(replica_identity)?,
            columns: columns
                .into_iter()
                .map(|column| OwnedColumn {
                    is_key: column.is_key(),
                    name: column.name.to_string(),
                    type_oid: Oid(column.type_id),
                    type_modifier: column.type_modifier,
                })
                .collect(),
        }),
        Theirs::Type {
            type_id,
            namespace,
            type_name,
        } => OwnedMessage::Type {
            oid: Oid(type_id),
            namespace: schema(&namespace),
            name: type_name,
        },
        other => return change_in_our_terms(other),
    })
}

/// Converts row changes and logical messages to our types; `None` for any other message.
fn change_in_our_terms(message: Theirs) -> Option<OwnedMessage> {
    Some(match message {
        Theirs::Insert { relation_id, tuple } => OwnedMessage::Insert {
            relation: Oid(relation_id),
            new: row(&tuple)?,
        },
        Theirs::Update {
            relation_id,
            old_tuple,
            new_tuple,
            key_type,
        } => OwnedMessage::Update {
            relation: Oid(relation_id),
            old: match (key_type, old_tuple) {
                (Some(kind), Some(tuple)) => Some(old(kind, &tuple)?),
                _ => None,
            },
            new: row(&new_tuple)?,
        },
        Theirs::Delete {
            relation_id,
            old_tuple,
            key_type,
        } => OwnedMessage::Delete {
            relation: Oid(relation_id),
            old: old(key_type, &old_tuple)?,
        },
        Theirs::Truncate {
            relation_ids,
            flags,
        } => OwnedMessage::Truncate {
            cascade: flags & 1 != 0,
            restart_identity: flags & 2 != 0,
            relations: relation_ids.into_iter().map(Oid).collect(),
        },
        Theirs::Message {
            flags,
            lsn,
            prefix,
            content,
        } => OwnedMessage::Logical {
            is_transactional: flags & 1 != 0,
            lsn: Lsn::new(lsn),
            prefix,
            content: content.to_vec(),
        },
        _ => return None,
    })
}

/// Converts a schema name to the form of our decoder. On the wire, the empty string stands for `pg_catalog`.
/// Our decoder returns `pg_catalog`, and `pg_walstream` returns the empty string.
fn schema(namespace: &str) -> String {
    match namespace {
        "" => "pg_catalog".to_owned(),
        other => other.to_owned(),
    }
}

fn identity(letter: u8) -> Option<ReplicaIdentity> {
    Some(match letter {
        b'd' => ReplicaIdentity::Default,
        b'n' => ReplicaIdentity::Nothing,
        b'f' => ReplicaIdentity::Full,
        b'i' => ReplicaIdentity::Index,
        _ => return None,
    })
}

fn old(kind: char, tuple: &TupleData) -> Option<Old> {
    Some(match kind {
        'K' => Old::Key(row(tuple)?),
        'O' => Old::Full(row(tuple)?),
        _ => return None,
    })
}

fn row(tuple: &TupleData) -> Option<Row> {
    let value = |column: &pg_walstream::ColumnData| {
        Some(match column.data_type {
            b'n' => OwnedValue::Null,
            b'u' => OwnedValue::UnchangedToast,
            b't' => OwnedValue::Text(column.as_bytes().to_vec()),
            b'b' => OwnedValue::Binary(column.as_bytes().to_vec()),
            _ => return None,
        })
    };
    tuple.columns.iter().map(value).collect()
}

#[test]
fn another_decoder_agrees_on_every_captured_message() {
    let mut compared = 0;
    for (major, name, messages) in every_scenario() {
        for message in messages {
            let ours = OwnedMessage::from(decode(&message.payload).unwrap());
            assert_eq!(Some(ours), other(&message.payload), "{name} of pg{major}");
            compared += 1;
        }
    }
    assert!(compared > 500, "only {compared} messages were captured");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5_000))]

    #[test]
    fn another_decoder_agrees_on_every_generated_message(message in made_up::message()) {
        let payload = message.encode();
        prop_assert_eq!(Some(OwnedMessage::from(decode(&payload)?)), other(&payload));
    }

    /// `pg_walstream` is more lenient than our decoder, so it can accept messages that our decoder refuses.
    /// But it must accept every message that our decoder accepts, with the same result.
    #[test]
    fn another_decoder_agrees_on_every_damaged_message_that_ours_accepts(
        message in made_up::message(),
        place: prop::sample::Index,
        byte: u8,
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut payload = message.encode();
        let at = place.index(payload.len());
        payload[at] = byte;
        if let Some(cut) = cut {
            payload.truncate(cut.index(payload.len()) + 1);
        }
        if let Ok(ours) = decode(&payload) {
            prop_assert_eq!(Some(OwnedMessage::from(ours)), other(&payload));
        }
    }

    #[test]
    fn another_decoder_agrees_on_every_keepalive(
        wal_end in made_up::lsn(), sent_at in made_up::timestamp(), reply_requested: bool,
    ) {
        let body = encode_frame(&Frame::Keepalive { wal_end, sent_at, reply_requested });
        let theirs = parse_keepalive_message(&body).unwrap();
        let theirs = Frame::Keepalive {
            wal_end: Lsn::new(theirs.wal_end),
            sent_at: PgTimestamp::from_micros(theirs.timestamp),
            reply_requested: theirs.reply_requested,
        };
        prop_assert_eq!(decode_frame(&body)?, theirs);
    }
}
