//! What the types of a table's columns are, as far as the mapping has to know it.
//!
//! A column is described by the oid of its type. The usual built-in types are known here. Everything
//! else is the catalog's to tell: a domain behaves as the type that it is made from, and the others
//! go out as their text.
//!
//! Not here: the statement that asks the catalog (`src/table/column_types.rs`).

use std::collections::HashMap;

use decoder::{Oid, OwnedRelation};

use super::value::pg_type;

/// The usual built-in types: none is a domain, and all but `json` have an order.
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

/// A type that is not one of the usual ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnType {
    /// The type that it behaves as: what a domain is made from in the end, any other type itself.
    pub base: Oid,
    /// What it is called.
    pub name: Box<str>,
    /// Whether rows can be put in order by a single value of it.
    pub has_order: bool,
}

/// The types that were asked for, by oid.
#[derive(Debug, Clone, Default)]
pub struct ColumnTypes(HashMap<Oid, ColumnType>);

impl ColumnTypes {
    /// Whether the catalog has to be asked for a type.
    pub fn is_unknown(&self, type_oid: Oid) -> bool {
        !USUAL.contains(&type_oid) && !self.0.contains_key(&type_oid)
    }

    /// Whether the catalog has to be asked for the type of any column.
    pub fn any_unknown(&self, relation: &OwnedRelation) -> bool {
        let mut columns = relation.columns.iter();
        columns.any(|column| self.is_unknown(column.type_oid))
    }

    /// Adds a type that was asked for.
    pub fn learn(&mut self, type_oid: Oid, column_type: ColumnType) {
        self.0.insert(type_oid, column_type);
    }

    /// Adds all that `others` has.
    pub fn learn_all(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    /// The type that values of this type behave as.
    pub(crate) fn base(&self, type_oid: Oid) -> Oid {
        self.0.get(&type_oid).map_or(type_oid, |known| known.base)
    }

    /// Whether rows can be put in order by a column of this type.
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
    fn the_usual_types_are_known_and_all_others_are_asked_for() {
        let mut types = ColumnTypes::default();
        assert!(!types.is_unknown(pg_type::UUID) && types.has_order(pg_type::UUID));
        assert!(!types.has_order(pg_type::JSON));
        assert!(types.is_unknown(DOMAIN) && !types.has_order(DOMAIN));
        assert_eq!(types.base(DOMAIN), DOMAIN, "until it is known");
        let learned = ColumnType {
            base: pg_type::UUID,
            name: "order_id".into(),
            has_order: true,
        };
        types.learn(DOMAIN, learned);
        assert!(!types.is_unknown(DOMAIN) && types.has_order(DOMAIN));
        assert_eq!(types.base(DOMAIN), pg_type::UUID);
    }
}
