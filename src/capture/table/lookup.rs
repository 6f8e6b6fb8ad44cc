//! Writes SQL expressions for commands that read rows of a captured table without making messages of
//! them. The expressions select the row with an id that a person has typed, and return the name and the
//! time of a row's event.

use slot_manager::quoted_literal;

use super::TableReader;
use crate::capture::claim::Captured;
use crate::mapping::{INSERTED_XID, TimeKind};

impl TableReader {
    /// Returns the condition that a row of `e` has this id. `id` is the text of the id as PostgreSQL
    /// prints it. The condition can use an index on the column if the type has an order. PostgreSQL
    /// refuses the statement if the text does not fit the type, for example `x` for a number.
    pub(crate) fn has_id_sql(&self, id: &str) -> String {
        let (column, id) = (&self.id, quoted_literal(id));
        match (&self.source_prefix, self.id_has_order) {
            (None, _) => format!("{column} = {id}::uuid"),
            // Some types have equal values with different texts, such as 1.0 and 1.00.
            (Some(_), true) => format!("{column} = {id} and format('%s', {column}) = {id}"),
            (Some(_), false) => format!("format('%s', {column}) = {id}"),
        }
    }

    /// Whether the conditions on ids can use an index on the id column, if there is one.
    pub(crate) fn finds_ids_by_index(&self) -> bool {
        self.source_prefix.is_none() || self.id_has_order
    }

    /// Returns the id in a source id `schema.table:id`. Returns `None` if the source id belongs to
    /// another table, or if the ids of this table are uuids.
    pub(crate) fn id_in<'s>(&self, source_id: &'s str) -> Option<&'s str> {
        source_id.strip_prefix(self.source_prefix.as_deref()?)
    }

    /// The prefix `schema.table:` in source ids of this table; `None` if the table's ids are uuids.
    pub(crate) fn source_prefix(&self) -> Option<&str> {
        self.source_prefix.as_deref()
    }

    /// The name of the column with the ids.
    pub(crate) fn id_column(&self) -> &str {
        self.mapper.table_columns().id
    }

    /// The expression for the name of a row's event: its uuid, or `schema.table:id`.
    pub(crate) fn name_sql(&self) -> String {
        match &self.source_prefix {
            None => format!("{}::text", self.id),
            Some(prefix) => format!("{} || format('%s', {})", quoted_literal(prefix), self.id),
        }
    }

    /// The expression for the time when a row's event happened, with time zone. `None` when the table
    /// has no column with that point in time.
    pub(crate) fn happened_at_sql(&self) -> Option<String> {
        let column = format!(
            "e.{}",
            slot_manager::quoted_identifier(&self.columns[self.occurred_at?].name)
        );
        match self.mapper.table_columns().time_kind {
            TimeKind::Instant => Some(column),
            TimeKind::Utc => Some(format!("{column} at time zone 'UTC'")),
            TimeKind::Unknown => None,
        }
    }
}

/// The expression for the column `inserted_xid` of a row of `e`, as text; null without the column.
pub(crate) fn inserted_xid_text(captured: &Captured) -> String {
    if captured.shape.has_inserted_xid {
        format!("e.{INSERTED_XID}::text")
    } else {
        "null::text".to_owned()
    }
}
