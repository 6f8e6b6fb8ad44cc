//! Finds settings of a table that contradict each other or Pub/Sub's rules. Such settings cannot work with
//! any table, so they are refused without a connection.

use decoder::{Oid, OwnedColumn, OwnedRelation, ReplicaIdentity};

use super::column_types::ColumnTypes;
use super::error::MapError;
use super::mapper::Mapper;
use super::settings::{Choice, ColumnRole, TableSettings};
use super::value::pg_type;

/// A project for the names of topics. Any valid project will do, because this check ignores the configured project.
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
