//! Compares the tables with outbox.dispatch and with the events in memory: publishes missing rows, and raises the
//! floors.

use std::collections::BTreeMap;
use std::time::Instant;

use decoder::Lsn;

use super::former::FormerPartitions;
use super::{AuditState, AuditSubject, AuditWait};
use crate::capture::blocked::FirstQuarantined;
use crate::capture::claim::Captured;
use crate::capture::detached::DetachedTable;
use crate::capture::from_table::{self, Interrupted, ScannedRow, UnresolvedIds};
use crate::capture::positions::commit_before;
use crate::capture::table::TableReader;
use crate::capture::unrecorded::Unrecorded;
use crate::capture::{ScanWindow, shape};
use crate::error::{Code, Error, Result};
use crate::event::EventPosition;
use crate::mapping::TableSettings;
use crate::postgres::Sql;
use crate::store::capture_record::{self as captures, Resolved};
use crate::store::dispatch::last_ordinal;
use crate::store::relay_row::audits::{self, AuditHistory};
use crate::store::relay_row::{RecordKeeping, RelayMode};

impl AuditState {
    /// Returns the ids of the unresolved events in memory. Returns `None` if the audit must wait, because the pipeline
    /// has not read the stream up to `end`. Until then, a row without a record may still arrive in the stream.
    ///
    /// `reached` says whether the slot has confirmed `end`. It is `None` if our walsender does not read the slot on the
    /// server that the auditor asks. The audit then waits, because `end` may be a position of another server.
    ///
    /// If published events may lack a record, the audit compares no rows, and needs no ids. In this case, returns
    /// `None` until the slot has confirmed `end`, and an empty set after that.
    pub(super) async fn in_memory(
        &mut self,
        records: RecordKeeping,
        end: Lsn,
        reached: Option<bool>,
    ) -> Result<Option<UnresolvedIds>> {
        let Some(reached) = reached else {
            return Ok(None);
        };
        if records.may_lack_records() {
            return Ok(reached.then(UnresolvedIds::default));
        }
        let unresolved = self.events.unresolved(end).await;
        unresolved.map_err(|_| ended())
    }

    /// Finds missing rows in the tables, and sends them into the pipeline. A row is missing if its event has no record
    /// and is not among `in_memory`, although the row's transaction had ended when the audit began.
    ///
    /// Returns true if rows were missing, or if the partitions of a table have changed since the last audit.
    pub(super) async fn compare(
        &mut self,
        sql: &Sql,
        captured: &[Captured],
        detached: &[DetachedTable],
        waiting: AuditWait,
        mut in_memory: UnresolvedIds,
    ) -> Result<bool> {
        if self.gap.is_some() && self.reads_former(waiting) {
            tracing::info!(
                "comparing the tables with outbox.dispatch, because the stream may have left out rows"
            );
        }
        let began = Instant::now();
        let commit = commit_before(waiting.end);
        let mut ordinal = last_ordinal(sql, [commit]).await? + 1;
        if self.next.commit == commit {
            // An earlier comparison may have sent events that have no record yet, so `last_ordinal` does not find them.
            // Continue after the ordinals of these events.
            ordinal = ordinal.max(self.next.ordinal);
        }
        self.next = EventPosition { commit, ordinal };
        let (mut found, mut has_changed) = (0, false);
        let former = detached.iter().filter_map(DetachedTable::rows);
        let reads_former = self.reads_former(waiting);
        for rows in former.filter(|_| reads_former) {
            let window = rows.bounded(ScanWindow::unrecorded(&rows.captured));
            if waiting.xmin > window.from_xid {
                let sending =
                    self.send_missing(sql, &rows.settings, window, waiting, &mut in_memory);
                found += sending.await?;
            }
        }
        let subject_tables = self.subject.tables.clone();
        for (n, (table, captured)) in subject_tables.iter().zip(captured).enumerate() {
            let Captured { record, shape } = captured;
            let known = record.partitions.as_deref();
            has_changed |= known != Some(&shape.partitions);
            let window = if self.compares_whole(n, waiting) {
                ScanWindow::whole(captured)
            } else if waiting.xmin <= record.floor.max(self.compared_to) {
                // The floor or an earlier comparison already covers all transactions that have ended, so no row is
                // left to compare.
                continue;
            } else {
                ScanWindow {
                    from_xid: record.floor.max(self.compared_to),
                    ..ScanWindow::recent(captured)
                }
            };
            let sending = self.send_missing(sql, table, window, waiting, &mut in_memory);
            found += sending.await?;
        }
        // The pipeline knows the events of all these rows now. Ask it to answer when all of them are resolved.
        self.settling = Some(self.events.settling().await.map_err(|_| ended())?);
        if found > 0 {
            let code = Code::PublicationGap;
            tracing::error!(
                code = code.name(),
                rows = found,
                hint = code.hint(),
                "found rows missing from the replication stream: publishing them from the table"
            );
        }
        self.took = began.elapsed();
        self.compared_to = waiting.xmin;
        if let Some(gap) = &mut self.gap {
            gap.compared_to = Some(waiting.xmin);
        }
        Ok(found > 0 || has_changed)
    }

    /// Sends the missing rows of one table, and adds their events to `in_memory`. Another table may have copies of these
    /// rows, and the audit must not send the copies too. Returns the number of rows.
    async fn send_missing(
        &mut self,
        sql: &Sql,
        table: &TableSettings,
        window: ScanWindow<'_>,
        waiting: AuditWait,
        in_memory: &mut UnresolvedIds,
    ) -> Result<u64> {
        let window = ScanWindow {
            below_xid: Some(waiting.xmin),
            ..window
        };
        let captured = window.captured;
        let reader = TableReader::resolve(sql, table, &self.subject.project, captured).await?;
        let none = FirstQuarantined::default();
        let unrecorded = Unrecorded::of(sql, reader, table, window, &none).await?;
        let metrics = &self.subject.metrics;
        let takes = |row: ScannedRow| {
            let is_missing = !in_memory.contains(row.id().as_bytes());
            if is_missing && matches!(row, ScannedRow::Unresolved(_)) {
                metrics.events_from_table.inc();
            }
            is_missing
        };
        let (events, next) = (&mut self.events, &mut self.next);
        let sending = from_table::hand_over(unrecorded, events, next, takes, |_, _| {});
        let sent = match sending.await {
            Ok(sent) => sent,
            Err(Interrupted::Failed(error)) => return Err(error),
            Err(Interrupted::SessionEnded) => return Err(ended()),
        };
        shape::refuse_rewritten(sql, table, &captured.shape).await?;
        if sent > 0 {
            let unresolved = self.events.unresolved(waiting.end).await;
            *in_memory = unresolved.ok().flatten().ok_or_else(ended)?;
        }
        Ok(sent)
    }

    /// Raises the floors, and records the results of the audit.
    pub(super) async fn resolved(
        &mut self,
        sql: &Sql,
        captured: &[Captured],
        former: &FormerPartitions,
        waiting: AuditWait,
        publication: &str,
        earlier: &AuditHistory,
    ) -> Result<()> {
        // Record the highest `seq` of each table once all transactions that may have rows up to this `seq` have
        // ended. Later scans then start at this `seq`.
        let tops = self.tops.take_if(|tops| waiting.xmin >= tops.next_xid);
        for (n, captured) in captured.iter().enumerate() {
            let top = tops.as_ref().and_then(|tops| tops.seqs.get(n)?.as_ref());
            let resolved = Resolved {
                identity: &captured.record.identity,
                floor: waiting.xmin,
                floor_seq: top.map(|top| (top.seq, top.numbering.as_str())),
                partitions: Some(&captured.shape.partitions),
                left: former.left_of(n),
                unread: former.unread_of(n),
                uncaptured: &BTreeMap::new(),
            };
            let (slot, walsender) = (&self.subject.slot, self.subject.walsender);
            captures::resolve(sql, slot, walsender, &resolved).await?;
            if let Some(bounds) = self.subject.bounds.get(n) {
                bounds.raise_floor(waiting.xmin);
            }
        }
        // Switch back to full records only when the floor is above every event that was published without
        // a record.
        let is_above_earlier_sessions = self.began_before.is_some_and(|next| waiting.xmin >= next);
        let mut records = earlier.records;
        if records.becomes_complete() && is_above_earlier_sessions {
            captures::full_from_here(&**sql, &self.subject.slot).await?;
            records = records.without_earlier();
        }
        let AuditSubject {
            slot,
            instance,
            walsender,
            ..
        } = &self.subject;
        let mode = RelayMode {
            records,
            publication,
        };
        audits::audited(sql, slot, instance, *walsender, mode, earlier).await
    }
}

fn ended() -> Error {
    Error::new(
        Code::PostgresConnectionLost,
        "the replication session ended during the audit",
    )
}
