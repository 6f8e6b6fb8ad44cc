//! `Type`: the name of a data type that is not built into PostgreSQL.

use crate::Oid;
use crate::error::DecodeError;
use crate::reader::Reader;
use crate::relation::read_namespace;

/// Names a data type (an enum, a domain, or a type of an extension). The server sends it before a
/// Relation whose columns refer to the type by OID. For a domain, the server sends the domain's OID
/// with the name of the domain's base type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Type<'a> {
    /// The type's OID, as in [`Column::type_oid`](crate::Column).
    pub oid: Oid,
    /// The schema.
    pub namespace: &'a str,
    /// The type's name within the schema.
    pub name: &'a str,
}

impl<'a> Type<'a> {
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(Self {
            oid: reader.oid("the OID of the type (4 bytes)")?,
            namespace: read_namespace(reader)?,
            name: reader.string("the name of the type (string)")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Message, decode};

    #[test]
    fn a_type_is_named_with_its_schema() {
        let expected = Type {
            oid: Oid(16_390),
            namespace: "shop",
            name: "mood",
        };
        assert_eq!(
            decode(b"Y\0\0\x40\x06shop\0mood\0"),
            Ok(Message::Type(expected))
        );
    }
}
