//! Decides for a recovery which rows of a blocked key come before the key's first quarantined event.
//!
//! A recovery publishes every unrecorded row. It publishes rows before the first quarantined event of
//! their key at once. Rows after that event wait behind it in quarantine. A row does not show its
//! position in the log, but the recovery reads the rows of each aggregate in their order. So if the
//! aggregate is the ordering key, every row that is read before the first quarantined event also comes
//! before that event in the log. All rows of a key count as coming after the event if the event is not
//! among the rows that are read, or if several aggregates share an ordering key.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio_postgres::SimpleQueryMessage;

use super::ScanWindow;
use super::table::{TableReader, altered_since};
use crate::error::Result;
use crate::event::{Group, OrderingKey};
use crate::mapping::{Ordering, TableSettings};
use crate::postgres::Sql;
use crate::store::dispatch::quarantined::{self, MAX_BLOCKED};
use crate::store::relay_row::RecordKeeping;

/// The keys whose first quarantined event has not been read from the table yet.
#[derive(Debug, Default)]
pub(crate) struct Blocked {
    firsts: HashMap<[u8; 16], Group>,
    groups: HashSet<Group>,
}

/// The first quarantined event of each blocked key, by event id.
#[derive(Debug, Default)]
pub(crate) struct Firsts(HashMap<[u8; 16], Group>);

impl Firsts {
    /// Reads the first quarantined event of each key. Finds none if all events have a record, because the
    /// scan then skips quarantined events. Nobody may write records during this query.
    ///
    /// # Errors
    /// Errors of [`quarantined::blocked_keys`].
    pub(crate) async fn read(sql: &Sql, records: RecordKeeping) -> Result<Self> {
        if !records.may_lack_records() {
            return Ok(Self::default());
        }
        let keys = quarantined::blocked_keys(sql, MAX_BLOCKED).await?;
        let keys = keys.into_iter().map(|key| (key.first.uuid, key.group));
        Ok(Self(keys.collect()))
    }
}

impl Blocked {
    /// Finds the blocked keys whose first quarantined event is among the rows that will be read. Finds
    /// none if the aggregate is not the ordering key.
    pub(crate) async fn of(
        sql: &Sql,
        table: &TableSettings,
        reader: &TableReader,
        window: &ScanWindow<'_>,
        Firsts(keys): &Firsts,
    ) -> Result<Self> {
        let mut blocked = Self::default();
        if keys.is_empty() || table.ordering != Ordering::Key {
            return Ok(blocked);
        }
        let ids = keys
            .keys()
            .map(|id| uuid::Uuid::from_bytes(*id).to_string());
        let ids = ids.collect::<Vec<_>>().join(",");
        let statement = format!(
            "select {id} from {table} e where {recent} and {id} = any ('{{{ids}}}'::uuid[])",
            id = reader.event_id_sql(),
            table = reader.table_sql(),
            recent = window.condition(),
        );
        for message in sql.simple_query(&statement).await.map_err(altered_since)? {
            let SimpleQueryMessage::Row(row) = message else {
                continue;
            };
            let id = row.get(0).and_then(|id| uuid::Uuid::parse_str(id).ok());
            let first = id.map(uuid::Uuid::into_bytes);
            if let Some((id, group)) = first.and_then(|id| keys.get_key_value(&id)) {
                blocked.firsts.insert(*id, group.clone());
                blocked.groups.insert(group.clone());
            }
        }
        Ok(blocked)
    }

    /// Whether this event is the first quarantined event of its key. If so, all rows of the key that are
    /// read later count as coming after the event.
    pub(crate) fn passes(&mut self, event_id: &[u8; 16]) -> bool {
        let Some(group) = self.firsts.remove(event_id) else {
            return false;
        };
        self.groups.remove(&group);
        true
    }

    /// Whether the next row of this key comes before the key's first quarantined event.
    pub(crate) fn is_before(&self, topic: &Arc<str>, ordering_key: &OrderingKey) -> bool {
        let group = || Group {
            topic: topic.clone(),
            ordering_key: ordering_key.clone(),
        };
        !self.groups.is_empty() && self.groups.contains(&group())
    }
}
