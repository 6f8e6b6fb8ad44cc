//! One session on the slot: make sure of everything, stream, and end in good order.
//!
//! The order of the steps is the argument: the cluster is ours, the publication is right, the
//! slot is ours, free and the one that we left (`opening`), or made anew with what is in the
//! tables before it (`recovery`), what has an outcome is known, and only then the stream starts.

use std::sync::Arc;
use std::time::Duration;

use decoder::{Lsn, Oid};
use slot_manager::publication::PublicationState;
use slot_manager::{Cluster, cluster};
use tokio::sync::{Notify, watch};
use tokio_postgres::types::{PgLsn, ToSql};

use super::auditor::{self, Auditor};
use super::backlog::Backlog;
use super::delivery::Delivery;
use super::earlier::Earlier;
use super::from_table;
use super::intake::{Intake, Streamed};
use super::moved::MovedRows;
use super::opening::{self, Opening, check_publication};
use super::pipeline::{End, Pipeline};
use super::quarantine::{MAX_BLOCKED, Quarantine};
use super::record::Manner;
use super::recovery::loss::Audit;
use super::supervisor::{self, Subject, Supervision, Supervisor};
use super::topic_maker::TopicMaker;
use super::{Phase, Relay, record, recovery, stuck};
use crate::capture::Bounds;
use crate::capture::claim::Captured;
use crate::dispatch::{Reader, Recorded, quarantined, wait_for_predecessor};
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, answer_within, connect};
use crate::settings::{OnBadEvent, Settings};
use crate::source::{Options, Source};
use crate::watermark::{Confirmable, Watermark};

/// For the statements of the start; looking up recorded events may take longer than most.
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Of a connection that leads nowhere; the server's own limit comes first.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(65);

/// How long what is on its way may take to end when a session broke, before the next begins.
const BROKEN_SESSION_DRAIN: Duration = Duration::from_secs(10);

/// The server has sent a stream's last word when it gives the slot up.
const LAST_WORD_LIMIT: Duration = Duration::from_secs(1);

/// Writing down the last position must not hold a shutdown up.
const WRITE_DOWN_LIMIT: Duration = Duration::from_secs(2);

/// Runs one session until shutdown or an error. `started` is told when it has begun.
pub(super) async fn run(
    relay: &Relay,
    shutdown: &mut watch::Receiver<bool>,
    started: impl FnOnce(Phase),
) -> Result<End> {
    // Also what an attempt to open a session has found: another relay may have the slot since.
    relay.metrics.forget_session();
    let opening = open(relay);
    let (mut pipeline, beside) = tokio::select! {
        biased;
        _ = wait_for_stop(shutdown.clone()) => return Ok(End::Shutdown),
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
        Ok(End::Shutdown) => {
            let confirmed = pipeline.drain(relay.settings.shutdown_timeout).await;
            write_down(relay, confirmed).await;
        }
        // The slot is another's, or may be soon: leave everything at once, requests included.
        Err(error) if error.code() == Code::LeaseLost => drop(pipeline),
        // The server waits for the end of this session, and nothing can be recorded.
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

/// Leaves the last position behind: a slot that is further on at the next start is not the one
/// that was left. Without it the next start only audits more.
async fn write_down(relay: &Relay, confirmed: Confirmable) {
    let writing = async {
        let sql = connect(relay.settings.database()?, "postrider", STATEMENT_TIMEOUT).await?;
        record::write_final(
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
        tracing::debug!("the last position was not written to outbox.relay");
    }
}

/// Over when a shutdown has had its time.
async fn stop_is_due(shutdown: watch::Receiver<bool>, shutdown_timeout: Duration) {
    wait_for_stop(shutdown).await;
    tokio::time::sleep(shutdown_timeout).await;
}

async fn wait_for_stop(mut shutdown: watch::Receiver<bool>) {
    if shutdown.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// What runs beside the pipeline; ends when dropped.
type Beside = (Supervisor, Auditor);

async fn open(relay: &Relay) -> Result<(Pipeline, Beside)> {
    let settings = &relay.settings;
    let (sql, cluster) = primary(relay).await?;
    opening::refuse_a_copy(relay, &sql, &cluster).await?;
    // Before a slot is made: what is altered after that is noticed.
    let first_seen = check_publication(relay, &sql).await?;
    let Opening {
        plan,
        repeats,
        captured,
        publication,
    } = opening::plan(relay, &sql, &cluster).await?;
    let wait_limit = settings.publish_timeout;
    let waiting = wait_for_predecessor(&sql, &settings.slot, wait_limit);
    answer_within(wait_limit + ANSWER_LIMIT, waiting).await?;
    let (confirmed, audit, new_slot) =
        opening::carry_out(relay, &sql, &cluster, plan, &captured).await?;
    let mut source = open_source(relay, confirmed).await?;
    still_the_slot(relay, &sql, &mut source, confirmed).await?;
    // From here on it proves the lease, however long the rest takes: nobody reads the stream yet.
    let hasten = Arc::new(Notify::new());
    let (supervisor, supervision) = supervise(
        relay,
        publication.clone(),
        &cluster,
        &source,
        hasten.clone(),
    )?;
    // Only now that the slot is ours nobody else records anything.
    let waiting = wait_for_predecessor(&sql, &settings.slot, wait_limit);
    answer_within(wait_limit + ANSWER_LIMIT, waiting).await?;
    let looking = Recorded::after(&sql, confirmed, repeats);
    let recorded = answer_within(ANSWER_LIMIT, looking).await?;
    let quarantine = answer_within(ANSWER_LIMIT, quarantine_of(relay, &sql)).await?;
    let (_, walsender) = source.lease_proof();
    take(relay, &sql, &cluster, confirmed, audit, &first_seen).await?;
    let (rows, from_table) = from_table::channel();
    let (seam, recovered) = match new_slot {
        Some(new) => {
            let what = recovery::What {
                publication: publication.fingerprint().to_owned(),
                captured: captured.clone(),
                repeats,
            };
            let rows = rows.another();
            let (seam, recovered) =
                recovery::start(relay, &sql, new, walsender, what, rows).await?;
            (Some(seam), Some(recovered))
        }
        None => {
            let server = cluster.major_version();
            tracing::info!(slot = %settings.slot, %confirmed, server, "streaming");
            (None, None)
        }
    };
    // From here on the session serves the pipeline, which must not wait for long.
    let set = sql.batch_execute("SET statement_timeout = '5s'");
    answer_within(ANSWER_LIMIT, set).await?;
    let audit = auditor::Start {
        everything: audit == Audit::Everything,
        after: recovered,
    };
    let bounds: Arc<[Bounds]> = captured.iter().map(Bounds::of).collect();
    let subject = audited(relay, walsender, bounds.clone())?;
    let (auditor, broken) = auditor::start(subject, audit, hasten, rows);
    let reader = Reader {
        instance: relay.instance.clone(),
        walsender,
        system_identifier: cluster.system_identifier,
        timeline: cluster.timeline,
    };
    let pipeline = Pipeline {
        source,
        intake: Intake::new(
            streamed(settings, &captured),
            Arc::from(settings.project()?),
            relay.metrics.clone(),
        ),
        watermark: Watermark::new(Confirmable::by_slot(confirmed)),
        delivery: delivery(relay, quarantine, reader, confirmed)?,
        earlier: Earlier::new(recorded, sql, relay.metrics.clone()),
        moved: MovedRows::new(
            settings.database()?.clone(),
            bounds,
            repeats,
            relay.metrics.clone(),
        ),
        supervision,
        from_table,
        seam,
        broken,
        backlog: Backlog::default(),
        metrics: relay.metrics.clone(),
    };
    Ok((pipeline, (supervisor, auditor)))
}

/// The captured tables as the stream is to know them.
fn streamed(settings: &Settings, captured: &[Captured]) -> Vec<Streamed> {
    let tables = settings.tables.iter().zip(captured);
    tables
        .map(|(settings, captured)| Streamed {
            settings: settings.clone(),
            oid: Oid(captured.shape.oid),
            identity: captured.identity(),
        })
        .collect()
}

/// Writes down that this relay serves the slot from now on, and how it records.
async fn take(
    relay: &Relay,
    sql: &Sql,
    cluster: &Cluster,
    confirmed: Lsn,
    audit: Audit,
    publication: &PublicationState,
) -> Result<()> {
    let (slot, instance) = (&relay.settings.slot, &relay.instance);
    let position = PgLsn::from(confirmed.as_u64());
    let manner = Manner {
        dispatch: relay.settings.dispatch,
        publication: publication.fingerprint(),
    };
    let taking = record::take(sql, slot, cluster, position, instance, audit, manner);
    answer_within(ANSWER_LIMIT, taking).await
}

/// A session on a server that can be streamed from.
async fn primary(relay: &Relay) -> Result<(Sql, Cluster)> {
    let target = relay.settings.database()?;
    let sql = connect(target, "postrider", STATEMENT_TIMEOUT).await?;
    let cluster = answer_within(ANSWER_LIMIT, cluster::inspect(&sql)).await?;
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

/// Opens the stream on the slot that was free just now.
async fn open_source(relay: &Relay, confirmed: Lsn) -> Result<Source> {
    let settings = &relay.settings;
    let options = Options {
        target: settings.database()?.clone(),
        slot: settings.slot.clone(),
        publication: settings.publication.clone(),
        application_name: relay.instance.clone(),
        wal_sender_timeout: settings.wal_sender_timeout,
        confirmed: Confirmable::by_slot(confirmed),
    };
    let opened = Source::open(options, relay.metrics.last_status.clone()).await;
    opened.map_err(|error| match error.code() {
        // It was there just now: the next session looks what has become of it.
        Code::SlotMissing | Code::SlotLost => changed().caused_by(error),
        _ => error,
    })
}

fn changed() -> Error {
    let what = "the slot has changed while it was being opened";
    Error::new(Code::SlotBusy, what).hint("no action needed: the relay looks at it again")
}

/// Makes sure that what is streamed is the slot that was looked at: until the stream has begun
/// another relay may make a new one of the same name.
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
    let looking = sql.query_opt(SAME, &parameters);
    if answer_within(ANSWER_LIMIT, looking).await?.is_some() {
        return Ok(());
    }
    // Or the stream has ended already, and what ended it says more.
    Err(match source.end_within(LAST_WORD_LIMIT).await {
        Some(ended) if stuck::is_of_this_place(&ended) => {
            stuck::what_to_do(relay, confirmed, ended).await
        }
        Some(ended) => ended,
        None => changed(),
    })
}

fn supervise(
    relay: &Relay,
    publication: PublicationState,
    cluster: &Cluster,
    source: &Source,
    hasten: Arc<Notify>,
) -> Result<(Supervisor, watch::Receiver<Supervision>)> {
    let settings = &relay.settings;
    let subject = Subject {
        target: settings.database()?.clone(),
        slot: settings.slot.clone(),
        publication: settings.publication.clone(),
        tables: relay.captured.clone(),
        origin: cluster.origin(),
        lease: source.lease_proof(),
        wal_sender_timeout: settings.wal_sender_timeout,
    };
    let metrics = relay.metrics.clone();
    Ok(supervisor::start(subject, publication, metrics, hasten))
}

fn audited(relay: &Relay, walsender: i32, bounds: Arc<[Bounds]>) -> Result<auditor::Subject> {
    let settings = &relay.settings;
    Ok(auditor::Subject {
        target: settings.database()?.clone(),
        slot: settings.slot.clone(),
        publication: settings.publication.clone(),
        captured: relay.captured.clone(),
        tables: settings.tables.clone().into(),
        project: Arc::from(settings.project()?),
        bounds,
        dispatch: settings.dispatch,
        instance: relay.instance.clone(),
        walsender,
        metrics: relay.metrics.clone(),
    })
}

fn delivery(
    relay: &Relay,
    quarantine: Quarantine,
    reader: Reader,
    confirmed: Lsn,
) -> Result<Delivery> {
    let settings = &relay.settings;
    Delivery::new(
        settings,
        relay.publisher.clone(),
        TopicMaker::new(relay.topics.clone()),
        quarantine,
        relay.metrics.clone(),
        reader,
        u64::from(std::process::id()) << 32 | confirmed.as_u64() & 0xFFFF_FFFF,
    )
}

/// The quarantine with the keys that earlier sessions have blocked.
async fn quarantine_of(relay: &Relay, sql: &Sql) -> Result<Quarantine> {
    let mut quarantine = Quarantine::new(relay.settings.on_bad_event);
    // Also where nothing is blocked: it makes sure that the relay can look into the quarantine.
    let keys = quarantined::blocked_keys(sql, MAX_BLOCKED).await?;
    if relay.settings.on_bad_event == OnBadEvent::QuarantineKey {
        for key in &keys {
            quarantine.block(key.group.clone(), key.since, &key.first.shown());
        }
    }
    if quarantine.blocked() > 0 {
        tracing::warn!(
            blocked_keys = quarantine.blocked(),
            hint = "`postrider quarantine list` shows them",
            "events of these keys wait in quarantine"
        );
    }
    Ok(quarantine)
}
