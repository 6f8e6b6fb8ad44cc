//! Decides for a recovery which rows of a blocked key come before the key's first quarantined event.
//!
//! A key is blocked while it has events in quarantine. A recovery publishes rows before the first quarantined event
//! of their key immediately. Rows after the quarantined event wait behind this event in quarantine.
//!
//! Even with `dispatch = full`, a row before the quarantined event may have no record. For example, the relay crashes
//! while the event of this row is in flight, after the relay has put a later event of the key into quarantine.
//!
//! A row does not show its position in the WAL. But the recovery reads the rows of each aggregate in the order of their
//! inserts. So if the aggregate is the ordering key, the recovery reads the row of the quarantined event after all rows
//! that come before this event. In these cases, all rows of a key count as coming after the quarantined event:
//!
//! - Several aggregates share the key.
//! - No column gives the order of the inserts. This case does not apply if published events may lack a record.
//! - The row of the quarantined event is not among the rows that the recovery reads.

use std::collections::HashMap;
use std::sync::Arc;

use replication::CommitLsn;
use slot_manager::table::lookup_column;
use uuid::Uuid;

use super::ScanWindow;
use super::positions::commit_before;
use super::rows::is_of_a_value;
use super::scan::Scan;
use super::table::{TableReader, altered_since};
use crate::error::Result;
use crate::event::{Group, OrderingKey};
use crate::mapping::{Ordering, TableSettings};
use crate::postgres::Sql;
use crate::store::dispatch::quarantined::{self, BlockedKey, MAX_BLOCKED};

/// Maximum number of rows that one statement looks up by their ids. It limits the length of the statement.
const LOOKED_UP: usize = 100;

/// The keys whose first quarantined event has not been read from the table yet.
#[derive(Debug, Default)]
pub(crate) struct Blocked {
    firsts: HashMap<[u8; 16], Group>,
    /// For each key, the commit LSN that the recovery gives to rows before the key's first quarantined event.
    before: HashMap<Group, CommitLsn>,
}

/// The blocked keys, by the event id of their first quarantined event.
#[derive(Debug, Default)]
pub(crate) struct FirstQuarantined(HashMap<[u8; 16], BlockedKey>);

impl FirstQuarantined {
    /// Reads the first quarantined event of each key. No other task may write records during this query.
    ///
    /// # Errors
    /// Errors of [`quarantined::blocked_keys`].
    pub(crate) async fn read(sql: &Sql) -> Result<Self> {
        let keys = quarantined::blocked_keys(sql, MAX_BLOCKED).await?;
        let keys = keys.into_iter().map(|key| (key.first.uuid, key));
        Ok(Self(keys.collect()))
    }

    /// For each key, the commit LSN that the recovery gives to rows before the key's first quarantined event.
    pub(crate) fn commits_before(&self) -> impl Iterator<Item = CommitLsn> {
        self.0.values().map(commit_before_first)
    }
}

/// The commit LSN that the recovery gives to rows that come before the first quarantined event of this key. The table
/// does not show at which LSN these rows were committed.
fn commit_before_first(key: &BlockedKey) -> CommitLsn {
    commit_before(key.since.commit.lsn())
}

impl Blocked {
    /// Finds the blocked keys whose first quarantined event is among the rows that will be read. Finds no keys if
    /// the aggregate is not the ordering key, or if the rows have no known order. If there is an index on the ids,
    /// looks the events up by their ids. Otherwise scans the rows once.
    ///
    /// # Errors
    /// Errors of [`Scan::next`].
    pub(crate) async fn of(
        sql: &Sql,
        table: &TableSettings,
        reader: &TableReader,
        window: &ScanWindow<'_>,
        firsts: &FirstQuarantined,
    ) -> Result<Self> {
        let mut blocked = Self::default();
        let is_ordered = window.records.may_lack_records() || window.captured.shape.has_order();
        if firsts.0.is_empty() || table.ordering != Ordering::Key || !is_ordered {
            return Ok(blocked);
        }
        let found = match look_up(sql, reader, window, firsts).await? {
            Some(found) => found,
            None => walk(sql, reader, window, firsts).await?,
        };
        for (id, key) in found.iter().filter_map(|id| firsts.0.get_key_value(id)) {
            blocked.firsts.insert(*id, key.group.clone());
            let before = commit_before_first(key);
            blocked.before.insert(key.group.clone(), before);
        }
        Ok(blocked)
    }

    /// The ids of the first quarantined events whose rows the scan will reach. The scan must return these rows
    /// although the events have a record, so that [`passes`](Self::passes) sees them.
    pub(crate) fn first_ids(&self) -> Vec<Uuid> {
        self.firsts.keys().copied().map(Uuid::from_bytes).collect()
    }

    /// Returns whether this event is the first quarantined event of its key. If so, all rows of the key
    /// that are read later count as coming after the event.
    pub(crate) fn passes(&mut self, event_id: &[u8; 16]) -> bool {
        let Some(group) = self.firsts.remove(event_id) else {
            return false;
        };
        self.before.remove(&group);
        true
    }

    /// Returns the commit LSN for the next row of this key, if the row comes before the key's first quarantined
    /// event.
    pub(crate) fn commit_of_next(
        &self,
        topic: &Arc<str>,
        ordering_key: &OrderingKey,
    ) -> Option<CommitLsn> {
        if self.before.is_empty() {
            return None;
        }
        let group = Group {
            topic: topic.clone(),
            ordering_key: ordering_key.clone(),
        };
        self.before.get(&group).copied()
    }
}

/// Looks the events up by their ids. Returns the ids of the events whose rows are in the window. Returns
/// `None` if no index can find the rows, or if an id cannot be compared with the id column.
async fn look_up(
    sql: &Sql,
    reader: &TableReader,
    window: &ScanWindow<'_>,
    FirstQuarantined(keys): &FirstQuarantined,
) -> Result<Option<Vec<[u8; 16]>>> {
    let id = lookup_column(sql, window.captured.shape.oid, reader.id_column()).await?;
    let is_indexed = id.is_some_and(|id| id.is_indexed);
    if !is_indexed || !reader.finds_ids_by_index() {
        return Ok(None);
    }
    let mut found = Vec::new();
    let conditions: Vec<String> = keys
        .values()
        .filter_map(|key| reader.is_sql(&key.first))
        .collect();
    for conditions in conditions.chunks(LOOKED_UP) {
        let statement = format!(
            "select {id} from {rows} and ({these}) and {recent}",
            id = reader.event_id_sql(),
            rows = reader.rows_sql(),
            these = conditions.join(" or "),
            recent = window.condition(),
        );
        let rows = match sql.query_typed(&statement, &[]).await {
            Ok(rows) => rows,
            // The id column had another type when the events were recorded, so their ids cannot be
            // compared with the column.
            Err(error) if is_of_a_value(&error) => return Ok(None),
            Err(error) => return Err(altered_since(error)),
        };
        found.extend(rows.iter().map(|row| row.get::<_, Uuid>(0).into_bytes()));
    }
    Ok(Some(found))
}

/// Scans the rows of the window, in bounded statements. Returns the ids of the first quarantined events
/// that it finds.
async fn walk(
    sql: &Sql,
    reader: &TableReader,
    window: &ScanWindow<'_>,
    FirstQuarantined(keys): &FirstQuarantined,
) -> Result<Vec<[u8; 16]>> {
    let mut found = Vec::new();
    let mut scan = Scan::set_aside(*window, reader);
    while let Some(rows) = scan.next(sql).await? {
        let ids = rows.iter().map(|row| row.id.into_bytes());
        found.extend(ids.filter(|id| keys.contains_key(id)));
    }
    Ok(found)
}
