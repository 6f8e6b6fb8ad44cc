//! Compares the columns that a publication sends with the columns that it must send.

use super::{Problem, PublicationState, PublishedTable, TableState};
use crate::QualifiedName;

/// The column with the id of the transaction that inserted the row. If a table has this column, the publication
/// must send it, because the relay computes the event ids from it.
const INSERTED_XID: &str = "inserted_xid";

impl TableState {
    /// Returns a problem if the publication does not send all needed columns of the table. An optional column
    /// is not needed if it is generated: PostgreSQL sends generated columns only on request or not at all, so
    /// the relay treats them as absent.
    pub(super) fn columns_left_out(
        &self,
        publication: &str,
        published: &PublishedTable,
    ) -> Option<Problem> {
        let sent = published.columns.as_deref()?;
        let is_generated = |column: &String| self.generated.contains(column);
        let is_usable = |column: &&String| {
            self.columns.contains(column)
                && !is_generated(column)
                && !self.never_published.contains(column)
        };
        let inserted_xid = INSERTED_XID.to_owned();
        let optional = self.wanted.optional_columns.iter().chain([&inserted_xid]);
        let needed = self.wanted.columns.iter().chain(optional.filter(is_usable));
        let columns: Vec<String> = needed
            .filter(|column| !sent.contains(column))
            .cloned()
            .collect();
        (!columns.is_empty()).then(|| Problem::ColumnsNotPublished {
            publication: publication.to_owned(),
            table: self.wanted.name.clone(),
            needs_generated: columns.iter().any(is_generated),
            by_list: published.has_column_list || !columns.iter().all(is_generated),
            columns,
        })
    }
}

impl PublicationState {
    /// Returns a problem if the table has no column `inserted_xid` yet, and the publication has a column list
    /// without this column. If somebody added the column to the table, the publication would not send it.
    #[must_use]
    pub fn would_leave_out_inserted_xid(&self, table: &QualifiedName) -> Option<Problem> {
        let table = self
            .tables
            .iter()
            .find(|state| state.wanted.name == *table)?;
        let published = table.published.as_ref()?;
        let has = |columns: &[String]| columns.iter().any(|column| column == INSERTED_XID);
        let is_left_out = published.has_column_list
            && !has(&table.columns)
            && !has(published.columns.as_deref().unwrap_or_default());
        is_left_out.then(|| Problem::ColumnsNotPublished {
            publication: self.name.clone(),
            table: table.wanted.name.clone(),
            columns: vec![INSERTED_XID.to_owned()],
            needs_generated: false,
            by_list: true,
        })
    }
}
