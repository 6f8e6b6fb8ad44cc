//! A lost slot is not lost data: a new slot, everything without a record from the tables as far as
//! the slot will not bring it, and then the stream.
//!
//! The order of the steps is the argument (docs/adr/0011-recovery.md). The mark in `outbox.relay`
//! is durable before anything changes, and goes when every row has its record: whoever comes in
//! between begins again, and sends only what has no record. The slot is held from before the
//! first row is sent until the end, so that there is one sender. Nothing of the stream is taken
//! before all rows from the tables are recorded, so that each key keeps its order over the seam.
//! The tables are read in short statements: a row is sent when the slot's snapshot shows the
//! transaction that inserted it, whenever it is read.
//!
//! Not here: whether a recovery is needed (`loss`), and what becomes of an event (`delivery`).

pub(crate) mod blocked;
pub(crate) mod loss;
mod snapshot;
pub(crate) mod unrecorded;

use std::sync::Arc;
use std::time::{Duration, Instant};

use decoder::Lsn;
use slot_manager::{Cluster, Error as SlotError, SlotName, retention, slots};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::from_table::{self, FIRST_PLACE, Interrupted, Places, SessionEnded, TableSender};
use super::record::Manner;
use super::session::ANSWER_LIMIT;
use super::{Phase, Relay, State, record};
use crate::capture::claim::Captured;
use crate::capture::record::Resolved;
use crate::capture::{Snapshot, Window, record as captures, scan, shape};
use crate::error::{Code, Error, Result};
use crate::map::TableSettings;
use crate::metrics::{Kind, Metrics};
use crate::postgres::{PatientSql, Sql, Target, answer_within};
use crate::settings::Dispatch;
use crate::source;
use crate::table::TableReader;
use blocked::Firsts;
use loss::Loss;
use unrecorded::Unrecorded;

/// How long to wait for running transactions when the slot is made. Long, since the old slot is
/// gone, and each attempt waits anew.
const CREATE_LIMIT: Duration = Duration::from_secs(300);

/// What holds it up is named every so often.
const BLOCKERS_NAMED_AFTER: Duration = Duration::from_secs(15);

const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A new slot, and the transactions that it will not bring.
pub(super) struct NewSlot {
    pub(super) consistent_point: Lsn,
    snapshot: Snapshot,
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
    let marking = record::mark_recovering(sql, slot, cluster, instance, why);
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
    let snapshot = snapshot::exported(target, &created.snapshot).await?;
    let consistent_point = created.consistent_point;
    // There may be no second walsender for the stream.
    created.close().await;
    snapshot::wait_until_visible(sql, &snapshot).await?;
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

/// What a recovery reads.
#[derive(Debug)]
pub(super) struct What {
    /// The publication as it was before the slot was made.
    pub(super) publication: String,
    /// The tables of the settings.
    pub(super) captured: Vec<Captured>,
    /// Whether events may have been published without a record.
    pub(super) repeats: bool,
}

/// Starts to send every unresolved row that the slot's snapshot shows into the pipeline. The stream
/// is open by now: the slot is held. The second part says when it is over.
pub(super) async fn start(
    relay: &Relay,
    sql: &Sql,
    slot: NewSlot,
    walsender: i32,
    what: What,
    rows: TableSender,
) -> Result<(Seam, oneshot::Receiver<()>)> {
    let settings = &relay.settings;
    let What {
        publication,
        captured,
        repeats,
    } = what;
    let NewSlot {
        consistent_point,
        snapshot,
    } = slot;
    let place = from_table::place_before(consistent_point);
    let looking = async {
        let last_ordinal = from_table::last_ordinal(sql, place)
            .await?
            .max(from_table::last_ordinal(sql, FIRST_PLACE).await?);
        let firsts = match repeats {
            true => Firsts::read(sql).await?,
            false => Firsts::default(),
        };
        Ok::<_, Error>((last_ordinal, firsts))
    };
    let (last_ordinal, firsts) = answer_within(ANSWER_LIMIT, looking).await?;
    let recovery = Recovery {
        target: settings.database()?.clone(),
        slot: settings.slot.clone(),
        instance: relay.instance.clone(),
        walsender,
        tables: settings.tables.clone(),
        project: settings.project()?.to_owned(),
        state: relay.state.clone(),
        metrics: relay.metrics.clone(),
        places: Places {
            commit: place,
            next_ordinal: last_ordinal + 1,
        },
        dispatch: settings.dispatch,
        publication,
        captured,
        repeats,
        snapshot,
        firsts,
        rows,
        progress: Progress::new(),
    };
    let (close, closed) = oneshot::channel();
    let (tell, over) = oneshot::channel();
    let task = tokio::spawn(async move {
        // Nobody listens any more when the session has ended.
        let _ = match recovery.run().await {
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
    places: Places,
    dispatch: Dispatch,
    publication: String,
    captured: Vec<Captured>,
    repeats: bool,
    snapshot: Snapshot,
    firsts: Firsts,
    rows: TableSender,
    progress: Progress,
}

impl Recovery {
    async fn run(mut self) -> Result<(), Interrupted> {
        let sql = PatientSql::open(&self.target, "postrider recovery", Duration::ZERO).await?;
        scan::prepare(&sql).await?;
        for n in 0..self.tables.len() {
            self.read(n, &sql).await?;
        }
        if self.rows.settled().await == Err(SessionEnded) {
            return Err(Interrupted::SessionEnded);
        }
        let Progress { rows, began, .. } = self.progress;
        tracing::warn!(
            slot = %self.slot, rows, seconds = began.elapsed().as_secs(),
            "recovered: everything in the tables has a record; the stream goes on"
        );
        sql.answer(self.write_down(&sql)).await?;
        self.state.set(Phase::Streaming);
        Ok(())
    }

    /// Everything that the snapshot shows is resolved, but for rows with odd numbers, where reading
    /// began with a number: the auditor looks at those, and raises the floors.
    async fn write_down(&self, sql: &Sql) -> Result<()> {
        let (slot, instance) = (&self.slot, &self.instance);
        for captured in &self.captured {
            let identity = &captured.record.identity;
            if Window::unresolved(captured, self.repeats)
                .from_seq
                .is_some()
            {
                captures::forget_numbers(sql, slot, identity).await?;
                continue;
            }
            let resolved = Resolved {
                identity,
                floor: self.snapshot.xmin(),
                floor_seq: None,
                // With records the auditor compares new ones.
                partitions: self.repeats.then_some(&*captured.shape.partitions),
            };
            captures::resolve(sql, slot, self.walsender, &resolved).await?;
        }
        let manner = Manner {
            dispatch: self.dispatch,
            publication: &self.publication,
        };
        if !record::recovered(sql, slot, instance, self.walsender, manner).await? {
            tracing::warn!(
                slot = %self.slot,
                "another relay has marked the slot meanwhile: the next session looks again"
            );
        }
        Ok(())
    }

    async fn read(&mut self, n: usize, sql: &PatientSql) -> Result<(), Interrupted> {
        let (table, captured) = (&self.tables[n], &self.captured[n]);
        let resolving = TableReader::resolve(sql, table, &self.project, captured);
        let reader = sql.answer(resolving).await?;
        let window = Window {
            shown_by: Some(&self.snapshot),
            ..Window::unresolved(captured, self.repeats)
        };
        let unrecorded = Unrecorded::of(sql, reader, table, window, &self.firsts).await?;
        let (progress, metrics) = (&mut self.progress, &self.metrics);
        let sending = from_table::hand_over(unrecorded, &mut self.rows, &mut self.places, || {
            progress.row();
            metrics.events_from_table.inc();
        });
        let rows = sending.await?;
        if window.goes_by_places() {
            sql.answer(shape::refuse_rewritten(sql, table, &captured.shape))
                .await?;
        }
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
