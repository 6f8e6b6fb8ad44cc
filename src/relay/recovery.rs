//! A lost slot is not lost data: a new slot with the snapshot that fits it, everything without a
//! record from the tables in that snapshot, and then the stream.
//!
//! The order of the steps is the argument (docs/adr/0011-recovery.md). The mark in `outbox.relay`
//! is durable before anything changes, and goes when every row has its record: whoever comes in
//! between begins again, and sends only what has no record. The slot is held from before the
//! first row is sent until the end, so that there is one sender. Nothing of the stream is taken
//! before all rows from the tables are recorded, so that each key keeps its order over the seam.
//!
//! Not here: whether a recovery is needed (`loss`), and what becomes of an event (`delivery`).

pub(crate) mod blocked;
pub(crate) mod loss;
mod rewritten;
mod snapshot;
pub(crate) mod unrecorded;

use std::sync::Arc;
use std::time::{Duration, Instant};

use decoder::Lsn;
use slot_manager::{Cluster, Error as SlotError, Shard, SlotName, retention, slots};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::from_table::{self, FIRST_PLACE, FromTable, SessionEnded, TableSender};
use super::places::Places;
use super::record::Manner;
use super::session::ANSWER_LIMIT;
use super::{Phase, Relay, State, layout, record};
use crate::dispatch::Resolved;
use crate::error::{Code, Error, Result};
use crate::map::TableSettings;
use crate::metrics::{Kind, Metrics};
use crate::postgres::{PatientSql, Sql, Target, answer_within, connect};
use crate::settings::Dispatch;
use crate::source;
use crate::table::TableReader;
use crate::watermark::CommitLsn;
use blocked::Firsts;
use loss::Loss;
use rewritten::refuse_rewritten;
use unrecorded::Unrecorded;

/// How long to wait for running transactions when the slot is made. Long, since the old slot is
/// gone, and each attempt waits anew.
const CREATE_LIMIT: Duration = Duration::from_secs(300);

/// What holds it up is named every so often.
const BLOCKERS_NAMED_AFTER: Duration = Duration::from_secs(15);

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

const LOG_INTERVAL: Duration = Duration::from_secs(10);

const SNAPSHOT_XMIN: &str = "\
    SELECT pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text::bigint";

/// A new slot, and a session that sees what was committed before it.
pub(super) struct NewSlot {
    pub(super) consistent_point: Lsn,
    snapshot: PatientSql,
}

/// Marks the slot, drops what is left of it, and makes a new one.
///
/// # Errors
/// `slot-held` and `slot-busy` when another relay or a transaction is in the way; `slot-foreign`.
pub(super) async fn new_slot(
    relay: &Relay,
    sql: &Sql,
    cluster: &Cluster,
    loss: &Loss,
) -> Result<NewSlot> {
    let settings = &relay.settings;
    let (slot, target) = (&settings.slot, settings.database()?);
    tracing::warn!(
        kind = loss.name(), %slot,
        "recovering: {loss}; every row without a record in outbox.dispatch is delivered from the \
         tables, then the stream goes on"
    );
    relay
        .metrics
        .recoveries
        .get_or_create(&Kind { kind: loss.name() })
        .inc();
    let (instance, why) = (&relay.instance, loss.name());
    let marking = async {
        match loss.followed() {
            Some(followed) => layout::mark(sql, relay, cluster, why, followed).await,
            None => record::mark_recovering(sql, slot, cluster, instance, why).await,
        }
    };
    answer_within(ANSWER_LIMIT, marking).await?;
    let dropping = async {
        match slots::drop(sql, slot).await {
            Err(SlotError::SlotMissing { .. }) => Ok(false),
            dropped => dropped.map(|()| true),
        }
    };
    if answer_within(ANSWER_LIMIT, dropping).await? {
        tracing::warn!(%slot, "dropped the old slot");
    }
    let wanted = source::CreateSlot {
        target,
        slot,
        failover: settings.slot_failover,
        application_name: &relay.instance,
        wal_sender_timeout: settings.wal_sender_timeout,
        limit: CREATE_LIMIT,
    };
    let mut creating = std::pin::pin!(source::create_slot(wanted));
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
    let snapshot = snapshot::import(sql, target, &created.snapshot).await?;
    let consistent_point = created.consistent_point;
    // There may be no second walsender for the stream.
    created.close().await;
    Ok(NewSlot {
        consistent_point,
        snapshot,
    })
}

/// Names the transactions that a new slot has waited for so long.
async fn blocked(sql: &Sql, slot: &SlotName, waited: Duration) -> Result<Error> {
    let looking = retention::blockers_of_creation(sql);
    let blockers = answer_within(ANSWER_LIMIT, looking).await?;
    let timeout = Duration::from_secs(waited.as_secs());
    let slot = slot.clone();
    let blocked = SlotError::CreationBlocked {
        slot,
        timeout,
        blockers,
    };
    Ok(blocked.into())
}

/// The seam between the tables and the stream: while it is there, nothing of the stream is taken.
#[derive(Debug)]
pub(super) struct Seam {
    closed: oneshot::Receiver<Result<()>>,
    task: JoinHandle<()>,
}

impl Seam {
    /// Waits until everything from the tables is recorded. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The session has to end; the next one begins the recovery again.
    pub(super) async fn closed(&mut self) -> Result<()> {
        let closed = (&mut self.closed).await;
        closed.unwrap_or_else(|_| Err(Error::new(Code::Internal, "the recovery task ended")))
    }
}

impl Drop for Seam {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts to send every row that is visible in the slot's snapshot, and has no record there, into
/// the pipeline. The stream is open by now: the slot is held. The second part says when it is over.
/// `publication` is how it was before the slot was made.
pub(super) async fn start(
    relay: &Relay,
    sql: &Sql,
    slot: NewSlot,
    walsender: i32,
    publication: String,
    rows: TableSender,
) -> Result<(Seam, oneshot::Receiver<()>)> {
    let settings = &relay.settings;
    let NewSlot {
        consistent_point,
        snapshot,
    } = slot;
    let place = from_table::place_before(consistent_point);
    let looking = async {
        let last_ordinal = from_table::last_ordinal(sql, place)
            .await?
            .max(from_table::last_ordinal(sql, FIRST_PLACE).await?);
        // Not in the snapshot, which would keep a lock on that table for as long as it is read.
        // Nobody vouches while the slot is marked.
        let resolved = Resolved::read(sql, &settings.slot).await?;
        let firsts = match resolved.repeats() {
            true => Firsts::read(sql, settings.shard()).await?,
            false => Firsts::default(),
        };
        Ok::<_, Error>((last_ordinal, resolved, firsts))
    };
    let (last_ordinal, resolved, firsts) = answer_within(ANSWER_LIMIT, looking).await?;
    let places = Places::of(settings.shard());
    let recovery = Recovery {
        target: settings.database()?.clone(),
        slot: settings.slot.clone(),
        instance: relay.instance.clone(),
        walsender,
        tables: settings.tables.clone(),
        project: settings.project()?.to_owned(),
        state: relay.state.clone(),
        metrics: relay.metrics.clone(),
        place,
        next: places.nth_after(last_ordinal),
        places,
        shard: settings.shard(),
        dispatch: settings.dispatch,
        publication,
        resolved,
        firsts,
        rows,
        progress: Progress::new(),
    };
    let (close, closed) = oneshot::channel();
    let (tell, over) = oneshot::channel();
    let task = tokio::spawn(async move {
        // Nobody listens any more when the session has ended.
        let _ = match recovery.run(snapshot).await {
            Ok(()) => {
                let _ = tell.send(());
                close.send(Ok(()))
            }
            Err(Interrupted::Failed(error)) => close.send(Err(error)),
            Err(Interrupted::SessionEnded) => Ok(()),
        };
    });
    Ok((Seam { closed, task }, over))
}

/// Why reading ended early.
enum Interrupted {
    Failed(Error),
    SessionEnded,
}

impl<E: Into<Error>> From<E> for Interrupted {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// The task that reads.
struct Recovery {
    target: Target,
    slot: slot_manager::SlotName,
    instance: String,
    /// The process that reads the slot for this session.
    walsender: i32,
    tables: Vec<TableSettings>,
    project: String,
    state: Arc<State>,
    metrics: Metrics,
    place: CommitLsn,
    shard: Option<Shard>,
    places: Places,
    /// Which of this relay's events at that place comes next.
    next: u32,
    dispatch: Dispatch,
    publication: String,
    resolved: Resolved,
    firsts: Firsts,
    rows: TableSender,
    progress: Progress,
}

impl Recovery {
    async fn run(mut self, snapshot: PatientSql) -> Result<(), Interrupted> {
        let looking = snapshot.query_one(SNAPSHOT_XMIN, &[]);
        let xmin: i64 = snapshot.answer(looking).await?.get(0);
        for n in 0..self.tables.len() {
            self.read(n, &snapshot).await?;
        }
        // What it kept from vacuum is free again while the last events are on their way.
        drop(snapshot);
        if self.rows.settled().await == Err(SessionEnded) {
            return Err(Interrupted::SessionEnded);
        }
        let sql = connect(&self.target, "postrider recovery", STATEMENT_TIMEOUT).await?;
        let Progress { rows, began, .. } = self.progress;
        tracing::warn!(
            slot = %self.slot, rows, seconds = began.elapsed().as_secs(),
            "recovered: everything in the tables has a record; the stream goes on"
        );
        let manner = Manner {
            dispatch: self.dispatch,
            publication: &self.publication,
        };
        let (slot, instance) = (&self.slot, &self.instance);
        let writing = record::recovered(&sql, slot, instance, self.walsender, manner, xmin);
        if !answer_within(ANSWER_LIMIT, writing).await? {
            tracing::warn!(
                slot = %self.slot,
                "another relay has marked the slot meanwhile: the next session looks again"
            );
        }
        self.state.set(Phase::Streaming);
        Ok(())
    }

    async fn read(&mut self, table: usize, snapshot: &PatientSql) -> Result<(), Interrupted> {
        let table = &self.tables[table];
        let resolved = &self.resolved;
        let looking = refuse_rewritten(snapshot, &table.table);
        snapshot.answer(looking).await?;
        let resolving = TableReader::resolve(snapshot, table, &self.project, self.shard);
        let reader = snapshot.answer(resolving).await?;
        let reading = Unrecorded::of(snapshot, reader, table, resolved, &self.firsts);
        let mut unrecorded = snapshot.answer(reading).await?;
        let before = self.progress.rows;
        while let Some(row) = snapshot.answer(unrecorded.next()).await? {
            let ordinal = self.places.nth(self.next)?;
            let Some(row) = unrecorded.event(&row, self.place, ordinal) else {
                continue;
            };
            self.next += 1;
            self.progress.row();
            self.metrics.events_from_table.inc();
            let row = match row {
                Ok(event) => FromTable::Event(event),
                Err(error) => FromTable::Unmappable(error),
            };
            if self.rows.send(row).await == Err(SessionEnded) {
                return Err(Interrupted::SessionEnded);
            }
        }
        let rows = self.progress.rows - before;
        tracing::info!(table = %table.table, rows, "recovering: the table is read");
        Ok(())
    }
}

struct Progress {
    began: Instant,
    logged: Instant,
    rows: u64,
}

impl Progress {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            began: now,
            logged: now,
            rows: 0,
        }
    }

    fn row(&mut self) {
        self.rows += 1;
        // Looking at the clock for each row would cost more than the row.
        if self.rows.is_multiple_of(256) && self.logged.elapsed() >= LOG_INTERVAL {
            self.logged = Instant::now();
            let rows = self.rows;
            tracing::info!(rows, "recovering: rows are being delivered from the tables");
        }
    }
}
