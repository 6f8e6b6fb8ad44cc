//! Creates the slot of a recovery, or continues with the slot that an unfinished recovery has created.
//! Before that, checks that the recovery can read the tables.

use std::time::{Duration, Instant};

use decoder::Lsn;
use slot_manager::{Slot, SlotError, SlotName, retention, slots};

use super::loss::{self, Loss};
use super::snapshot;
use crate::capture::ScanWindow;
use crate::capture::claim::{self, Captured};
use crate::capture::table::{TableReader, altered_since};
use crate::error::{Error, Result};
use crate::metrics::{KindLabel, Metrics};
use crate::postgres::{Snapshot, Sql};
use crate::settings::{Settings, Start};
use crate::store::dispatch::{check_readable, has_no_row_sql};
use crate::store::relay_row::Unfinished;

/// How long to wait for running transactions when creating the slot. Long, because the old slot is
/// gone, and each new attempt begins to wait again.
const CREATE_LIMIT: Duration = Duration::from_secs(300);

/// How often to log the transactions that hold up the new slot.
const BLOCKERS_NAMED_AFTER: Duration = Duration::from_secs(15);

/// The slot of a recovery. This slot streams every transaction that its snapshot does not show.
pub(crate) struct RecoverySlot {
    pub(super) point: Unfinished,
    /// Whether the slot was created in this session.
    pub(super) is_new: bool,
}

impl RecoverySlot {
    /// The position after which the slot streams every commit.
    pub(crate) fn consistent_point(&self) -> Lsn {
        self.point.consistent_point
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

    /// The snapshot that shows exactly the transactions that the slot does not stream.
    pub(crate) fn snapshot(&self) -> &Snapshot {
        &self.point.snapshot
    }
}

/// Whether the table may have rows that must be published and that the slot does not stream. There are none
/// if capturing began with the snapshot of this slot: the slot streams every row that the snapshot does not
/// show, and every other row is older than capturing. But without `inserted_xid`, some of the older rows
/// count as new, and must be published before the stream is read.
pub(super) fn may_miss_rows(point: &Unfinished, Captured { record, shape }: &Captured) -> bool {
    let began_with_slot = record.since.as_ref() == Some(&point.snapshot);
    !began_with_slot || !shape.tells_top_level_transactions(&record.added_xids)
}

/// Continues with the slot that an unfinished recovery has created.
pub(crate) fn kept(slot: &SlotName, unfinished: Unfinished, metrics: &Metrics) -> RecoverySlot {
    let kind = loss::UNFINISHED;
    tracing::warn!(
        kind, %slot, from = %unfinished.consistent_point,
        "continuing a recovery that an earlier session has not finished, with its slot: rows that still \
         have no record in outbox.dispatch are published from the tables"
    );
    metrics.recoveries.get_or_create(&KindLabel { kind }).inc();
    RecoverySlot {
        point: unfinished,
        is_new: false,
    }
}

/// Checks that a recovery can read everything that it needs. The relay checks this before it changes
/// anything, because the old slot may still hold events that we cannot read from the tables. The
/// statements ask for no rows, but the server refuses them if a privilege is missing or row-level
/// security would hide rows.
///
/// # Errors
/// `schema-missing`, `privilege-missing`; `slot-busy` when a table was altered in the meantime;
/// errors of [`TableReader::resolve`].
pub(crate) async fn everything_is_readable(sql: &Sql, settings: &Settings) -> Result<()> {
    // Check our own schema first, because the statements below report a missing object as a table that
    // was just altered.
    check_readable(sql).await?;
    let captured =
        claim::as_if_claimed(sql, &settings.slot, &settings.tables, settings.start).await?;
    for (table, captured) in settings.tables.iter().zip(&captured) {
        let reader = TableReader::resolve(sql, table, settings.project()?, captured).await?;
        let condition = ScanWindow::unrecorded(captured).condition();
        let statement = format!(
            "{} where {condition} and {} limit 0",
            reader.select_sql(),
            has_no_row_sql(reader.event_id_sql())
        );
        sql.simple_query(&statement).await.map_err(altered_since)?;
    }
    Ok(())
}

/// Drops the old slot, and creates a new slot. `old` is the slot for which the recovery was decided. The
/// caller has already marked the slot for recovery.
///
/// # Errors
/// `slot-held` and `slot-busy` when another relay or a transaction is in the way; `slot-foreign`.
pub(crate) async fn create(
    sql: &Sql,
    settings: &Settings,
    instance: &str,
    (loss, old): (&Loss, Option<&Slot>),
    metrics: &Metrics,
) -> Result<RecoverySlot> {
    let (slot, target) = (&settings.slot, sql.target());
    match loss {
        Loss::FirstStart(Start::New) => tracing::info!(
            %slot,
            "{loss}; creating the slot: rows that are committed before the slot is ready, also while it \
             waits for open transactions, are older than capturing and are not published (`start = all` \
             publishes them)"
        ),
        loss => {
            tracing::warn!(
                kind = loss.name(), %slot,
                "recovering: {loss}; every row without a record in outbox.dispatch is published from \
                 the tables, and then the relay continues with the stream"
            );
            let kind = KindLabel { kind: loss.name() };
            metrics.recoveries.get_or_create(&kind).inc();
        }
    }
    // Never drop a slot that another relay has created in the meantime. Creating our slot then fails, and the
    // next session examines the other slot.
    if old.is_some() {
        match slots::drop(sql, slot).await {
            Ok(()) => tracing::warn!(%slot, "dropped the old slot"),
            Err(SlotError::SlotMissing { .. }) => {}
            Err(error) => return Err(error.into()),
        }
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
                tracing::warn!(code = %error.code(), hint = error.hint_text(), "{error}");
            }
        }
    };
    let Some(created) = created else {
        return Err(blocked(sql, slot, CREATE_LIMIT).await?);
    };
    let snapshot = snapshot::exported(target, &created.snapshot).await?;
    let consistent_point = created.consistent_point;
    // Close this session first: the server may have no second walsender for the stream.
    created.close().await;
    tracing::info!(%slot, from = %consistent_point, "created the slot");
    Ok(RecoverySlot {
        point: Unfinished {
            consistent_point,
            snapshot,
        },
        is_new: true,
    })
}

/// Drops a slot that this session has created, but whose tables another slot captures. No relay would read
/// the slot, and it would keep WAL.
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
