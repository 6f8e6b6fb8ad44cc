//! Reads an id that names its table: `schema.table:uuid`.
//!
//! The records of events with a uuid do not name a table. So the rows decide whether the table is the right one.

use uuid::Uuid;

use crate::error::{Code, Error};
use crate::settings::Settings;

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

/// Returns the error for an id `name:uuid` that nothing has been found for. `None` if the id has another form, or names
/// a captured table.
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
    /// Returns the error if the event belongs to another table.
    pub(crate) fn of_another(self, settings: &Settings, other: &str) -> Error {
        let (uuid, table) = (self.uuid, &settings.tables[self.number].table);
        let what = format!("{uuid} is an event of {other}, not of {table}");
        Error::new(Code::SettingInvalid, what).hint(format!("give {other}:{uuid}"))
    }

    /// The prefix of the source ids of the table: `schema.table:`.
    pub(crate) fn prefix(self, settings: &Settings) -> String {
        format!("{}:", settings.tables[self.number].table)
    }
}

fn parts(id: &str) -> Option<(&str, &str)> {
    let (name, uuid) = id.rsplit_once(':')?;
    Uuid::parse_str(uuid).is_ok().then_some((name, uuid))
}
