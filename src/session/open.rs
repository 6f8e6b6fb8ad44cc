//! One session on the slot: check everything, stream, and shut down gracefully.
//!
//! The order of the steps makes this safe. First the cluster must be ours, and the publication right.
//! Then the slot must be free and ours: either the one that we left (`opening`), or a new one
//! (`recovery`), whose stream must wait until older rows are published from the tables. Then the
//! session looks up which events have an outcome. Only then does it read the stream.

use std::sync::Arc;
use std::time::Duration;

use decoder::Lsn;
use slot_manager::{Cluster, cluster};
use tokio::sync::{Notify, watch};
use tokio_postgres::types::{PgLsn, ToSql};

use super::pipeline::{Pipeline, PipelineEnd};
use super::plan::{self, Opening, check_publication};
use super::supervisor::Supervisor;
use super::{Relay, parts, stuck};
use crate::audit::{self, Auditor};
use crate::capture::earlier::OutcomeLookup;
use crate::capture::{Bounds, from_table};
use crate::delivery::backlog::Backlog;
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, connect};
use crate::recovery;
use crate::source::{Source, StreamOptions};
use crate::state::Phase;
use crate::store::dispatch::{RecordedEvents, wait_for_predecessor};
use crate::store::relay_row::{self, Audit, Manner};
use crate::watermark::{Confirmable, Watermark};

/// Statement timeout at the start; looking up recorded events may take longer than most.
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Statement timeout of look-ups while the stream waits.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// How long requests in flight may take to end when a session broke, before the next one begins.
const BROKEN_SESSION_DRAIN: Duration = Duration::from_secs(10);

/// How long to wait for the reason why a stream ended. The server sends it before it frees the slot.
const LAST_WORD_LIMIT: Duration = Duration::from_secs(1);

/// Recording the last position must not delay a shutdown for longer.
const WRITE_DOWN_LIMIT: Duration = Duration::from_secs(2);

/// Runs one session until shutdown or an error. Calls `started` when the session has begun.
pub(super) async fn run(
    relay: &Relay,
    shutdown: &mut watch::Receiver<bool>,
    started: impl FnOnce(Phase),
) -> Result<PipelineEnd> {
    // Also forgets findings of an attempt to open a session: another relay may have the slot now.
    relay.metrics.forget_session();
    let opening = open(relay);
    let (mut pipeline, beside) = tokio::select! {
        biased;
        _ = wait_for_stop(shutdown.clone()) => return Ok(PipelineEnd::Shutdown),
        opened = opening => opened?,
    };
    started(match pipeline.seam {
        Some(_) => Phase::Recovering,
        None => Phase::Streaming,
    });
    relay.metrics.sessions.inc();
    relay.metrics.holds_slot.set(1);
    let ended = pipeline.run(shutdown).await;
    relay.metrics.holds_slot.set(0);
    relay.metrics.oldest_pending.forget();
    let confirmed = pipeline.watermark.confirmable().lsn();
    match &ended {
        Ok(PipelineEnd::Shutdown) => {
            let confirmed = pipeline.drain(relay.settings.shutdown_timeout).await;
            write_down(relay, confirmed).await;
        }
        // The slot is another relay's, or may be soon: drop everything at once, including requests.
        Err(error) if error.code() == Code::LeaseLost => drop(pipeline),
        // The server waits for this session to end, and nothing can be recorded.
        Err(error) if error.code() == Code::PostgresStopping => {
            pipeline.drain(Duration::ZERO).await;
        }
        Err(_) => tokio::select! {
            _ = pipeline.drain(BROKEN_SESSION_DRAIN) => {}
            () = stop_is_due(shutdown.clone(), relay.settings.shutdown_timeout) => {}
        },
    }
    drop(beside);
    relay.metrics.forget_session();
    match ended {
        Err(error) if stuck::is_of_this_place(&error) => {
            Err(stuck::what_to_do(relay, confirmed, error).await)
        }
        ended => ended,
    }
}

/// Records the last position: if the slot is ahead of it at the next start, it is not the one that we
/// left. Without it, the next start only audits more.
async fn write_down(relay: &Relay, confirmed: Confirmable) {
    let writing = async {
        let sql = connect(relay.settings.database()?, "postrider", STATEMENT_TIMEOUT).await?;
        relay_row::write_final(
            &sql,
            &relay.settings.slot,
            PgLsn::from(confirmed.lsn().as_u64()),
            &relay.instance,
        )
        .await
    };
    if !matches!(
        tokio::time::timeout(WRITE_DOWN_LIMIT, writing).await,
        Ok(Ok(()))
    ) {
        tracing::debug!("could not write the last position to outbox.relay");
    }
}

/// Returns when the time for a shutdown is over.
async fn stop_is_due(shutdown: watch::Receiver<bool>, shutdown_timeout: Duration) {
    wait_for_stop(shutdown).await;
    tokio::time::sleep(shutdown_timeout).await;
}

async fn wait_for_stop(mut shutdown: watch::Receiver<bool>) {
    if shutdown.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// The tasks that run alongside the pipeline; they end when dropped.
type Beside = (Supervisor, Auditor);

async fn open(relay: &Relay) -> Result<(Pipeline, Beside)> {
    let settings = &relay.settings;
    let (sql, cluster) = primary(relay).await?;
    plan::refuse_a_copy(relay, &sql, &cluster).await?;
    // Look before a slot is created: then any change after that is noticed.
    let first_seen = check_publication(relay, &sql).await?;
    let Opening {
        plan,
        repeats,
        captured,
        publication,
    } = plan::plan(relay, &sql, &cluster).await?;
    wait_for_predecessor(&sql, &settings.slot, settings.publish_timeout).await?;
    let (confirmed, audit, new_slot) = plan::carry_out(relay, &sql, plan).await?;
    let mut source = open_source(relay, confirmed).await?;
    still_the_slot(relay, &sql, &mut source, confirmed).await?;
    // The supervisor proves the lease from here on, however long the rest takes: nobody reads the
    // stream yet.
    let hasten = Arc::new(Notify::new());
    let seen = publication.clone();
    let (supervisor, supervision) =
        parts::supervise(relay, seen, &cluster, &source, hasten.clone())?;
    // Wait again: only now that the slot is ours, nobody else records anything.
    wait_for_predecessor(&sql, &settings.slot, settings.publish_timeout).await?;
    let recorded = RecordedEvents::after(&sql, confirmed, repeats).await?;
    let quarantine = parts::quarantine(relay, &sql).await?;
    let (_, walsender) = source.lease_proof();
    let publication_before = parts::as_captured(&captured, &first_seen);
    take(relay, &sql, &cluster, confirmed, audit, publication_before).await?;
    let (rows, from_table) = from_table::channel();
    let (seam, recovered) = if let Some(new) = new_slot {
        let what = recovery::What {
            publication: publication.fingerprint().to_owned(),
            captured: captured.clone(),
            repeats,
        };
        let (seam, recovered) =
            recovery::start(relay, &sql, new, walsender, what, rows.another()).await?;
        (Some(seam), Some(recovered))
    } else {
        let server = cluster.major_version();
        tracing::info!(slot = %settings.slot, %confirmed, server, "streaming");
        (None, None)
    };
    // From here on the pipeline uses this session, and it must not wait for long.
    sql.limit_statements(LOOK_UP_TIMEOUT).await?;
    let audit = audit::FirstAudit {
        everything: audit == Audit::Everything,
        after: recovered,
    };
    let bounds: Arc<[Bounds]> = captured.iter().map(Bounds::of).collect();
    let subject = parts::audited(relay, walsender, bounds.clone())?;
    let (auditor, broken) = audit::start(subject, audit, hasten, rows);
    let pipeline = Pipeline {
        source,
        intake: parts::intake(relay, &captured)?,
        watermark: Watermark::new(Confirmable::by_slot(confirmed)),
        delivery: parts::delivery(relay, &cluster, quarantine, walsender, confirmed)?,
        earlier: OutcomeLookup::new(recorded, sql, relay.metrics.clone()),
        moved: parts::moved(relay, bounds, repeats)?,
        supervision,
        from_table,
        seam,
        broken,
        backlog: Backlog::default(),
        metrics: relay.metrics.clone(),
    };
    Ok((pipeline, (supervisor, auditor)))
}

/// Records that this relay serves the slot from now on, and how it records events.
async fn take(
    relay: &Relay,
    sql: &Sql,
    cluster: &Cluster,
    confirmed: Lsn,
    audit: Audit,
    publication: &str,
) -> Result<()> {
    let (slot, instance) = (&relay.settings.slot, &relay.instance);
    let position = PgLsn::from(confirmed.as_u64());
    let manner = Manner {
        dispatch: relay.settings.dispatch,
        publication,
    };
    relay_row::take(sql, slot, cluster, position, instance, audit, manner).await
}

/// Opens a session, and checks that the server can be streamed from.
async fn primary(relay: &Relay) -> Result<(Sql, Cluster)> {
    let target = relay.settings.database()?;
    let sql = connect(target, "postrider", STATEMENT_TIMEOUT).await?;
    let cluster = cluster::inspect(&sql).await?;
    if cluster.major_version() < 14 {
        return Err(Error::new(
            Code::PostgresVersion,
            format!("the server is PostgreSQL {}", cluster.major_version()),
        ));
    }
    if cluster.in_recovery {
        return Err(Error::new(Code::PostgresStandby, "the server is a standby"));
    }
    Ok((sql, cluster))
}

/// Opens the stream on the slot, which was free a moment ago.
async fn open_source(relay: &Relay, confirmed: Lsn) -> Result<Source> {
    let settings = &relay.settings;
    let options = StreamOptions {
        target: settings.database()?.clone(),
        slot: settings.slot.clone(),
        publication: settings.publication.clone(),
        application_name: relay.instance.clone(),
        wal_sender_timeout: settings.wal_sender_timeout,
        confirmed: Confirmable::by_slot(confirmed),
    };
    let opened = Source::open(options, relay.metrics.last_status.clone()).await;
    opened.map_err(|error| match error.code() {
        // It existed a moment ago: the next session looks again.
        Code::SlotMissing | Code::SlotLost => changed().caused_by(error),
        _ => error,
    })
}

fn changed() -> Error {
    let what = "the slot has changed while it was being opened";
    Error::new(Code::SlotBusy, what).hint("no action needed: the relay looks at the slot again")
}

/// Makes sure that we stream from the slot that we examined: until the stream has begun, another
/// relay may replace it by a new one of the same name.
async fn still_the_slot(
    relay: &Relay,
    sql: &Sql,
    source: &mut Source,
    confirmed: Lsn,
) -> Result<()> {
    const SAME: &str = "\
        SELECT FROM pg_replication_slots \
        WHERE slot_name = $1 AND active_pid = $2 AND confirmed_flush_lsn = $3";
    let (_, walsender) = source.lease_proof();
    let position = PgLsn::from(confirmed.as_u64());
    let slot = relay.settings.slot.as_str();
    let parameters: [&(dyn ToSql + Sync); 3] = [&slot, &walsender, &position];
    if sql.query_opt(SAME, &parameters).await?.is_some() {
        return Ok(());
    }
    // Or the stream has ended already: then its error says more.
    Err(match source.end_within(LAST_WORD_LIMIT).await {
        Some(ended) if stuck::is_of_this_place(&ended) => {
            stuck::what_to_do(relay, confirmed, ended).await
        }
        Some(ended) => ended,
        None => changed(),
    })
}
