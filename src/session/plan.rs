//! Decides how a session begins: compares the slot, once it is free, with the relay's row in
//! `outbox.relay` and with the server.
//!
//! The row is read after the slot is free, because the previous holder of the slot may have written it
//! until then.
//!
//! Not here: the decision itself, which is pure (`recovery::loss`).

use decoder::Lsn;
use slot_manager::publication::PublicationState;
use slot_manager::{Cluster, Slot, SlotName, cluster};

use crate::capture::ScanWindow;
use crate::capture::claim::{self, CaptureStart, Captured, FoundTable};
use crate::capture::table::{TableReader, altered_since};
use crate::error::{Code, Error, Result};
use crate::metrics::{KindLabel, Metrics};
use crate::postgres::Sql;
use crate::recovery::loss::{self, Loss, Seen, SlotVerdict};
use crate::settings::{Dispatch, OnLoss, Settings, Start};
use crate::store;
use crate::store::capture_record::{self as captures, CaptureRecord};
use crate::store::dispatch::has_no_row_sql;
use crate::store::relay_row::{self, Audit, ServedSlot, Unfinished};

/// How the session begins.
#[derive(Debug)]
pub(super) enum Plan {
    /// Stream from the slot as it is.
    Stream { confirmed: Lsn, audit: Audit },
    /// The same, but first publish the rows that an unfinished recovery has left in the tables.
    Continue {
        confirmed: Lsn,
        audit: Audit,
        unfinished: Unfinished,
    },
    /// Create a new slot, and publish the rows from before it from the tables.
    Recover(Loss),
}

/// What was seen while nobody was reading from the slot.
#[derive(Debug)]
pub(super) struct FreeSlot {
    /// `None` when it does not exist.
    pub(super) slot: Option<Slot>,
    pub(super) publication: PublicationState,
}

/// The plan, and the facts behind it.
#[derive(Debug)]
pub(super) struct Opening {
    pub(super) plan: Plan,
    /// Whether events may have been delivered without a record.
    pub(super) repeats: bool,
    /// The tables of the settings, each with its capture record.
    pub(super) captured: Vec<Captured>,
}

/// Runs before anything else: on a copy of the cluster, the relay must not even stand by.
///
/// # Errors
/// `foreign-cluster`, `schema-missing`.
pub(super) async fn refuse_a_copy(
    sql: &Sql,
    slot: &SlotName,
    cluster: &Cluster,
    metrics: &Metrics,
) -> Result<()> {
    match relay_row::read(sql, slot).await? {
        Some(earlier) => not_foreign(slot, &earlier, cluster, metrics),
        None => Ok(()),
    }
}

/// The same check for `postrider check`.
///
/// # Errors
/// `foreign-cluster`, `schema-missing`.
pub(crate) async fn refuse_foreign_records(sql: &Sql, settings: &Settings) -> Result<()> {
    let cluster = cluster::inspect(sql).await?;
    match relay_row::read(sql, &settings.slot).await? {
        Some(earlier) => foreign(&settings.slot, &earlier, &cluster).map_or(Ok(()), Err),
        None => Ok(()),
    }
}

/// Makes the plan, and claims the tables. A recovery is marked before that: a table that is captured,
/// but not recovered yet, would look served.
///
/// # Errors
/// `foreign-cluster`; `slot-missing`, `slot-lost` and `slot-recreated` when `slot_on_loss` is
/// `stop`; `slot-foreign`, `slot-busy`, `table-captured`; if a recovery could not read everything,
/// `schema-missing`, `privilege-missing` and those of [`TableReader::resolve`]; errors of a statement.
pub(super) async fn plan(
    sql: &Sql,
    settings: &Settings,
    served: ServedSlot<'_>,
    FreeSlot { slot, publication }: &FreeSlot,
    metrics: &Metrics,
) -> Result<Opening> {
    let ServedSlot {
        slot: name,
        cluster,
        instance,
    } = served;
    let earlier = relay_row::read(sql, name).await?;
    if let Some(earlier) = &earlier {
        not_foreign(name, earlier, cluster, metrics)?;
    }
    let found = claim::look(sql, &settings.tables).await?;
    let records = captures::read(&**sql).await?;
    let known = claim::matched(&found, &records);
    claim::refuse_others(&known, name)?;
    let is_first = earlier.as_ref().is_none_or(is_at_its_first_start);
    let seen = Seen {
        earlier: earlier.as_ref(),
        slot: slot.as_ref(),
        cluster,
        server_lsn: cluster::written_wal_end(sql).await?,
        start: claim::start(settings.start, is_first, &known),
        dispatch: settings.dispatch,
        publication: publication.fingerprint(),
        has_new_table: known.iter().any(Option::is_none),
        since_lsn: captures::since_lsn(&records, name),
        can_continue: can_continue(earlier.as_ref(), settings.dispatch, &found, &known),
    };
    let plan = match loss::judge(seen) {
        SlotVerdict::Stream { confirmed, audit } => {
            log_failover(earlier.as_ref(), cluster);
            Plan::Stream { confirmed, audit }
        }
        SlotVerdict::Continue {
            confirmed,
            audit,
            unfinished,
        } => Plan::Continue {
            confirmed,
            audit,
            unfinished,
        },
        SlotVerdict::Recover(loss) => {
            let loss = recover_or_stop(settings, loss, metrics)?;
            everything_is_readable(sql, settings).await?;
            relay_row::mark::mark_recovering(sql, served, loss.name()).await?;
            Plan::Recover(loss)
        }
    };
    let begin = CaptureStart {
        start: settings.start,
        publication: publication.fingerprint(),
        is_first,
        since_lsn: None,
    };
    let claiming = claim::claim(sql, name, found, begin, instance);
    Ok(Opening {
        plan,
        repeats: loss::repeats(seen),
        captured: claiming.await?,
    })
}

/// Whether the first start has begun and not ended.
fn is_at_its_first_start(earlier: &relay_row::Recorded) -> bool {
    let first_start = Loss::FirstStart(Start::New).name();
    earlier.confirmed_lsn.is_none() && earlier.recovering.as_deref() == Some(first_start)
}

/// Whether the rows of the unfinished recovery can still be found. They are found by the transaction that
/// inserted them, so every table must have had `inserted_xid` from before that recovery. And all
/// outcomes must have records: without them, rows that the stream has passed look like new ones.
fn can_continue(
    earlier: Option<&relay_row::Recorded>,
    dispatch: Dispatch,
    found: &[FoundTable],
    known: &[Option<&CaptureRecord>],
) -> bool {
    let has_records = |earlier: &relay_row::Recorded| {
        [dispatch, earlier.dispatch] == [Dispatch::Full; 2] && earlier.unfinished.is_some()
    };
    let has_had_xids = |(found, known): (&FoundTable, &Option<&CaptureRecord>)| {
        known.is_some_and(|record| {
            let mut added = record.added_xids.iter().chain(&found.shape.missing_xids);
            let has_them = found.shape.has_inserted_xid && record.has_inserted_xid;
            has_them && added.all(|xid| *xid < record.floor)
        })
    };
    earlier.is_some_and(has_records) && found.iter().zip(known).all(has_had_xids)
}

fn not_foreign(
    slot: &SlotName,
    earlier: &relay_row::Recorded,
    cluster: &Cluster,
    metrics: &Metrics,
) -> Result<()> {
    let Some(error) = foreign(slot, earlier, cluster) else {
        return Ok(());
    };
    show(metrics, error.code().name());
    Err(error)
}

/// The error of a relay whose records come from another cluster or database.
fn foreign(slot: &SlotName, earlier: &relay_row::Recorded, cluster: &Cluster) -> Option<Error> {
    let (expected, found) = (earlier.origin, cluster.origin());
    let what = format!(
        "slot \"{slot}\" was served on cluster {expected}, but this is cluster {found}: is it a copy?"
    );
    (!expected.matches(found)).then(|| Error::new(Code::ForeignCluster, what))
}

fn recover_or_stop(settings: &Settings, loss: Loss, metrics: &Metrics) -> Result<Loss> {
    if let Some(health) = loss.health_name() {
        show(metrics, health);
    }
    match (settings.slot_on_loss, loss.stops(&settings.slot)) {
        (OnLoss::Stop, Some(error)) => Err(error),
        (OnLoss::Stop, None) | (OnLoss::Recover, _) => Ok(loss),
    }
}

/// Shows the health in the metrics, because the supervisor does not run yet.
fn show(metrics: &Metrics, kind: &'static str) {
    let health = &metrics.slot_health;
    health.clear();
    health.get_or_create(&KindLabel { kind }).set(1);
}

fn log_failover(earlier: Option<&relay_row::Recorded>, cluster: &Cluster) {
    if let Some(earlier) = earlier.filter(|earlier| earlier.timeline != cluster.timeline) {
        tracing::warn!(
            before = earlier.timeline,
            now = cluster.timeline,
            "the server was promoted from a standby, and it has the slot: auditing everything; recent \
             events may be published twice"
        );
    }
}

/// Makes sure that a recovery can read everything it needs, while nothing has changed yet: the old
/// slot may still hold events that we cannot read from the tables. Even when a statement asks for no
/// rows, the server refuses it if a privilege is missing or row-level security would hide rows.
///
/// # Errors
/// `schema-missing`, `privilege-missing`; `slot-busy` when a table was altered in the meantime;
/// errors of [`TableReader::resolve`].
async fn everything_is_readable(sql: &Sql, settings: &Settings) -> Result<()> {
    // Check our own schema first: below, a missing object looks like a table that was just altered.
    store::dispatch::check_readable(sql).await?;
    let captured =
        claim::as_if_claimed(sql, &settings.slot, &settings.tables, settings.start).await?;
    for (table, captured) in settings.tables.iter().zip(&captured) {
        let reader = TableReader::resolve(sql, table, settings.project()?, captured).await?;
        let condition = ScanWindow::unresolved(captured, false).condition();
        let statement = format!(
            "{} where {condition} and {} limit 0",
            reader.select_sql(),
            has_no_row_sql(reader.event_id_sql())
        );
        sql.simple_query(&statement).await.map_err(altered_since)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
