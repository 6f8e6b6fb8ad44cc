//! Decides how a session begins: waits until the slot is free, and compares it with the relay's row
//! in `outbox.relay` and with the server.
//!
//! The row is read after the wait, because the previous holder of the slot may have written it until
//! then.

use std::sync::atomic::Ordering;

use decoder::Lsn;
use slot_manager::publication::{self, PublicationState};
use slot_manager::{Cluster, Slot, SlotName, cluster};
use tokio_postgres::types::PgLsn;

use super::{Relay, standby};
use crate::capture::ScanWindow;
use crate::capture::claim::{self, CaptureStart, Captured, FoundTable};
use crate::capture::table::{TableReader, altered_since};
use crate::error::{Code, Error, Result};
use crate::metrics::KindLabel;
use crate::postgres::Sql;
use crate::recovery::loss::{self, Loss, Seen, SlotVerdict};
use crate::recovery::slot::{self, RecoverySlot};
use crate::settings::{Dispatch, OnLoss, Settings, Start};
use crate::state::Phase;
use crate::store::capture_record::{self as captures, CaptureRecord};
use crate::store::relay_row::{self, Audit, Unfinished};

/// Needs everything of our own schema that statements over captured tables use.
const OURS: &str = "SELECT outbox.event_uuid('', '', null) FROM outbox.dispatch LIMIT 0";

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

/// The plan, and the facts behind it.
#[derive(Debug)]
pub(super) struct Opening {
    pub(super) plan: Plan,
    /// Whether events may have been delivered without a record.
    pub(super) repeats: bool,
    /// The tables of the settings, each with its capture record.
    pub(super) captured: Vec<Captured>,
    /// The publication, as seen while nobody was reading from the slot.
    pub(super) publication: PublicationState,
}

/// Runs before anything else: on a copy of the cluster, the relay must not even stand by.
///
/// # Errors
/// `foreign-cluster`, `schema-missing`.
pub(super) async fn refuse_a_copy(relay: &Relay, sql: &Sql, cluster: &Cluster) -> Result<()> {
    match relay_row::read(sql, &relay.settings.slot).await? {
        Some(earlier) => not_foreign(relay, &earlier, cluster),
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

/// Waits until the slot is free, makes the plan, and claims the tables. A recovery is marked before
/// that: a table that is captured, but not recovered yet, would look served.
///
/// # Errors
/// `foreign-cluster`; `slot-missing`, `slot-lost` and `slot-recreated` when `slot_on_loss` is
/// `stop`; `slot-foreign`, `slot-busy`, `table-captured`; if a recovery could not read everything,
/// `schema-missing`, `privilege-missing` and those of [`TableReader::resolve`]; errors of a statement.
pub(super) async fn plan(relay: &Relay, sql: &Sql, cluster: &Cluster) -> Result<Opening> {
    let name = &relay.settings.slot;
    let slot = free_slot(relay, sql).await?;
    // Check again: waiting for the slot may have taken days.
    let publication = check_publication(relay, sql).await?;
    let earlier = relay_row::read(sql, name).await?;
    if let Some(earlier) = &earlier {
        not_foreign(relay, earlier, cluster)?;
    }
    let found = claim::look(sql, &relay.settings.tables).await?;
    let records = captures::read(&**sql).await?;
    let known = claim::matched(&found, &records);
    claim::refuse_others(&known, name)?;
    let is_first = earlier.as_ref().is_none_or(is_at_its_first_start);
    let seen = Seen {
        earlier: earlier.as_ref(),
        slot: slot.as_ref(),
        cluster,
        server_lsn: server_lsn(sql).await?,
        start: claim::start(relay.settings.start, is_first, &known),
        dispatch: relay.settings.dispatch,
        publication: publication.fingerprint(),
        has_new_table: known.iter().any(Option::is_none),
        can_continue: can_continue(earlier.as_ref(), relay.settings.dispatch, &found, &known),
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
            let loss = recover_or_stop(relay, loss)?;
            everything_is_readable(relay, sql).await?;
            let (instance, why) = (&relay.instance, loss.name());
            relay_row::mark::mark_recovering(sql, name, cluster, instance, why).await?;
            Plan::Recover(loss)
        }
    };
    let begin = CaptureStart {
        start: relay.settings.start,
        publication: publication.fingerprint(),
        is_first,
    };
    let claiming = claim::claim(sql, name, found, begin, &relay.instance);
    Ok(Opening {
        plan,
        repeats: loss::repeats(seen),
        captured: claiming.await?,
        publication,
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

/// Waits until nobody reads from the slot; `None` when it does not exist.
async fn free_slot(relay: &Relay, sql: &Sql) -> Result<Option<Slot>> {
    match standby::wait_until_free(relay, sql).await {
        Ok(slot) => Ok(Some(slot)),
        Err(error) if error.code() == Code::SlotMissing => Ok(None),
        Err(error) => Err(error),
    }
}

/// The end of the server's WAL.
///
/// # Errors
/// Database errors.
pub(crate) async fn server_lsn(sql: &Sql) -> Result<Lsn> {
    let row = sql.query_one("SELECT pg_current_wal_lsn()", &[]).await?;
    let lsn: PgLsn = row.get(0);
    Ok(Lsn::new(lsn.into()))
}

fn not_foreign(relay: &Relay, earlier: &relay_row::Recorded, cluster: &Cluster) -> Result<()> {
    let Some(error) = foreign(&relay.settings.slot, earlier, cluster) else {
        return Ok(());
    };
    show(relay, error.code().name());
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

fn recover_or_stop(relay: &Relay, loss: Loss) -> Result<Loss> {
    if let Some(health) = loss.health_name() {
        show(relay, health);
    }
    match (
        relay.settings.slot_on_loss,
        loss.stops(&relay.settings.slot),
    ) {
        (OnLoss::Stop, Some(error)) => Err(error),
        (OnLoss::Stop, None) | (OnLoss::Recover, _) => Ok(loss),
    }
}

/// Shows the health in the metrics, because the supervisor does not run yet.
fn show(relay: &Relay, kind: &'static str) {
    let health = &relay.metrics.slot_health;
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

/// Checks the publication.
///
/// # Errors
/// `publication-missing`, `publication-drift`.
pub(super) async fn check_publication(relay: &Relay, sql: &Sql) -> Result<PublicationState> {
    let publication = &relay.settings.publication;
    let state = publication::inspect(sql, publication, &relay.captured).await?;
    if let Some(problem) = state.problems().first() {
        let error = Error::from(problem);
        // The publication was right before: somebody is altering it or a table, and will finish.
        let is_altered = error.code() != Code::PublicationMissing
            && relay.publication_was_right.load(Ordering::Relaxed);
        return Err(if is_altered {
            Error::new(Code::PublicationDrift, error.what()).hint(problem.remedy())
        } else {
            error
        });
    }
    if let (Dispatch::Exceptions, Some(error)) = (relay.settings.dispatch, untraced(&state)) {
        return Err(error);
    }
    relay.publication_was_right.store(true, Ordering::Relaxed);
    Ok(state)
}

/// The error for a table that is published only through its schema. Without records, a time in which
/// the publication left the table out would go unnoticed.
pub(crate) fn untraced(state: &PublicationState) -> Option<Error> {
    let table = state.untraced().next()?;
    let publication = slot_manager::quoted_identifier(&state.name);
    let what = format!(
        "publication {publication} contains table {table} only through its schema, so taking the table \
         out for a while would leave no trace; dispatch = exceptions needs that trace"
    );
    let remedy =
        format!("run alter publication {publication} add table {table}, or set dispatch = full");
    Some(Error::new(Code::PublicationDrift, what).hint(remedy))
}

/// Carries out the plan. Returns where the session begins, what to audit, and the slot of the recovery
/// if there is one.
pub(super) async fn carry_out(
    relay: &Relay,
    sql: &Sql,
    plan: Plan,
) -> Result<(Lsn, Audit, Option<RecoverySlot>)> {
    match plan {
        Plan::Stream { confirmed, audit } => Ok((confirmed, audit, None)),
        Plan::Continue {
            confirmed,
            audit,
            unfinished,
        } => {
            relay.state.set(Phase::Recovering);
            let kept = slot::kept(relay, unfinished);
            Ok((confirmed, audit, Some(kept)))
        }
        Plan::Recover(loss) => {
            // Creating the slot may take minutes.
            relay.state.set(Phase::Recovering);
            let new = slot::create(relay, sql, &loss).await?;
            Ok((new.consistent_point(), Audit::Continue, Some(new)))
        }
    }
}

/// Makes sure that a recovery can read everything it needs, while nothing has changed yet: the old
/// slot may still hold events that we cannot read from the tables. Even when a statement asks for no
/// rows, the server refuses it if a privilege is missing or row-level security would hide rows.
///
/// # Errors
/// `schema-missing`, `privilege-missing`; `slot-busy` when a table was altered in the meantime;
/// errors of [`TableReader::resolve`].
async fn everything_is_readable(relay: &Relay, sql: &Sql) -> Result<()> {
    // Check our own schema first: below, a missing object looks like a table that was just altered.
    sql.batch_execute(OURS).await?;
    let settings = &relay.settings;
    let captured =
        claim::as_if_claimed(sql, &settings.slot, &settings.tables, settings.start).await?;
    for (table, captured) in settings.tables.iter().zip(&captured) {
        let reader = TableReader::resolve(sql, table, settings.project()?, captured).await?;
        let condition = ScanWindow::unresolved(captured, false).condition();
        let id = reader.event_id_sql();
        let statement = format!(
            "{} where {condition} and not exists (select from outbox.dispatch d \
             where d.event_id = {id}) limit 0",
            reader.select_sql()
        );
        sql.simple_query(&statement).await.map_err(altered_since)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
