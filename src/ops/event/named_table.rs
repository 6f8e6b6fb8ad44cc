//! Reads an id that names its table: `schema.table:uuid`.
//!
//! The record of an event with a uuid does not name the event's table. So only the row itself shows whether
//! the named table is the right one.

use uuid::Uuid;

use crate::error::{Code, Error, Result};
use crate::settings::Settings;
use crate::store::dispatch::history::RecordedRow;

/// A captured table, as an index into `Settings::tables`, and the uuid of one of its events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NamedTable<'a> {
    pub(crate) number: usize,
    pub(crate) uuid: &'a str,
}

/// Reads `schema.table:uuid`. Returns `None` if the text does not have this form or the table is not captured.
pub(crate) fn read<'a>(settings: &Settings, id: &'a str) -> Option<NamedTable<'a>> {
    let (name, uuid) = parts(id)?;
    let mut tables = settings.tables.iter();
    let number = tables.position(|table| table.table.to_string() == name)?;
    Some(NamedTable { number, uuid })
}

/// Returns the error for an id `name:uuid` that matches no event. `None` if the id has another form, or if
/// `name` is a captured table.
pub(crate) fn unknown(settings: &Settings, id: &str) -> Option<Error> {
    let (name, uuid) = parts(id)?;
    let tables: Vec<String> = settings
        .tables
        .iter()
        .map(|t| t.table.to_string())
        .collect();
    if tables.iter().any(|table| table == name) {
        return None;
    }
    let what = format!("the event {id} names no captured table");
    let hint = format!(
        "the captured tables are {}; or give only the uuid {uuid}",
        tables.join(", ")
    );
    Some(Error::new(Code::SettingInvalid, what).hint(hint))
}

impl NamedTable<'_> {
    /// Returns the error for an event that belongs to the table `other`. `right` is the id with this table.
    pub(crate) fn of_another(self, settings: &Settings, other: &str, right: &str) -> Error {
        let (uuid, table) = (self.uuid, &settings.tables[self.number].table);
        let what = format!("{uuid} is an event of {other}, not of {table}");
        Error::new(Code::SettingInvalid, what).hint(format!("give {right}"))
    }

    /// Removes the records whose source ids belong to other tables.
    ///
    /// # Errors
    /// The error of [`Self::check`] for the first removed record.
    pub(crate) fn keep_own(
        self,
        settings: &Settings,
        identity: &str,
        records: &mut Vec<RecordedRow>,
    ) -> Result<()> {
        let mut first = Ok(());
        records.retain(|record| {
            let source_id = record.source_id.as_deref();
            let checked = source_id.map_or(Ok(()), |id| self.check(settings, identity, id));
            let is_own = checked.is_ok();
            first = std::mem::replace(&mut first, Ok(())).and(checked);
            is_own
        });
        first
    }

    /// Checks that the source id of an event belongs to the table. Source ids begin with the table's
    /// `identity`, which stays the same when the table is renamed.
    ///
    /// # Errors
    /// `setting-invalid` if the source id belongs to another table.
    pub(crate) fn check(self, settings: &Settings, identity: &str, source_id: &str) -> Result<()> {
        let name = settings.tables[self.number].table.to_string();
        let begins_with = |table: &str| {
            let rest = source_id.strip_prefix(table);
            rest.is_some_and(|rest| rest.starts_with([':', '@']))
        };
        if begins_with(identity) || begins_with(&name) {
            return Ok(());
        }
        let other = source_id.split([':', '@']).next().unwrap_or(source_id);
        Err(self.of_another(settings, other, source_id))
    }
}

fn parts(id: &str) -> Option<(&str, &str)> {
    let (name, uuid) = id.rsplit_once(':')?;
    Uuid::parse_str(uuid).is_ok().then_some((name, uuid))
}
