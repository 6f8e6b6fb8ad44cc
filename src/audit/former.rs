//! Decides when all rows of a former partition are resolved. A former partition is one that was detached from
//! a captured table. The auditor removes a resolved former partition from the list in the capture record.
//!
//! All rows of a former partition belong to transactions that ended before the partition was detached.
//! These rows are resolved once the floor is above these transactions. A partition that the relay cannot
//! read counts as resolved only if the stream has contained all its rows. Otherwise the capture record
//! lists the partition until an operator drops it or grants the right to read it.

use std::collections::BTreeMap;

use super::{AuditState, AuditWait};
use crate::capture::claim::Captured;
use crate::capture::detached::{DetachedState, DetachedTable};
use crate::error::Result;
use crate::postgres::{Sql, current_snapshot};

/// The changes that an audit records in the lists of former partitions.
#[derive(Debug, Default)]
pub(super) struct FormerPartitions {
    /// The OIDs of the resolved former partitions: one list for each captured table, in the order of the settings.
    left: Vec<Vec<u32>>,
    /// The former partitions that the relay cannot read, and that the capture record does not list as unread yet. One
    /// map for each captured table, in the order of the settings. The key is the OID of a partition. The value is the
    /// floor from which the relay must read the partition once it can.
    unread: Vec<BTreeMap<u32, u64>>,
    /// Whether a former partition will be resolved as soon as older transactions have ended. If so, the next
    /// audit should follow soon.
    pub(super) any_waits: bool,
}

impl FormerPartitions {
    /// The resolved former partitions of a table, by its index in the settings.
    pub(super) fn left_of(&self, table: usize) -> &[u32] {
        self.left.get(table).map_or(&[], Vec::as_slice)
    }

    /// The unread former partitions of a table, by its index in the settings.
    pub(super) fn unread_of(&self, table: usize) -> &BTreeMap<u32, u64> {
        static NONE: BTreeMap<u32, u64> = BTreeMap::new();
        self.unread.get(table).unwrap_or(&NONE)
    }

    /// Whether there is something to record.
    pub(super) fn any_change(&self) -> bool {
        self.left.iter().any(|left| !left.is_empty())
            || self.unread.iter().any(|unread| !unread.is_empty())
    }
}

/// Whether our role can now read a former partition that it could not read before.
pub(super) fn any_became_readable(captured: &[Captured], detached: &[DetachedTable]) -> bool {
    let is_unread = |table: &DetachedTable| {
        let of = captured.get(table.number);
        of.is_some_and(|of| of.record.unread.contains_key(&table.oid))
    };
    detached
        .iter()
        .any(|table| table.rows().is_some() && is_unread(table))
}

impl AuditState {
    /// Decides which of the former partitions `detached` are resolved. The caller must have read the list
    /// `detached` after the audit began. `is_brought` says whether the stream has contained every row of the
    /// transactions below `waiting.xmin`.
    pub(super) async fn former(
        &mut self,
        sql: &Sql,
        captured: &[Captured],
        detached: &[DetachedTable],
        waiting: AuditWait,
        is_brought: bool,
    ) -> Result<FormerPartitions> {
        let mut former = FormerPartitions {
            left: vec![Vec::new(); captured.len()],
            unread: vec![BTreeMap::new(); captured.len()],
            ..FormerPartitions::default()
        };
        self.detached_before
            .retain(|oid, _| detached.iter().any(|table| table.oid == *oid));
        if detached.is_empty() {
            return Ok(former);
        }
        let next_xid = current_snapshot(&**sql).await?.xmax();
        for table in detached {
            let record = &captured[table.number].record;
            let is_passed = !table.is_pending && {
                let before = self.detached_before.entry(table.oid);
                waiting.xmin >= *before.or_insert(next_xid)
            };
            let is_unread = record.unread.contains_key(&table.oid);
            match &table.state {
                DetachedState::Gone => former.left[table.number].push(table.oid),
                DetachedState::Unreadable { .. } if is_unread => table.warn_if_unreadable(),
                DetachedState::Unreadable { .. } if !is_brought => {
                    table.warn_if_unreadable();
                    former.unread[table.number].insert(table.oid, record.floor);
                }
                DetachedState::Readable(_) | DetachedState::Unreadable { .. } => {
                    if is_passed {
                        former.left[table.number].push(table.oid);
                    } else {
                        former.any_waits = true;
                    }
                }
            }
        }
        Ok(former)
    }
}
