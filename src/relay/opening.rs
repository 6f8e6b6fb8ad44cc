//! How a session has to begin: waits until the slot is free, and compares it with what was
//! written down and with the server.
//!
//! The row is read after the wait, never before: whoever held the slot has written it since.

use std::sync::atomic::Ordering;
use std::time::Duration;

use decoder::Lsn;
use slot_manager::publication::{self, PublicationState};
use slot_manager::slots::{self, CreateOptions};
use slot_manager::{Cluster, Error as SlotError, Slot, SlotName, cluster};
use tokio_postgres::types::PgLsn;

use super::recovery::NewSlot;
use super::recovery::loss::{self, Audit, Loss, Seen, Verdict};
use super::session::ANSWER_LIMIT;
use super::{Relay, record, recovery, standby};
use crate::capture::claim::{self, Begin, Captured};
use crate::capture::shape::{self, Tops};
use crate::capture::{Window, record as captures};
use crate::error::{Code, Error, Result};
use crate::metrics::Kind;
use crate::postgres::{Sql, answer_within};
use crate::settings::{Dispatch, OnLoss, Settings};
use crate::table::{TableReader, altered_since};

/// How long to wait for running transactions when a slot is created.
const CREATE_TIMEOUT: Duration = Duration::from_secs(30);

/// What of our own the statements over captured tables need.
const OURS: &str = "SELECT outbox.event_uuid('', '', null) FROM outbox.dispatch LIMIT 0";

/// How the session begins.
#[derive(Debug)]
pub(super) enum Plan {
    /// On the slot as it is.
    Stream { confirmed: Lsn, audit: Audit },
    /// On a new slot, with what is in the tables before it.
    Recover(Loss),
}

/// What the session begins with.
#[derive(Debug)]
pub(super) struct Opening {
    pub(super) plan: Plan,
    /// Whether events may have been delivered without a record.
    pub(super) repeats: bool,
    /// The tables of the settings, each with its record.
    pub(super) captured: Vec<Captured>,
    /// The publication as it was when nobody read from the slot.
    pub(super) publication: PublicationState,
}

/// Before anything else: a copy must not even stand by.
///
/// # Errors
/// `foreign-cluster`, `schema-missing`.
pub(super) async fn refuse_a_copy(relay: &Relay, sql: &Sql, cluster: &Cluster) -> Result<()> {
    let reading = record::read(sql, &relay.settings.slot);
    match answer_within(ANSWER_LIMIT, reading).await? {
        Some(earlier) => not_foreign(relay, &earlier, cluster),
        None => Ok(()),
    }
}

/// The same for `postrider check`.
///
/// # Errors
/// `foreign-cluster`, `schema-missing`.
pub(crate) async fn refuse_foreign_records(sql: &Sql, settings: &Settings) -> Result<()> {
    let cluster = cluster::inspect(sql).await?;
    match record::read(sql, &settings.slot).await? {
        Some(earlier) => foreign(&settings.slot, &earlier, &cluster).map_or(Ok(()), Err),
        None => Ok(()),
    }
}

/// Decides, as soon as the slot is free. Creates it at the first start.
///
/// # Errors
/// `foreign-cluster`; `slot-missing`, `slot-lost` and `slot-recreated` when `slot_on_loss` is
/// `stop`; `slot-foreign`, `slot-busy`, `table-captured`; those of a statement.
pub(super) async fn plan(relay: &Relay, sql: &Sql, cluster: &Cluster) -> Result<Opening> {
    let name = &relay.settings.slot;
    let mut tops: Option<Tops> = None;
    loop {
        let slot = free_slot(relay, sql).await?;
        // Again, since waiting for the slot may have taken days.
        let publication = check_publication(relay, sql).await?;
        let earlier = answer_within(ANSWER_LIMIT, record::read(sql, name)).await?;
        if let Some(earlier) = &earlier {
            not_foreign(relay, earlier, cluster)?;
        }
        let looking = claim::look(sql, &relay.settings.tables);
        let found = answer_within(ANSWER_LIMIT, looking).await?;
        let records = answer_within(ANSWER_LIMIT, captures::read(&**sql)).await?;
        let known = claim::matched(&found, &records);
        claim::refuse_others(&known, name)?;
        let has_new_table = known.iter().any(Option::is_none);
        let is_captured = known.iter().any(Option::is_some);
        let tops = match &mut tops {
            Some(tops) => tops,
            none => none.insert(answer_within(ANSWER_LIMIT, shape::tops(sql, &found)).await?),
        };
        let seen = Seen {
            earlier: earlier.as_ref(),
            slot: slot.as_ref(),
            cluster,
            server_lsn: answer_within(ANSWER_LIMIT, server_lsn(sql)).await?,
            start: relay.settings.start,
            dispatch: relay.settings.dispatch,
            publication: publication.fingerprint(),
            has_new_table,
            is_captured,
        };
        let repeats = loss::repeats(seen);
        let plan = match loss::judge(seen) {
            Verdict::Stream { confirmed, audit } => {
                log_failover(earlier.as_ref(), cluster);
                Plan::Stream { confirmed, audit }
            }
            Verdict::CreateSlot => {
                // Before the slot: a crash in between loses nothing then.
                let begin = Begin {
                    start: relay.settings.start,
                    is_first: true,
                };
                let claiming = claim::claim(sql, name, found, begin, tops, &relay.instance);
                answer_within(ANSWER_LIMIT, claiming).await?;
                create(relay, sql).await?;
                continue;
            }
            Verdict::Recover(loss) => Plan::Recover(recover_or_stop(relay, loss)?),
        };
        let claiming = claim::claim(
            sql,
            name,
            found,
            Begin {
                start: relay.settings.start,
                is_first: earlier.is_none(),
            },
            tops,
            &relay.instance,
        );
        return Ok(Opening {
            plan,
            repeats,
            captured: answer_within(ANSWER_LIMIT, claiming).await?,
            publication,
        });
    }
}

/// The slot when nobody reads from it, or its absence.
async fn free_slot(relay: &Relay, sql: &Sql) -> Result<Option<Slot>> {
    match standby::wait_until_free(relay, sql).await {
        Ok(slot) => Ok(Some(slot)),
        Err(error) if error.code() == Code::SlotMissing => Ok(None),
        Err(error) => Err(error),
    }
}

/// Where the server's WAL ends.
///
/// # Errors
/// Those of a statement.
pub(crate) async fn server_lsn(sql: &Sql) -> Result<Lsn> {
    let row = sql.query_one("SELECT pg_current_wal_lsn()", &[]).await?;
    let lsn: PgLsn = row.get(0);
    Ok(Lsn::new(lsn.into()))
}

fn not_foreign(relay: &Relay, earlier: &record::Recorded, cluster: &Cluster) -> Result<()> {
    let Some(error) = foreign(&relay.settings.slot, earlier, cluster) else {
        return Ok(());
    };
    show(relay, error.code().name());
    Err(error)
}

/// The error of a relay whose records come from another cluster or database.
fn foreign(slot: &SlotName, earlier: &record::Recorded, cluster: &Cluster) -> Option<Error> {
    let (expected, found) = (earlier.origin, cluster.origin());
    let what = format!(
        "slot \"{slot}\" was served on cluster {expected}, and this is cluster {found}: a copy?"
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

/// Shows the health in the metrics; the supervisor, which does it else, does not run yet.
fn show(relay: &Relay, kind: &'static str) {
    let health = &relay.metrics.slot_health;
    health.clear();
    health.get_or_create(&Kind { kind }).set(1);
}

fn log_failover(earlier: Option<&record::Recorded>, cluster: &Cluster) {
    if let Some(earlier) = earlier.filter(|earlier| earlier.timeline != cluster.timeline) {
        tracing::warn!(
            before = earlier.timeline,
            now = cluster.timeline,
            "the server was promoted from a standby, and has the slot: everything is audited, and \
             events of the last moments may be repeated"
        );
    }
}

/// The first start. Another relay may be faster, which the next look shows.
async fn create(relay: &Relay, sql: &Sql) -> Result<()> {
    let name = &relay.settings.slot;
    let options = CreateOptions {
        failover: relay.settings.slot_failover,
    };
    let creating = async {
        match slots::create(sql, name, options, CREATE_TIMEOUT).await {
            Err(SlotError::SlotExists { .. }) => Ok(None),
            created => created.map(Some),
        }
    };
    if let Some(at) = answer_within(ANSWER_LIMIT, creating).await? {
        tracing::warn!(
            slot = %name, %at,
            "first start: created the slot; rows that were committed before are not delivered \
             (`start = all` delivers them)"
        );
    }
    Ok(())
}

/// Looks at the publication.
///
/// # Errors
/// `publication-missing`, `publication-drift`.
pub(super) async fn check_publication(relay: &Relay, sql: &Sql) -> Result<PublicationState> {
    let publication = &relay.settings.publication;
    let looking = publication::inspect(sql, publication, &relay.captured);
    let state = answer_within(ANSWER_LIMIT, looking).await?;
    if let Some(problem) = state.problems().first() {
        let error = Error::from(problem);
        // What was right is being altered, table or publication, and will be right again.
        let is_altered = error.code() != Code::PublicationMissing
            && relay.publication_was_right.load(Ordering::Relaxed);
        return Err(match is_altered {
            true => Error::new(Code::PublicationDrift, error.what()).hint(problem.remedy()),
            false => error,
        });
    }
    if let (Dispatch::Exceptions, Some(error)) = (relay.settings.dispatch, untraced(&state)) {
        return Err(error);
    }
    relay.publication_was_right.store(true, Ordering::Relaxed);
    Ok(state)
}

/// A publication of a whole schema cannot be trusted where events have no records: what it left
/// out for a while would not be noticed.
pub(crate) fn untraced(state: &PublicationState) -> Option<Error> {
    let table = state.untraced().next()?;
    let publication = slot_manager::quoted_identifier(&state.name);
    let what = format!(
        "table {table} is in publication {publication} by its schema, which leaves no trace when it \
         is taken out for a while; dispatch = exceptions needs that trace"
    );
    let remedy = format!("alter publication {publication} add table {table}, or dispatch = full");
    Some(Error::new(Code::PublicationDrift, what).hint(remedy))
}

/// Makes a new slot where that is the plan: where the session begins, what is to be audited, and
/// the new slot.
pub(super) async fn carry_out(
    relay: &Relay,
    sql: &Sql,
    cluster: &Cluster,
    plan: Plan,
    captured: &[Captured],
) -> Result<(Lsn, Audit, Option<NewSlot>)> {
    let loss = match plan {
        Plan::Stream { confirmed, audit } => return Ok((confirmed, audit, None)),
        Plan::Recover(loss) => loss,
    };
    let trying = everything_is_readable(relay, sql, captured);
    answer_within(ANSWER_LIMIT, trying).await?;
    let new = recovery::new_slot(relay, sql, cluster, &loss).await?;
    Ok((new.consistent_point, Audit::Continue, Some(new)))
}

/// Makes sure that a recovery will be able to read what it has to, as long as nothing has changed:
/// the old slot may have all that the tables do not show. The server refuses a statement when it
/// lacks a right, or when row-level security would hide rows, also if no row is asked for.
///
/// # Errors
/// `schema-missing`, `privilege-missing`; `slot-busy` when a table is altered meanwhile; those of
/// [`TableReader::resolve`].
async fn everything_is_readable(relay: &Relay, sql: &Sql, captured: &[Captured]) -> Result<()> {
    // What is ours first: below, whatever is missing counts as altered just now.
    sql.batch_execute(OURS).await?;
    let settings = &relay.settings;
    for (table, captured) in settings.tables.iter().zip(captured) {
        let reader = TableReader::resolve(sql, table, settings.project()?, captured).await?;
        let condition = Window::unresolved(captured, false).condition();
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
