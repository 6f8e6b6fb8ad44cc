//! Describes the types of a table's columns, as far as the mapping needs them.
//!
//! PostgreSQL's stream identifies the type of a column by an OID. This module knows the common built-in
//! types; all other types must be looked up in the catalogue. A domain is treated as its base type. A value
//! of an unknown type is sent as its text.
//!
//! Not here: the query that reads the catalogue (`src/capture/table/column_types.rs`).

use std::collections::HashMap;

use decoder::{Oid, OwnedRelation};

use super::value::pg_type;

/// The common built-in types, which need no lookup: none of them is a domain, and values of all but `json` can be
/// sorted.
const USUAL: [Oid; 25] = [
    pg_type::BOOL,
    pg_type::BYTEA,
    pg_type::NAME,
    pg_type::INT8,
    pg_type::INT2,
    pg_type::INT4,
    pg_type::TEXT,
    pg_type::OID,
    pg_type::JSON,
    pg_type::FLOAT4,
    pg_type::FLOAT8,
    pg_type::MONEY,
    pg_type::INET,
    pg_type::BPCHAR,
    pg_type::VARCHAR,
    pg_type::DATE,
    pg_type::TIME,
    pg_type::TIMESTAMP,
    pg_type::TIMESTAMPTZ,
    pg_type::INTERVAL,
    pg_type::BIT,
    pg_type::NUMERIC,
    pg_type::UUID,
    pg_type::XID8,
    pg_type::JSONB,
];

/// A type that is not one of the common built-in types.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnType {
    /// The base type of a domain; otherwise the type itself.
    pub base: Oid,
    /// The name of the type.
    pub name: Box<str>,
    /// Whether values of this type can be compared and sorted with PostgreSQL's own operators.
    pub has_order: bool,
    /// Whether the type was dropped after rows with it were written. If so, `base` is the base type that the
    /// column has now. If the column was dropped too, `base` is the dropped type itself.
    pub is_dropped: bool,
}

/// The types that were looked up in the catalogue, by OID.
#[derive(Debug, Clone, Default)]
pub struct ColumnTypes(HashMap<Oid, ColumnType>);

impl ColumnTypes {
    /// Whether the type must still be looked up in the catalogue.
    pub fn is_unknown(&self, type_oid: Oid) -> bool {
        !USUAL.contains(&type_oid) && !self.0.contains_key(&type_oid)
    }

    /// Whether the type of any column must still be looked up in the catalogue.
    pub fn any_unknown(&self, relation: &OwnedRelation) -> bool {
        let mut columns = relation.columns.iter();
        columns.any(|column| self.is_unknown(column.type_oid))
    }

    /// Adds a type that was looked up in the catalogue.
    pub fn learn(&mut self, type_oid: Oid, column_type: ColumnType) {
        self.0.insert(type_oid, column_type);
    }

    /// Adds all types of `others`.
    pub fn learn_all(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    /// Returns the base type of a domain. Returns any other type unchanged.
    pub(crate) fn base(&self, type_oid: Oid) -> Oid {
        self.0.get(&type_oid).map_or(type_oid, |known| known.base)
    }

    /// Whether the type was dropped after rows with it were written.
    pub(crate) fn is_dropped(&self, type_oid: Oid) -> bool {
        self.0.get(&type_oid).is_some_and(|known| known.is_dropped)
    }

    /// Whether rows can be sorted by a column of this type.
    pub(super) fn has_order(&self, type_oid: Oid) -> bool {
        match self.0.get(&type_oid) {
            Some(known) => known.has_order,
            None => USUAL.contains(&type_oid) && type_oid != pg_type::JSON,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOMAIN: Oid = Oid(16_500);

    #[test]
    fn common_types_are_known_and_the_catalog_is_asked_about_all_others() {
        let mut types = ColumnTypes::default();
        assert!(!types.is_unknown(pg_type::UUID) && types.has_order(pg_type::UUID));
        assert!(!types.has_order(pg_type::JSON));
        assert!(types.is_unknown(DOMAIN) && !types.has_order(DOMAIN));
        assert_eq!(types.base(DOMAIN), DOMAIN, "before the catalog was asked");
        let learned = ColumnType {
            base: pg_type::UUID,
            name: "order_id".into(),
            has_order: true,
            is_dropped: false,
        };
        types.learn(DOMAIN, learned);
        assert!(!types.is_unknown(DOMAIN) && types.has_order(DOMAIN));
        assert_eq!(types.base(DOMAIN), pg_type::UUID);
    }
}
