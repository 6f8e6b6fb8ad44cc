//! Builds messages as `pgoutput` does. This is the inverse of the decoder, and only for tests.
//!
//! Each message is described by a plain owned value, which proptest can generate and a round trip
//! can compare. The tests with captured messages prove that the encoder produces exactly the bytes of
//! real servers.

use decoder::{
    Begin, Commit, Lsn, Message, Oid, OldRow, OwnedRelation, PgTimestamp, ReplicaIdentity, Tuple,
    Value, frame::Frame,
};

/// A message of protocol 1 that owns its parts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OwnedMessage {
    Begin(Begin),
    Commit(Commit),
    Origin {
        commit_lsn: Lsn,
        name: String,
    },
    Relation(OwnedRelation),
    Type {
        oid: Oid,
        namespace: String,
        name: String,
    },
    Insert {
        relation: Oid,
        new: Row,
    },
    Update {
        relation: Oid,
        old: Option<Old>,
        new: Row,
    },
    Delete {
        relation: Oid,
        old: Old,
    },
    Truncate {
        cascade: bool,
        restart_identity: bool,
        relations: Vec<Oid>,
    },
    Logical {
        is_transactional: bool,
        lsn: Lsn,
        prefix: String,
        content: Vec<u8>,
    },
}

pub(crate) type Row = Vec<OwnedValue>;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OwnedValue {
    Null,
    UnchangedToast,
    Text(Vec<u8>),
    Binary(Vec<u8>),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Old {
    Key(Row),
    Full(Row),
}

impl OwnedMessage {
    /// Returns the bytes of the message.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Begin(begin) => {
                out.push(b'B');
                out.extend(begin.final_lsn.as_u64().to_be_bytes());
                out.extend(begin.commit_time.as_micros().to_be_bytes());
                out.extend(begin.xid.0.to_be_bytes());
            }
            Self::Commit(commit) => {
                out.extend([b'C', commit.flags]);
                out.extend(commit.commit_lsn.as_u64().to_be_bytes());
                out.extend(commit.end_lsn.as_u64().to_be_bytes());
                out.extend(commit.commit_time.as_micros().to_be_bytes());
            }
            Self::Origin { commit_lsn, name } => {
                out.push(b'O');
                out.extend(commit_lsn.as_u64().to_be_bytes());
                put_string(&mut out, name);
            }
            Self::Relation(relation) => put_relation(&mut out, relation),
            Self::Type {
                oid,
                namespace,
                name,
            } => put_type(&mut out, *oid, namespace, name),
            Self::Insert { relation, new } => {
                out.push(b'I');
                put_oid(&mut out, *relation);
                put_row(&mut out, b'N', new);
            }
            Self::Update { relation, old, new } => {
                out.push(b'U');
                put_oid(&mut out, *relation);
                if let Some(old) = old {
                    put_old(&mut out, old);
                }
                put_row(&mut out, b'N', new);
            }
            Self::Delete { relation, old } => {
                out.push(b'D');
                put_oid(&mut out, *relation);
                put_old(&mut out, old);
            }
            Self::Truncate {
                cascade,
                restart_identity,
                relations,
            } => {
                let flags = u8::from(*cascade) | u8::from(*restart_identity) << 1;
                put_truncate(&mut out, flags, relations);
            }
            Self::Logical {
                is_transactional,
                lsn,
                prefix,
                content,
            } => {
                out.extend([b'M', u8::from(*is_transactional)]);
                out.extend(lsn.as_u64().to_be_bytes());
                put_string(&mut out, prefix);
                put_sized(&mut out, content);
            }
        }
        out
    }
}

fn put_type(out: &mut Vec<u8>, oid: Oid, namespace: &str, name: &str) {
    out.push(b'Y');
    put_oid(out, oid);
    put_namespace(out, namespace);
    put_string(out, name);
}

fn put_truncate(out: &mut Vec<u8>, flags: u8, relations: &[Oid]) {
    out.push(b'T');
    out.extend((relations.len() as u32).to_be_bytes());
    out.push(flags);
    relations.iter().for_each(|&oid| put_oid(out, oid));
}

/// Returns the bytes of a frame.
pub(crate) fn encode_frame(frame: &Frame<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    let mut put_position = |tag: u8, lsns: &[Lsn], sent_at: PgTimestamp| {
        out.push(tag);
        lsns.iter()
            .for_each(|lsn| out.extend(lsn.as_u64().to_be_bytes()));
        out.extend(sent_at.as_micros().to_be_bytes());
    };
    match *frame {
        Frame::XLogData {
            wal_start,
            wal_end,
            sent_at,
            payload,
        } => {
            put_position(b'w', &[wal_start, wal_end], sent_at);
            out.extend(payload);
        }
        Frame::Keepalive {
            wal_end,
            sent_at,
            reply_requested,
        } => {
            put_position(b'k', &[wal_end], sent_at);
            out.push(reply_requested.into());
        }
    }
    out
}

fn put_relation(out: &mut Vec<u8>, relation: &OwnedRelation) {
    out.push(b'R');
    put_oid(out, relation.oid);
    put_namespace(out, &relation.namespace);
    put_string(out, &relation.name);
    out.push(match relation.replica_identity {
        ReplicaIdentity::Default => b'd',
        ReplicaIdentity::Nothing => b'n',
        ReplicaIdentity::Full => b'f',
        ReplicaIdentity::Index => b'i',
    });
    out.extend((relation.columns.len() as u16).to_be_bytes());
    for column in &relation.columns {
        out.push(column.is_key.into());
        put_string(out, &column.name);
        put_oid(out, column.type_oid);
        out.extend(column.type_modifier.to_be_bytes());
    }
}

fn put_old(out: &mut Vec<u8>, old: &Old) {
    match old {
        Old::Key(row) => put_row(out, b'K', row),
        Old::Full(row) => put_row(out, b'O', row),
    }
}

fn put_row(out: &mut Vec<u8>, mark: u8, row: &Row) {
    out.push(mark);
    out.extend((row.len() as u16).to_be_bytes());
    for value in row {
        match value {
            OwnedValue::Null => out.push(b'n'),
            OwnedValue::UnchangedToast => out.push(b'u'),
            OwnedValue::Text(bytes) => {
                out.push(b't');
                put_sized(out, bytes);
            }
            OwnedValue::Binary(bytes) => {
                out.push(b'b');
                put_sized(out, bytes);
            }
        }
    }
}

fn put_sized(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u32).to_be_bytes());
    out.extend(bytes);
}

fn put_oid(out: &mut Vec<u8>, oid: Oid) {
    out.extend(oid.0.to_be_bytes());
}

fn put_namespace(out: &mut Vec<u8>, namespace: &str) {
    put_string(
        out,
        if namespace == "pg_catalog" {
            ""
        } else {
            namespace
        },
    );
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend(text.as_bytes());
    out.push(0);
}

impl From<Message<'_>> for OwnedMessage {
    fn from(message: Message<'_>) -> Self {
        match message {
            Message::Begin(begin) => Self::Begin(begin),
            Message::Commit(commit) => Self::Commit(commit),
            Message::Origin(origin) => Self::Origin {
                commit_lsn: origin.commit_lsn,
                name: origin.name.to_owned(),
            },
            Message::Relation(relation) => Self::Relation(OwnedRelation::from(&relation)),
            Message::Type(it) => Self::Type {
                oid: it.oid,
                namespace: it.namespace.to_owned(),
                name: it.name.to_owned(),
            },
            Message::Insert(it) => Self::Insert {
                relation: it.relation,
                new: own(it.tuple),
            },
            Message::Update(it) => Self::Update {
                relation: it.relation,
                old: it.old.map(Old::from),
                new: own(it.new),
            },
            Message::Delete(it) => Self::Delete {
                relation: it.relation,
                old: it.old.into(),
            },
            Message::Truncate(it) => Self::Truncate {
                cascade: it.cascade,
                restart_identity: it.restart_identity,
                relations: it.relations.iter().collect(),
            },
            Message::Logical(it) => Self::Logical {
                is_transactional: it.is_transactional,
                lsn: it.lsn,
                prefix: it.prefix.to_owned(),
                content: it.content.to_owned(),
            },
        }
    }
}

impl From<OldRow<'_>> for Old {
    fn from(old: OldRow<'_>) -> Self {
        match old {
            OldRow::Key(tuple) => Self::Key(own(tuple)),
            OldRow::Full(tuple) => Self::Full(own(tuple)),
        }
    }
}

fn own(tuple: Tuple<'_>) -> Row {
    let row: Row = tuple
        .iter()
        .map(|value| match value {
            Value::Null => OwnedValue::Null,
            Value::UnchangedToast => OwnedValue::UnchangedToast,
            Value::Text(bytes) => OwnedValue::Text(bytes.to_owned()),
            Value::Binary(bytes) => OwnedValue::Binary(bytes.to_owned()),
        })
        .collect();
    assert_eq!(
        row.len(),
        tuple.len(),
        "a tuple has as many values as its length says"
    );
    row
}
