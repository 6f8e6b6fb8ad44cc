//! Finds settings of a table that contradict each other or Pub/Sub's rules. No table can fit such settings, so they
//! are refused before there is a connection to the database.

use decoder::{Oid, OwnedColumn, OwnedRelation, ReplicaIdentity};

use super::column_types::ColumnTypes;
use super::error::MapError;
use super::mapper::Mapper;
use super::settings::{Choice, ColumnRole, TableSettings};
use super::value::pg_type;

/// The project in the names of topics during this check. Any valid project gives the same result.
const ANY_PROJECT: &str = "any-project";

impl TableSettings {
    /// Returns an error if no table can fit the settings.
    ///
    /// # Errors
    /// [`MapError::Setting`].
    pub fn refuse_contradictions(&self) -> Result<(), MapError> {
        let types = ColumnTypes::default();
        let ideal = self.ideal_table();
        Mapper::resolve(&ideal, &types, self, &self.identity(), ANY_PROJECT).map(drop)
    }

    /// A table made to fit the settings: it has every column that the settings name, each with a type that
    /// causes no error.
    fn ideal_table(&self) -> OwnedRelation {
        let mut columns: Vec<OwnedColumn> = Vec::new();
        let mut add = |name: &str, type_oid: Oid| {
            if columns.iter().all(|column| column.name != name) {
                columns.push(OwnedColumn {
                    is_key: false,
                    name: name.to_owned(),
                    type_oid,
                    type_modifier: -1,
                });
            }
        };
        for role in ColumnRole::ALL {
            let type_oid = match role {
                ColumnRole::Id => pg_type::UUID,
                ColumnRole::OccurredAt => pg_type::TIMESTAMPTZ,
                _ => pg_type::TEXT,
            };
            match self.columns.choice(role) {
                Choice::Must(name) | Choice::May(name) => add(name, type_oid),
                Choice::Off => {}
            }
        }
        let attributes = self.attributes.iter().map(String::as_str);
        for name in self.topic.columns().chain(attributes) {
            add(name, pg_type::TEXT);
        }
        OwnedRelation {
            oid: Oid(0),
            namespace: self.table.schema.clone(),
            name: self.table.name.clone(),
            replica_identity: ReplicaIdentity::Default,
            columns,
        }
    }
}
