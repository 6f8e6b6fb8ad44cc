//! The properties of a captured table that the intake needs to map its rows. Some of them concern earlier
//! tables of the same name, because the WAL may also contain rows of those tables.

use decoder::{Oid, OwnedColumn, OwnedRelation};
use outbox_event::TableIdentity;
use slot_manager::QualifiedName;

use super::{Intake, unknown};
use crate::error::{Code, Error, Result};
use crate::mapping::{INSERTED_XID, TableSettings};
use crate::store::capture_record::IdSuffixes;

/// A configured table, with the properties that the intake needs.
#[derive(Debug)]
pub(crate) struct Streamed {
    pub(crate) settings: TableSettings,
    /// The table's current OID.
    pub(crate) oid: Oid,
    pub(crate) identity: TableIdentity,
    /// The suffixes in the event ids of earlier tables of this name. `None` if these event ids need no
    /// suffix, as in a benchmark.
    pub(crate) id_suffixes: Option<IdSuffixes>,
    /// Whether every row has a value in `inserted_xid`. Only then may event ids depend on that value.
    pub(crate) always_has_inserted_xid: bool,
    /// The columns that the table had when the session began.
    pub(crate) columns: Vec<String>,
}

impl Streamed {
    /// The identity for the event ids of the table with this OID, which may be an earlier table of the same
    /// name.
    pub(super) fn identity_of(&self, relation: Oid) -> TableIdentity {
        match &self.id_suffixes {
            Some(suffixes) if relation != self.oid => {
                self.identity.clone().with_suffix(&suffixes.of(relation.0))
            }
            _ => self.identity.clone(),
        }
    }

    /// Whether the stream may describe the table as it was before somebody renamed an optional column. This is
    /// possible if the description lacks an optional column, but has a column that the table did not have when
    /// the session began. (The settings use an optional column only if the table has it.)
    pub(super) fn may_be_renamed(&self, relation: &OwnedRelation) -> bool {
        let optional = self.settings.optional_columns();
        relation.oid == self.oid
            && !optional.iter().all(|name| has(relation, name))
            && !relation
                .columns
                .iter()
                .all(|column| self.columns.contains(&column.name))
    }

    /// Returns an error if the stream describes the table as it was before somebody renamed an optional column.
    /// Without the error, the rows would be published without this column. `now` has the columns that the table
    /// has now.
    ///
    /// A rename keeps the type and the place of a column. So if the description lacks an optional column, this
    /// function looks for the old name: a column of the same type that no longer exists, and that follows the same
    /// unchanged column. If there is none, the optional column was added later, and the older rows rightly lack it.
    pub(super) fn refuse_renamed(
        &self,
        relation: &OwnedRelation,
        now: &[OwnedColumn],
    ) -> Result<()> {
        let optional = self.settings.optional_columns();
        let kept = |column: &OwnedColumn| {
            has_column(&relation.columns, &column.name) && has_column(now, &column.name)
        };
        let new = with_predecessors(now, kept)
            .filter(|(column, _)| optional.contains(&column.name) && !has(relation, &column.name));
        let mut renamed = new.filter_map(|(new, behind)| {
            let gone = |(old, old_behind): &(&OwnedColumn, Option<&str>)| {
                !has_column(now, &old.name) && old.type_oid == new.type_oid && *old_behind == behind
            };
            let (old, _) = with_predecessors(&relation.columns, kept).find(gone)?;
            Some((old, new))
        });
        let Some((old, new)) = renamed.next() else {
            return Ok(());
        };
        let what = format!(
            "PostgreSQL sends rows of table {} from before somebody renamed the column {:?} to {:?}",
            self.settings.table, old.name, new.name
        );
        Err(Error::new(Code::ColumnMissing, what))
    }

    pub(super) fn has_name_of(&self, relation: &OwnedRelation) -> bool {
        let table = &self.settings.table;
        table.schema == relation.namespace && table.name == relation.name
    }

    /// Whether the relation has the OID and the name with which the session has claimed the table.
    pub(super) fn is_claimed(&self, relation: &OwnedRelation) -> bool {
        relation.oid == self.oid && self.has_name_of(relation)
    }
}

impl Intake {
    /// Returns the present name of the captured table to which the relation belongs, or `None` if there is
    /// no such table.
    pub(crate) fn table_of(&self, relation: Oid) -> Option<&QualifiedName> {
        let (_, streamed) = self.captured(self.relations.get(relation)?)?;
        Some(&streamed.settings.table)
    }

    /// Returns an error if the rows of the relation were inserted before somebody renamed an optional column. `now`
    /// has the present columns of the table.
    ///
    /// # Errors
    /// `column-missing`.
    pub(crate) fn refuse_renamed(&self, relation: Oid, now: &[OwnedColumn]) -> Result<()> {
        let known = self
            .relations
            .get(relation)
            .ok_or_else(|| unknown(relation))?;
        let captured = self.captured(known);
        captured.map_or(Ok(()), |(_, streamed)| streamed.refuse_renamed(known, now))
    }
}

fn has(relation: &OwnedRelation, name: &str) -> bool {
    has_column(&relation.columns, name)
}

fn has_column(columns: &[OwnedColumn], name: &str) -> bool {
    columns.iter().any(|column| column.name == name)
}

/// Returns each column, with the name of the last column before it for which `is_kept` is true.
fn with_predecessors(
    columns: &[OwnedColumn],
    is_kept: impl Fn(&OwnedColumn) -> bool,
) -> impl Iterator<Item = (&OwnedColumn, Option<&str>)> {
    columns
        .iter()
        .scan(None, move |last: &mut Option<&str>, column| {
            let behind = *last;
            if is_kept(column) {
                *last = Some(&column.name);
            }
            Some((column, behind))
        })
}

/// The index of the column `inserted_xid`, if the relation has one.
pub(super) fn index_of_inserted_xid(relation: &OwnedRelation) -> Option<usize> {
    const XID8: Oid = Oid(5069);
    let is_it = |column: &OwnedColumn| column.name == INSERTED_XID && column.type_oid == XID8;
    relation.columns.iter().position(is_it)
}
