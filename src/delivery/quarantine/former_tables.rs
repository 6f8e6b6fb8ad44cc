//! Looks up the rows of released events in former tables, such as detached partitions and tables that were
//! renamed away. An event keeps its row there, so it can be released although its captured table no longer
//! has the row.

use std::sync::Arc;
use std::time::Duration;

use decoder::Lsn;
use slot_manager::{SlotName, quoted_identifier, table};

use crate::capture::claim;
use crate::capture::detached::{self, DetachedTable};
use crate::capture::rows;
use crate::capture::table::{RowValues, TableReader};
use crate::error::{Code, Error, Result};
use crate::event::EventRef;
use crate::mapping::TableSettings;
use crate::postgres::{Sql, limiting_lock_waits};

/// How long a search waits for a lock on a former table.
const LOCK_LIMIT: Duration = Duration::from_secs(1);

/// Maximum number of unreadable tables that an error names.
const NAMED: usize = 3;

/// The former tables of the captured tables.
#[derive(Debug)]
pub(super) struct FormerTables {
    slot: SlotName,
    captured: Vec<TableSettings>,
    project: Arc<str>,
    /// Whether the list of former tables was read since [`page_begins`](Self::page_begins).
    is_current: bool,
    /// The former tables for which the readers were made. Each entry has the OID of a table. If the table is settled,
    /// so that all its rows have an outcome, the entry also has the WAL position at which the table was settled.
    ///
    /// There may be hundreds of readers, so they are made again only if this list changes.
    oids: Vec<(u32, Option<Lsn>)>,
    /// The tables that can be searched, each with its reader. Tables that are not settled come first. Then come the
    /// settled tables, in the order in which they were settled. An event of a settled table is usually in the first
    /// one that was settled after the event's commit.
    tables: Vec<(DetachedTable, TableReader)>,
    /// Whether one of the `unreadable` tables may be readable now. A displaced table that the settings no longer name
    /// (`is_in_settings`) does not count: it stays unreadable until the relay is restarted with other settings.
    may_be_readable: bool,
    /// The tables that cannot be searched, each with the reason or the remedy. Or one error, if a lock prevented the
    /// whole search.
    unreadable: Vec<String>,
}

impl FormerTables {
    pub(super) fn new(slot: SlotName, captured: Vec<TableSettings>, project: Arc<str>) -> Self {
        Self {
            slot,
            captured,
            project,
            is_current: false,
            oids: Vec::new(),
            tables: Vec::new(),
            may_be_readable: false,
            unreadable: Vec::new(),
        }
    }

    /// Notes that another page of events begins. A table may have been detached since the previous page.
    pub(super) fn page_begins(&mut self) {
        self.is_current = false;
    }

    async fn refresh(&mut self, sql: &Sql) -> Result<()> {
        let captured = claim::known(sql, &self.slot, &self.captured).await?;
        let oids = detached::former_oids(sql, &self.captured, &captured).await?;
        if self.oids == oids && !self.may_be_readable {
            return Ok(());
        }
        (self.oids, self.tables, self.unreadable) = (Vec::new(), Vec::new(), Vec::new());
        self.may_be_readable = false;
        let finding = detached::find_all(sql, &self.captured, &captured);
        // As in `row`, wait only briefly for a lock: other releases wait for this search. The next page tries again.
        let found = match limiting_lock_waits(sql, LOCK_LIMIT, finding).await {
            Err(error) if error.code() == Code::LockWait => {
                self.unreadable.push(error.to_string());
                self.may_be_readable = true;
                Vec::new()
            }
            found => found?,
        };
        for table in found {
            if let Some((name, _, remedy)) = table.unreadable() {
                self.unreadable.push(format!("{name}: {remedy}"));
                self.may_be_readable |= table.is_in_settings;
            }
            if let Some(rows) = table.rows() {
                let (settings, captured) = (&rows.settings, &rows.captured);
                let reader = TableReader::resolve(sql, settings, &self.project, captured).await?;
                let (column, name) = (reader.id_column(), reader.table_sql());
                let found = table::lookup_column(sql, captured.shape.oid, column).await?;
                if found.is_some_and(|found| found.is_indexed) {
                    self.tables.push((table, reader));
                } else {
                    // Without an index, each search would read the whole table.
                    let column = quoted_identifier(column);
                    let remedy = format!("CREATE INDEX ON {name} ({column})");
                    self.unreadable.push(format!("{name}: {remedy}"));
                    self.may_be_readable = true;
                }
            }
        }
        self.oids = oids;
        Ok(())
    }

    /// Returns the row of an event, with the reader of its table.
    pub(super) async fn row(
        &mut self,
        sql: &Sql,
        origin: &EventRef,
    ) -> Result<Option<(&mut TableReader, RowValues)>> {
        if !self.is_current {
            self.refresh(sql).await?;
            self.is_current = true;
        }
        let commit = origin.position.commit.lsn();
        for (table, reader) in &mut self.tables {
            if table.settled.is_some_and(|settled| settled < commit) {
                continue;
            }
            // Somebody may hold a lock on a former table for long, for example to archive it. Other releases wait
            // for this search, so do not wait for the lock.
            let search = rows::exists(sql, reader, &origin.event_id);
            match limiting_lock_waits(sql, LOCK_LIMIT, search).await {
                Ok(true) => {}
                Ok(false) => continue,
                Err(error) if error.code() == Code::LockWait => {
                    let locked = format!("{}: {error}", reader.table_sql());
                    if !self.unreadable.contains(&locked) {
                        self.unreadable.push(locked);
                        self.may_be_readable = true;
                    }
                    continue;
                }
                Err(error) => return Err(error),
            }
            if let Some(row) = rows::find(sql, reader, &origin.event_id).await? {
                return Ok(Some((reader, row)));
            }
        }
        Ok(None)
    }

    /// Returns the error of an event whose row was not found.
    pub(super) fn gone(&self) -> Error {
        if self.unreadable.is_empty() {
            return Error::new(Code::EventInvalid, "its row is no longer in its table")
                .hint("to discard it, run `postrider quarantine discard ID --yes`");
        }
        let named: Vec<&str> = self.unreadable.iter().take(NAMED).map(|t| &**t).collect();
        let more = match self.unreadable.len() - named.len() {
            0 => String::new(),
            more => format!("; and {more} more tables"),
        };
        let what = format!(
            "its row is in no table that the relay can read, and may be in a former table: {}{more}",
            named.join("; ")
        );
        Error::new(Code::EventInvalid, what)
            .hint("let the relay read the former table, then release the event again")
    }
}
