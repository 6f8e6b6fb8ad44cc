//! Reads an id that names its table: `schema.table:uuid`.
//!
//! The record of an event with a uuid does not name the event's table. So only the row itself shows whether
//! the named table is the right one. If the named table has the row, the commands do not touch the other captured
//! tables, which may be locked or unreadable. Otherwise they look for the row in those of the other tables that they
//! can read.

use std::time::Duration;

use uuid::Uuid;

use super::rows;
use crate::error::{Code, Error, Result};
use crate::ops;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::dispatch::history::RecordedRow;

/// How long to wait for a lock on a table other than the named one.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

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
    /// Checks that the event with this uuid can belong to the named table. If no table has a row with this uuid
    /// now, the event may have belonged to any table. Returns the table's identity.
    ///
    /// # Errors
    /// `setting-invalid` if the row is in another table; database errors.
    pub(crate) async fn check_row(self, sql: &Sql, settings: &Settings) -> Result<String> {
        let table = rows::one(sql, settings, self.number).await?;
        if table.rows(sql, self.number, self.uuid).await?.is_empty() {
            self.refuse_row_elsewhere(sql, settings).await?;
        }
        Ok(table.captured.record.identity)
    }

    /// Looks for the event's row in the captured tables other than the named one. Skips a table that is locked or
    /// cannot be read, because the command is not about that table. If no table has the row, restores the session's
    /// lock timeout.
    ///
    /// In a table whose ids are not uuids, the id of a row may happen to have the text of this uuid. Such a row belongs
    /// to another event, because its event id is computed and differs from the uuid. So the search ignores the row.
    ///
    /// # Errors
    /// `setting-invalid` if another table has the row; database errors.
    pub(super) async fn refuse_row_elsewhere(self, sql: &Sql, settings: &Settings) -> Result<()> {
        let uuid = Uuid::parse_str(self.uuid).ok();
        sql.limit_lock_waits(LOCK_TIMEOUT).await?;
        for number in (0..settings.tables.len()).filter(|n| *n != self.number) {
            let searching = async {
                let table = rows::one(sql, settings, number).await?;
                table.rows(sql, number, self.uuid).await
            };
            let found = searching.await.unwrap_or_default();
            if found.iter().any(|row| Some(row.event_id) == uuid) {
                let table = settings.tables[number].table.to_string();
                let right = format!("{table}:{}", self.uuid);
                return Err(self.of_another(settings, &table, &right));
            }
        }
        sql.limit_lock_waits(ops::LOCK_TIMEOUT).await
    }

    /// Returns the error for an event that belongs to the table `other` instead of the named table. `right` is the id
    /// that the user should give: the event's id with the right table.
    fn of_another(self, settings: &Settings, other: &str, right: &str) -> Error {
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
