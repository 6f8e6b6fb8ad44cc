//! Creates the slot of a recovery, keeps the present slot, or continues with the slot that an unfinished
//! recovery has created. Also checks beforehand whether a recovery can read the tables.

use std::time::{Duration, Instant};

use decoder::Lsn;
use slot_manager::{Slot, SlotError, SlotName, cluster, retention, slots};

use super::slot_verdict::{self, RecoveryCause};
use super::{Announcements, snapshot};
use crate::capture::ScanWindow;
use crate::capture::claim::{self, Captured};
use crate::capture::table::{TableReader, altered_since};
use crate::error::{Code, Error, Result};
use crate::metrics::{KindLabel, Metrics};
use crate::postgres::{Snapshot, Sql, current_snapshot, own_transaction_id};
use crate::settings::{Settings, Start};
use crate::store::dispatch::{check_readable, has_no_row_sql};
use crate::store::relay_row::Unfinished;

/// Maximum time that a recovery waits for running transactions before the session fails. Long, because the
/// next attempt must also wait for the transactions that have begun in the meantime.
const CREATE_LIMIT: Duration = Duration::from_secs(300);

/// Time before the first log line about the transactions that hold up the recovery, and between two such
/// lines.
const BLOCKERS_NAMED_AFTER: Duration = Duration::from_secs(15);

/// Time between two checks whether the open transactions have ended.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The slot of a recovery. The slot streams every transaction that the recovery's snapshot does not show.
pub(crate) struct RecoverySlot {
    pub(super) point: Unfinished,
    /// Whether the recovery began in an earlier session, and continues with the snapshot of that session.
    is_continued: bool,
}

impl RecoverySlot {
    /// Returns a position in the WAL. Every transaction that is not visible in the snapshot commits after this
    /// position.
    pub(crate) fn consistent_point(&self) -> Lsn {
        self.point.consistent_point
    }

    /// Whether this session has made the snapshot.
    pub(super) fn begins_anew(&self) -> bool {
        !self.is_continued
    }

    /// Whether the stream may contain rows that the recovery also reads from the tables. If somebody deletes
    /// such a row before its event has an outcome, only the slot still has the row. So the relay must not
    /// confirm the position of the row until the event has an outcome.
    pub(crate) fn repeats_rows(&self) -> bool {
        self.point.repeated_before.is_some()
    }

    /// Waits until this session can read every row that the slot does not stream. Does not wait if there are
    /// no such rows.
    ///
    /// # Errors
    /// Connection errors.
    pub(crate) async fn wait_until_readable(&self, sql: &Sql, captured: &[Captured]) -> Result<()> {
        if captured
            .iter()
            .any(|captured| may_miss_rows(&self.point, captured))
        {
            snapshot::wait_until_visible(sql, &self.point.snapshot).await?;
        }
        Ok(())
    }

    /// The snapshot with which the recovery reads the tables. The recovery publishes rows only of transactions that
    /// this snapshot shows. A new slot streams none of these transactions. A kept slot may stream some of them.
    pub(crate) fn snapshot(&self) -> &Snapshot {
        &self.point.snapshot
    }
}

/// Whether the recovery must read this table, because the table may have rows that must be published and that the slot
/// does not stream.
///
/// There are no such rows if the capture of the table began with the snapshot of this recovery. Rows that this snapshot
/// shows are then older than the capture, and the relay never publishes them. The slot streams all other rows.
///
/// The exception is a table in which some rows have no `inserted_xid`. The relay then judges the age of such a row by
/// its `xmin`, which may be the id of a subtransaction. A snapshot does not show whether a subtransaction had ended. So
/// the relay may treat rows that are older than the capture as new. The slot does not always stream them, so the
/// recovery reads the table.
pub(super) fn may_miss_rows(point: &Unfinished, Captured { record, shape }: &Captured) -> bool {
    let began_with_slot = record.since.as_ref() == Some(&point.snapshot);
    !began_with_slot || !shape.tells_top_level_transactions(&record.added_xids)
}

/// Continues with the slot and the snapshot of an unfinished recovery. `confirmed` is the slot's position.
///
/// # Errors
/// Database errors.
pub(crate) async fn continued(
    sql: &Sql,
    slot: &SlotName,
    (unfinished, confirmed): (Unfinished, Lsn),
    metrics: &Metrics,
) -> Result<RecoverySlot> {
    let kind = slot_verdict::UNFINISHED;
    tracing::warn!(
        kind, %slot, from = %unfinished.consistent_point,
        "continuing a recovery that an earlier session has not finished, with its slot: rows that still \
         have no record in outbox.dispatch are published from the tables"
    );
    metrics.recoveries.get_or_create(&KindLabel { kind }).inc();
    let mut point = unfinished;
    // An older version did not record whether the recovery kept the slot. If the recovery had created the slot, the
    // slot could not be before `consistent_point`. So a slot with an earlier position was kept.
    if point.repeated_before.is_none() && confirmed < point.consistent_point {
        point.repeated_before = Some(cluster::wal_end(sql).await?);
    }
    Ok(RecoverySlot {
        point,
        is_continued: true,
    })
}

/// Prepares a recovery that keeps the present slot: waits until all transactions that are open now have ended, and then
/// takes the snapshot of the recovery. The recovery reads the rows that this snapshot shows from the tables. The slot
/// streams all later transactions completely.
///
/// The reason for the wait: somebody may have altered the publication while a transaction was open. PostgreSQL decodes
/// each row with the publication as it was when the row was inserted. So the stream may leave out rows that the
/// transaction inserted before the change. The snapshot shows these rows, because it is taken after the end of the
/// transaction.
///
/// # Errors
/// `slot-busy` if such a transaction stays open for [`CREATE_LIMIT`]; database errors.
pub(crate) async fn keep(
    sql: &Sql,
    settings: &Settings,
    reason: &RecoveryCause,
    announcements: &Announcements,
    metrics: &Metrics,
) -> Result<RecoverySlot> {
    let slot = &settings.slot;
    if announcements.are_due(reason) {
        tracing::warn!(
            kind = reason.name(), %slot,
            "recovering: {reason}; the relay keeps the slot: it publishes every row without a known outcome \
             from the tables, and then continues with the stream"
        );
    }
    count(reason, metrics);
    // Read this position before taking the snapshot. The loop below waits for a snapshot that shows every transaction
    // that has an id by now. A transaction that the snapshot does not show gets its id later, so it commits after this
    // position.
    let consistent_point = cluster::wal_end(sql).await?;
    let last_open = own_transaction_id(&**sql).await?;
    let (began, mut told) = (Instant::now(), Instant::now());
    loop {
        let snapshot = current_snapshot(&**sql).await?;
        if snapshot.xmin() > last_open {
            metrics.troubles.opening_continues();
            announcements.begun(reason);
            let point = Unfinished {
                consistent_point,
                snapshot,
                repeated_before: Some(cluster::wal_end(sql).await?),
            };
            return Ok(RecoverySlot {
                point,
                is_continued: false,
            });
        }
        if told.elapsed() >= BLOCKERS_NAMED_AFTER {
            told = Instant::now();
            let error = open_transactions(sql, slot).await?;
            if began.elapsed() >= CREATE_LIMIT {
                return Err(error);
            }
            metrics.troubles.set_opening(&error, began);
            tracing::warn!(
                code = %error.code(), hint = error.hint_text(), waited_s = began.elapsed().as_secs(), "{error}"
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns the error that names the transactions for which a recovery with the present slot is waiting.
async fn open_transactions(sql: &Sql, slot: &SlotName) -> Result<Error> {
    let blockers = retention::blockers_of_creation(sql).await?;
    let names: Vec<String> = blockers.iter().map(ToString::to_string).collect();
    let what = format!(
        "the recovery of slot \"{slot}\" waits for transactions that were open when it began ({})",
        names.join("; ")
    );
    Ok(Error::new(Code::SlotBusy, what).hint("end those transactions or wait for them"))
}

fn count(reason: &RecoveryCause, metrics: &Metrics) {
    let kind = KindLabel {
        kind: reason.name(),
    };
    metrics.recoveries.get_or_create(&kind).inc();
}

/// Checks that a recovery can read everything that it needs. The relay checks this before it changes
/// anything. Otherwise it might drop the old slot and then find that it cannot read the tables. It could then
/// publish neither the slot's events nor the tables' rows. The statements return no rows, but the server
/// refuses them if a privilege is missing or if row-level security would hide rows.
///
/// # Errors
/// `schema-missing`, `privilege-missing`; `slot-busy` when a table was altered in the meantime; the errors of
/// [`TableReader::resolve`].
pub(crate) async fn everything_is_readable(sql: &Sql, settings: &Settings) -> Result<()> {
    // Check our own schema first. Otherwise, if one of its objects were missing, the statements below would
    // report that a table was altered.
    check_readable(sql).await?;
    let captured =
        claim::as_if_claimed(sql, &settings.slot, &settings.tables, settings.start).await?;
    for (table, captured) in settings.tables.iter().zip(&captured) {
        let reader = TableReader::resolve(sql, table, settings.project()?, captured).await?;
        let condition = ScanWindow::unrecorded(captured).condition();
        let statement = format!(
            "{} and {condition} and {} limit 0",
            reader.select_sql(),
            has_no_row_sql(reader.event_id_sql())
        );
        sql.simple_query(&statement).await.map_err(altered_since)?;
    }
    Ok(())
}

/// Drops the old slot, and creates a new slot. `old` is the slot that the relay found when it decided to
/// recover. The caller has already marked the slot for recovery.
///
/// # Errors
/// - `slot-held` if another session reads the old slot.
/// - `slot-busy` if an open transaction blocks the creation for too long, or another relay is creating the slot.
/// - `slot-foreign` if the old slot is physical, or belongs to another output plugin or another database.
/// - Connection and database errors.
pub(crate) async fn create(
    sql: &Sql,
    settings: &Settings,
    instance: &str,
    (reason, old): (&RecoveryCause, Option<&Slot>),
    announcements: &Announcements,
    metrics: &Metrics,
) -> Result<RecoverySlot> {
    let (slot, target) = (&settings.slot, sql.target());
    match reason {
        _ if !announcements.are_due(reason) => {}
        RecoveryCause::FirstStart(Start::New) => tracing::info!(
            %slot,
            "{reason}; creating the slot. In tables that are captured for the first time, rows that are \
             committed before the slot is ready are not published, including rows committed while the slot \
             waits for open transactions (`start = all` publishes them)"
        ),
        reason => tracing::warn!(
            kind = reason.name(), %slot,
            "recovering: {reason}; every row without a record in outbox.dispatch is published from the \
             tables, and then the relay continues with the stream"
        ),
    }
    // Drop no slot if there was none when the relay decided to recover. If another relay has created a slot
    // since, creating our slot fails, and the next session examines the slot of that relay.
    if old.is_some() {
        drop_old(sql, slot).await?;
    }
    let wanted = replication::CreateSlot {
        target,
        slot: slot.as_str(),
        failover: settings.slot_failover,
        application_name: instance,
        wal_sender_timeout: settings.wal_sender_timeout,
        limit: CREATE_LIMIT,
    };
    let mut creating = std::pin::pin!(replication::create_slot(wanted));
    let began = Instant::now();
    let created = loop {
        tokio::select! {
            created = &mut creating => break created?,
            () = tokio::time::sleep(BLOCKERS_NAMED_AFTER) => {
                let error = blocked(sql, slot, began.elapsed()).await?;
                metrics.troubles.set_opening(&error, began);
                tracing::warn!(
                    code = %error.code(), hint = error.hint_text(), waited_s = began.elapsed().as_secs(), "{error}"
                );
            }
        }
    };
    metrics.troubles.opening_continues();
    let Some(created) = created else {
        return Err(blocked(sql, slot, CREATE_LIMIT).await?);
    };
    let snapshot = snapshot::exported(target, &created.snapshot).await?;
    let consistent_point = created.consistent_point;
    // Close this replication session before opening the stream, because the server may have only one free
    // walsender.
    created.close().await;
    announcements.begun(reason);
    tracing::info!(%slot, from = %consistent_point, "created the slot");
    // A first start that publishes no old rows does not count as a recovery.
    if *reason != RecoveryCause::FirstStart(Start::New) {
        count(reason, metrics);
    }
    Ok(RecoverySlot {
        point: Unfinished {
            consistent_point,
            snapshot,
            repeated_before: None,
        },
        is_continued: false,
    })
}

/// Drops the slot that the relay replaces.
async fn drop_old(sql: &Sql, slot: &SlotName) -> Result<()> {
    match slots::drop(sql, slot).await {
        Ok(()) => tracing::warn!(%slot, "dropped the old slot"),
        Err(SlotError::SlotMissing { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// Drops the slot that this session has created, because another slot captures the tables. Otherwise the server
/// would retain WAL for a slot that no relay reads.
pub(crate) async fn discard(sql: &Sql, slot: &SlotName) {
    match slots::drop(sql, slot).await {
        Ok(()) => tracing::warn!(%slot, "dropped the new slot: another slot captures its tables"),
        Err(error) => tracing::warn!(%slot, "cannot drop the new slot: {error}"),
    }
}

/// Returns the error that names the transactions for which the new slot is waiting.
async fn blocked(sql: &Sql, slot: &SlotName, waited: Duration) -> Result<Error> {
    let blockers = retention::blockers_of_creation(sql).await?;
    let timeout = Duration::from_secs(waited.as_secs());
    let slot = slot.clone();
    let blocked = SlotError::CreationBlocked {
        slot,
        timeout,
        blockers,
    };
    Ok(blocked.into())
}
