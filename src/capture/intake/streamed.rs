//! The properties of a captured table that the intake needs to map its rows. Some of them concern earlier
//! tables of the same name, because the WAL may also contain rows of those tables.

use decoder::{Oid, OwnedColumn, OwnedRelation};
use slot_manager::QualifiedName;
use slot_manager::table::PresentColumn;

use super::{Intake, MappedTable, unknown};
use crate::capture::session_records::identity_of;
use crate::error::{Code, Error, Result};
use crate::mapping::{ColumnTypes, INSERTED_XID, Mapper, TableSettings};

/// A configured table, with the properties that the intake needs.
#[derive(Debug)]
pub(crate) struct Streamed {
    pub(crate) settings: TableSettings,
    /// The table's current OID.
    pub(crate) oid: Oid,
    /// Whether every row has a value in `inserted_xid`. Only then may event ids depend on that value.
    pub(crate) always_has_inserted_xid: bool,
    /// The columns that the table had when the session began.
    pub(crate) columns: Vec<String>,
}

impl Streamed {
    /// Whether the stream's description of the table lacks an optional column that the table had when the session
    /// began. (The settings use an optional column only if the table has it.)
    pub(super) fn may_be_incomplete(&self, relation: &OwnedRelation) -> bool {
        let mut optional = self.settings.optional_columns().into_iter();
        relation.oid == self.oid
            && optional.any(|name| self.columns.contains(&name) && !has(relation, &name))
    }

    /// Checks a table that the stream describes without one of the table's optional columns. Returns an error if rows
    /// may have been inserted with a value in the missing column. Without the error, the relay would publish these rows
    /// without that value. `now` has the columns that the table has now.
    ///
    /// A column can be missing in the stream for three reasons:
    ///
    /// - The publication leaves the column out. This is an error.
    /// - Somebody renamed or replaced a column. This is an error.
    /// - The column was added after the rows were inserted. This is not an error.
    ///
    /// PostgreSQL puts a new column after all existing columns. So this function accepts a missing column as new only
    /// if the table still has every column that the stream describes, and the missing column comes after all of them.
    pub(super) fn refuse_incomplete(
        &self,
        relation: &OwnedRelation,
        now: &[PresentColumn],
    ) -> Result<()> {
        if !self.may_be_incomplete(relation) {
            return Ok(());
        }
        let optional = self.settings.optional_columns();
        let is_lacking = |column: &PresentColumn| {
            optional.contains(&column.name) && !has(relation, &column.name)
        };
        let place_of = |name: &str| now.iter().position(|column| column.name == name);
        let last_place = relation
            .columns
            .iter()
            .map(|column| place_of(&column.name))
            .try_fold(0, |last, place| Some(last.max(place?)));
        let is_appended = |column: &PresentColumn| {
            last_place.is_some_and(|last| place_of(&column.name) > Some(last))
        };
        let lacking = now
            .iter()
            .filter(|column| is_lacking(column))
            .find(|column| !column.is_published || !is_appended(column));
        let Some(column) = lacking else {
            return Ok(());
        };
        let what = format!(
            "PostgreSQL sends rows of table {} without the column {:?}",
            self.settings.table, column.name
        );
        Err(Error::new(Code::ColumnMissing, what))
    }

    /// Returns an error if a column that the settings use had a type that was dropped since the rows were written.
    /// The type may have been a domain, so the text form of the values is unknown. Only the table has the values in
    /// a known type.
    pub(super) fn refuse_dropped_types(
        &self,
        relation: &OwnedRelation,
        types: &ColumnTypes,
    ) -> Result<()> {
        let used = [
            self.settings.required_columns(),
            self.settings.optional_columns(),
        ]
        .concat();
        let is_unreadable = |column: &&OwnedColumn| {
            used.contains(&column.name) && types.is_dropped(column.type_oid)
        };
        let unreadable = relation.columns.iter().find(is_unreadable);
        let Some(column) = unreadable.filter(|_| relation.oid == self.oid) else {
            return Ok(());
        };
        let what = format!(
            "PostgreSQL sends rows of table {} from before the type of the column {:?} was dropped",
            self.settings.table, column.name
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
    /// Finds a captured table and its index in the settings, by OID or else by name. WAL from before a
    /// rename has the table's old name, and WAL from before the table was created again has its old OID.
    pub(super) fn captured(&self, relation: &OwnedRelation) -> Option<(usize, &Streamed)> {
        let mut all = self.captured.iter().enumerate();
        all.clone()
            .find(|(_, table)| table.oid == relation.oid)
            .or_else(|| all.find(|(_, table)| table.has_name_of(relation)))
    }

    /// Whether the relation has the name of a captured table.
    pub(super) fn names_a_table(&self, relation: &OwnedRelation) -> bool {
        self.captured
            .iter()
            .any(|table| table.has_name_of(relation))
    }

    /// Resolves the mapping of a relation with the settings of `table`, which is at the index `number`. The relation
    /// may be an earlier table of the same name. The event ids then depend on the capture record of that table.
    pub(super) fn resolve(
        &self,
        relation: &OwnedRelation,
        number: usize,
        table: &Streamed,
    ) -> Result<MappedTable> {
        let settings = &table.settings;
        let (record, identity) = match self.records.of(relation.oid, number) {
            Some((record, known)) => (record, identity_of(known, relation.oid)),
            None => (number, settings.identity()),
        };
        let mapper = Mapper::resolve(relation, &self.types, settings, &identity, &self.project)?;
        let inserted_xid = index_of_inserted_xid(relation);
        let is_hashed = !mapper.table_columns().id_is_uuid;
        // An earlier or later table of this name might not have the column, so check only the claimed table.
        let always_has = table.always_has_inserted_xid && relation.oid == table.oid;
        if always_has && is_hashed && inserted_xid.is_none() {
            let name = &settings.table;
            let what = format!(
                "PostgreSQL sends rows of table {name} without the column {INSERTED_XID:?}, from which \
                 their event ids are computed"
            );
            return Err(Error::new(Code::ColumnMissing, what)
                .hint("add it to the publication's column list of that table, or drop the list"));
        }
        Ok(MappedTable {
            mapper,
            record,
            inserted_xid,
        })
    }

    /// Returns the present name of the captured table to which the relation belongs, or `None` if there is
    /// no such table.
    pub(crate) fn table_of(&self, relation: Oid) -> Option<&QualifiedName> {
        let (_, streamed) = self.captured(self.relations.get(relation)?)?;
        Some(&streamed.settings.table)
    }

    /// Returns an error if the stream describes the table without an optional column, although rows may have been
    /// inserted with a value in this column. `now` has the present columns of the table.
    ///
    /// # Errors
    /// `column-missing`.
    pub(crate) fn refuse_incomplete(&self, relation: Oid, now: &[PresentColumn]) -> Result<()> {
        let known = self
            .relations
            .get(relation)
            .ok_or_else(|| unknown(relation))?;
        let captured = self.captured(known);
        captured.map_or(Ok(()), |(_, streamed)| {
            streamed.refuse_incomplete(known, now)
        })
    }
}

fn has(relation: &OwnedRelation, name: &str) -> bool {
    relation.columns.iter().any(|column| column.name == name)
}

/// The index of the column `inserted_xid`, if the relation has one.
fn index_of_inserted_xid(relation: &OwnedRelation) -> Option<usize> {
    const XID8: Oid = Oid(5069);
    let is_it = |column: &OwnedColumn| column.name == INSERTED_XID && column.type_oid == XID8;
    relation.columns.iter().position(is_it)
}
