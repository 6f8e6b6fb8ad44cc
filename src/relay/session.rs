//! One session on the slot: make sure of everything, stream, and end in good order.
//!
//! The order of the steps is the argument: the cluster is ours, the publication is right, the
//! slot is ours and free, what has an outcome is known, and only then the stream starts.

use std::sync::Arc;
use std::time::Duration;

use slot_manager::health::Viewer;
use slot_manager::publication::{self, PublicationState};
use slot_manager::slots::CreateOptions;
use slot_manager::{Cluster, Error as SlotError, Health, Slot, cluster, slots};
use tokio::sync::{Notify, mpsc, watch};
use tokio_postgres::types::PgLsn;

use super::auditor::{self, Auditor};
use super::backlog::Backlog;
use super::delivery::Delivery;
use super::intake::Intake;
use super::pipeline::{End, Pipeline};
use super::supervisor::{self, Subject, Supervisor};
use super::topic_maker::TopicMaker;
use super::{Relay, record, standby};
use crate::dispatch::Recorded;
use crate::error::{Code, Error, Result};
use crate::map::TableSettings;
use crate::postgres::{Sql, connect};
use crate::source::{Options, Source};
use crate::watermark::{Confirmable, Watermark};

/// For the statements of the start; looking up recorded events may take longer than most.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// How long to wait for running transactions when a slot is created.
const CREATE_TIMEOUT: Duration = Duration::from_secs(30);

/// Events of a table that wait to be taken; few, since each may be large.
const FROM_TABLE: usize = 16;

/// How long what is on its way may take to end when a session broke, before the next begins.
const BROKEN_SESSION_DRAIN: Duration = Duration::from_secs(10);

/// Writing down the last position must not hold a shutdown up.
const WRITE_DOWN_LIMIT: Duration = Duration::from_secs(2);

/// Runs one session until shutdown or an error. `started` is told when it streams.
pub(super) async fn run(
    relay: &Relay,
    shutdown: &mut watch::Receiver<bool>,
    started: impl FnOnce(),
) -> Result<End> {
    let opening = open(relay);
    let (mut pipeline, _beside) = tokio::select! {
        biased;
        _ = wait_for_stop(shutdown.clone()) => return Ok(End::Shutdown),
        opened = opening => opened?,
    };
    started();
    relay.metrics.sessions.inc();
    relay.metrics.holds_slot.set(1);
    let ended = pipeline.run(shutdown).await;
    relay.metrics.holds_slot.set(0);
    relay.metrics.oldest_pending.forget();
    match &ended {
        Ok(End::Shutdown) => {
            let confirmed = pipeline.drain(relay.settings.shutdown_timeout).await;
            write_down(relay, confirmed).await;
        }
        // The slot may be another's soon: leave everything at once, requests included.
        Err(error) if error.code() == Code::LeaseLost => drop(pipeline),
        // The server waits for the end of this session, and nothing can be recorded.
        Err(error) if error.code() == Code::PostgresStopping => {
            pipeline.drain(Duration::ZERO).await;
        }
        Err(_) => {
            pipeline.drain(BROKEN_SESSION_DRAIN).await;
        }
    }
    ended
}

/// Leaves the last position behind for whoever looks; nothing depends on it.
async fn write_down(relay: &Relay, confirmed: Confirmable) {
    let writing = async {
        let sql = connect(relay.settings.database()?, "postrider", STATEMENT_TIMEOUT).await?;
        record::update(
            &sql,
            &relay.settings.slot,
            PgLsn::from(confirmed.lsn().as_u64()),
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

async fn wait_for_stop(mut shutdown: watch::Receiver<bool>) {
    if shutdown.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// What runs beside the pipeline; ends when dropped.
type Beside = (Supervisor, Auditor);

async fn open(relay: &Relay) -> Result<(Pipeline, Beside)> {
    let settings = &relay.settings;
    let target = settings.database()?;
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
    let earlier = record::read(&sql, &settings.slot, &cluster).await?;
    check_publication(relay, &sql).await?;
    let slot = ready_slot(relay, &sql, &cluster, earlier.as_ref()).await?;
    // Again, since waiting for the slot may have taken days.
    let state = check_publication(relay, &sql).await?;
    let confirmed = slot.confirmed_flush_lsn.ok_or_else(|| {
        Error::new(
            Code::SlotLost,
            format!("slot \"{}\" has no position", settings.slot),
        )
    })?;
    let start = Confirmable::by_slot(confirmed);
    let recorded = Recorded::after(&sql, confirmed).await?;
    // From here on the session serves the pipeline, which must not wait for long.
    sql.batch_execute("SET statement_timeout = '5s'").await?;
    let source = Source::open(
        Options {
            target: target.clone(),
            slot: settings.slot.clone(),
            publication: settings.publication.clone(),
            application_name: relay.instance.clone(),
            wal_sender_timeout: settings.wal_sender_timeout,
            confirmed: start,
        },
        relay.metrics.last_status.clone(),
    )
    .await?;
    record::take(
        &sql,
        &settings.slot,
        &cluster,
        PgLsn::from(confirmed.as_u64()),
        &relay.instance,
    )
    .await?;
    tracing::info!(slot = %settings.slot, %confirmed, server = cluster.major_version(), "streaming");
    assemble(relay, sql, state, source, recorded, start, &cluster).await
}

async fn assemble(
    relay: &Relay,
    sql: Sql,
    state: PublicationState,
    source: Source,
    recorded: Recorded,
    start: Confirmable,
    cluster: &Cluster,
) -> Result<(Pipeline, Beside)> {
    let settings = &relay.settings;
    let target = settings.database()?;
    let subject = Subject {
        target: target.clone(),
        slot: settings.slot.clone(),
        publication: settings.publication.clone(),
        tables: relay.captured.clone(),
        system_identifier: cluster.system_identifier,
    };
    let audit = Arc::new(Notify::new());
    let (supervisor, supervision) =
        supervisor::start(subject, state, relay.metrics.clone(), audit.clone());
    let (found, from_table) = mpsc::channel(FROM_TABLE);
    let tables: Arc<[TableSettings]> = settings.tables.clone().into();
    let project: Arc<str> = Arc::from(settings.project()?);
    let subject = auditor::Subject {
        target: target.clone(),
        slot: settings.slot.clone(),
        publication: settings.publication.clone(),
        captured: relay.captured.clone(),
        tables: tables.clone(),
        project: project.clone(),
        metrics: relay.metrics.clone(),
        everything: false,
    };
    let auditor = auditor::start(subject, audit, found);
    let delivery = Delivery::new(
        settings,
        target.clone(),
        relay.publisher.clone(),
        source.lease(),
        TopicMaker::new(relay.topics.clone()),
        relay.metrics.clone(),
        u64::from(std::process::id()) << 32 | start.lsn().as_u64() & 0xFFFF_FFFF,
    );
    let pipeline = Pipeline {
        source,
        intake: Intake::new(tables, project, relay.metrics.clone()),
        watermark: Watermark::new(start),
        delivery,
        recorded,
        sql: Some(sql),
        supervision,
        from_table,
        backlog: Backlog::default(),
        metrics: relay.metrics.clone(),
    };
    Ok((pipeline, (supervisor, auditor)))
}

async fn check_publication(relay: &Relay, sql: &Sql) -> Result<PublicationState> {
    let publication = &relay.settings.publication;
    let state = publication::inspect(sql, publication, &relay.captured).await?;
    match state.problems().first() {
        None => Ok(state),
        Some(problem) => Err(problem.into()),
    }
}

/// The slot, existing, ours and free. Waits as a standby while another session holds it.
async fn ready_slot(
    relay: &Relay,
    sql: &Sql,
    cluster: &Cluster,
    earlier: Option<&record::Recorded>,
) -> Result<Slot> {
    let name = &relay.settings.slot;
    if slots::find(sql, name).await?.is_none() {
        if earlier.is_some_and(|row| row.confirmed_lsn.is_some()) {
            return Err(Error::new(
                Code::SlotMissing,
                format!("slot \"{name}\" has served before and is gone"),
            ));
        }
        let options = CreateOptions {
            failover: relay.settings.slot_failover,
        };
        match slots::create(sql, name, options, CREATE_TIMEOUT).await {
            Ok(at) => tracing::warn!(
                slot = %name, %at,
                "created the slot: rows that were committed before are not streamed"
            ),
            // Another relay was faster.
            Err(SlotError::SlotExists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let slot = standby::wait_until_free(relay, sql).await?;
    let health = super::health_of(&slot, Viewer::Waiting, cluster.system_identifier);
    if matches!(health, Health::Lost | Health::Invalidated { .. }) {
        return Err(Error::new(
            Code::SlotLost,
            format!("slot \"{name}\" is {}", health.name()),
        ));
    }
    Ok(slot)
}
