//! `Relation`: the description of a table, which the server sends before changes to that table.

use std::iter::FusedIterator;

use crate::error::DecodeError;
use crate::reader::Reader;
use crate::{MessageKind, Oid};

/// Describes a table. The server sends it before the first change to the table in a session, and
/// again after anything that could have changed the table, even if nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relation<'a> {
    /// The OID by which changes refer to the table.
    pub oid: Oid,
    /// The table's schema. This field is `pg_catalog` if the string on the wire is empty, because
    /// PostgreSQL sends an empty string for that schema.
    pub namespace: &'a str,
    /// The table's name within the schema.
    pub name: &'a str,
    /// Which parts of the old row an UPDATE or a DELETE includes.
    pub replica_identity: ReplicaIdentity,
    /// The published columns. The tuples that follow have their columns in the same order.
    pub columns: Columns<'a>,
}

/// Which parts of the old row the server writes to the WAL for an UPDATE or a DELETE
/// (`pg_class.relreplident`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicaIdentity {
    /// The columns of the primary key.
    Default,
    /// Nothing.
    Nothing,
    /// All columns.
    Full,
    /// The columns of a chosen unique index.
    Index,
}

/// One column of a [`Relation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column<'a> {
    /// Whether the column belongs to the replica identity.
    pub is_key: bool,
    /// The column's name.
    pub name: &'a str,
    /// The column's data type (`pg_type.oid`).
    pub type_oid: Oid,
    /// The modifier of the data type (`pg_attribute.atttypmod`), such as the length of a `varchar`;
    /// -1 if there is none.
    pub type_modifier: i32,
}

/// The columns of a [`Relation`]. Each iteration parses them again, so no memory is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns<'a> {
    count: u16,
    body: &'a [u8],
}

impl<'a> Relation<'a> {
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(Self {
            oid: reader.oid("the OID of the relation (4 bytes)")?,
            namespace: read_namespace(reader)?,
            name: reader.string("the name of the relation (string)")?,
            replica_identity: ReplicaIdentity::read(reader)?,
            columns: Columns::read(reader)?,
        })
    }
}

/// Reads the name of a schema. An empty string on the wire means `pg_catalog`.
pub(crate) fn read_namespace<'a>(reader: &mut Reader<'a>) -> Result<&'a str, DecodeError> {
    let name = reader.string("the name of the schema (string)")?;
    Ok(if name.is_empty() { "pg_catalog" } else { name })
}

impl ReplicaIdentity {
    fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        const EXPECTED: &str = "a replica identity d, n, f or i (1 byte)";
        match reader.u8(EXPECTED)? {
            b'd' => Ok(Self::Default),
            b'n' => Ok(Self::Nothing),
            b'f' => Ok(Self::Full),
            b'i' => Ok(Self::Index),
            other => Err(reader.unexpected(EXPECTED, other)),
        }
    }
}

impl<'a> Column<'a> {
    /// The flag that marks a column of the replica identity.
    const KEY: u8 = 1;

    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(Self {
            is_key: reader.flags("the flags of a column (1 byte)", Self::KEY)? == Self::KEY,
            name: reader.string("the name of a column (string)")?,
            type_oid: reader.oid("the OID of a column's type (4 bytes)")?,
            type_modifier: reader.i32("the type modifier of a column (4 bytes)")?,
        })
    }
}

impl<'a> Columns<'a> {
    /// Reads the columns from `reader` and checks each of them.
    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let count = reader.column_count("the number of columns (2 bytes)")?;
        let start = reader.rest();
        for _ in 0..count {
            Column::read(reader)?;
        }
        Ok(Self {
            count,
            body: &start[..start.len() - reader.rest().len()],
        })
    }

    /// Number of published columns.
    pub fn len(&self) -> usize {
        self.count.into()
    }

    /// Whether there are no columns. PostgreSQL allows that (`CREATE TABLE t ()`).
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Iterates over the columns in the table's order.
    pub fn iter(&self) -> ColumnIter<'a> {
        ColumnIter {
            remaining: self.count,
            reader: Reader::new(MessageKind::Relation, self.body),
        }
    }
}

impl<'a> IntoIterator for Columns<'a> {
    type Item = Column<'a>;
    type IntoIter = ColumnIter<'a>;

    fn into_iter(self) -> ColumnIter<'a> {
        self.iter()
    }
}

impl<'a> IntoIterator for &Columns<'a> {
    type Item = Column<'a>;
    type IntoIter = ColumnIter<'a>;

    fn into_iter(self) -> ColumnIter<'a> {
        self.iter()
    }
}

/// Iterates over the columns of a relation. Decoding has already checked all of them.
#[derive(Debug, Clone)]
pub struct ColumnIter<'a> {
    remaining: u16,
    reader: Reader<'a>,
}

impl<'a> Iterator for ColumnIter<'a> {
    type Item = Column<'a>;

    fn next(&mut self) -> Option<Column<'a>> {
        self.remaining = self.remaining.checked_sub(1)?;
        Column::read(&mut self.reader).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let remaining = usize::from(self.remaining);
        (remaining, Some(remaining))
    }
}

impl ExactSizeIterator for ColumnIter<'_> {}
impl FusedIterator for ColumnIter<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fault, Message, decode};

    const PAYLOAD: &[u8] = b"R\0\0\x40\0outbox\0events\0d\0\x02\
        \x01id\0\0\0\x0B\x86\xFF\xFF\xFF\xFF\
        \0topic\0\0\0\x04\x13\0\0\0\x44";

    #[test]
    fn a_relation_lists_its_columns_in_order() {
        let Ok(Message::Relation(relation)) = decode(PAYLOAD) else {
            panic!("not a relation")
        };
        assert_eq!(relation.oid, Oid(16_384));
        assert_eq!((relation.namespace, relation.name), ("outbox", "events"));
        assert_eq!(relation.replica_identity, ReplicaIdentity::Default);
        assert_eq!(relation.columns.len(), 2);
        let columns: Vec<Column<'_>> = relation.columns.iter().collect();
        let id = Column {
            is_key: true,
            name: "id",
            type_oid: Oid(2950),
            type_modifier: -1,
        };
        let topic = Column {
            is_key: false,
            name: "topic",
            type_oid: Oid(1043),
            type_modifier: 68,
        };
        assert_eq!(columns, [id, topic]);
    }

    #[test]
    fn the_empty_schema_name_means_pg_catalog() {
        let Ok(Message::Relation(relation)) = decode(b"R\0\0\0\x01\0pg_class\0n\0\0") else {
            panic!("not a relation")
        };
        assert_eq!(relation.namespace, "pg_catalog");
        assert!(relation.columns.is_empty());
    }

    #[test]
    fn every_replica_identity_is_known_and_others_are_refused() {
        for (byte, expected) in [
            (b'd', ReplicaIdentity::Default),
            (b'n', ReplicaIdentity::Nothing),
            (b'f', ReplicaIdentity::Full),
            (b'i', ReplicaIdentity::Index),
        ] {
            let payload = [b"R\0\0\0\x01s\0t\0".as_slice(), &[byte], b"\0\0"].concat();
            let Ok(Message::Relation(relation)) = decode(&payload) else {
                panic!("{byte}")
            };
            assert_eq!(relation.replica_identity, expected);
        }
        let refused = decode(b"R\0\0\0\x01s\0t\0x\0\0").unwrap_err();
        assert_eq!(
            (refused.offset, refused.fault),
            (9, Fault::UnexpectedByte { found: b'x' })
        );
    }

    #[test]
    fn a_column_count_beyond_the_input_is_refused_at_the_first_missing_column() {
        let refused = decode(b"R\0\0\0\x01s\0t\0d\x7F\xFF").unwrap_err();
        assert_eq!(refused.offset, 12);
        assert_eq!(
            refused.fault,
            Fault::Truncated {
                needed: 1,
                available: 0
            }
        );
    }
}
