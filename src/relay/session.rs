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
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_postgres::types::PgLsn;

use super::backlog::Backlog;
use super::budget::Budget;
use super::intake::Intake;
use super::pipeline::{End, Pipeline};
use super::supervisor::{self, Subject};
use super::topic_maker::TopicMaker;
use super::{Relay, record, standby};
use crate::dispatch::{Recorded, Writer};
use crate::error::{Code, Error, Result};
use crate::lanes::Lanes;
use crate::postgres::{Sql, answer_within, connect};
use crate::publish::Backoff;
use crate::source::{Options, Source};
use crate::throttled_log::ThrottledLog;
use crate::watermark::{Confirmable, Watermark};

/// For the statements of the start; looking up recorded events may take longer than most.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Of a connection that leads nowhere; the server's own limit comes first.
const ANSWER_LIMIT: Duration = Duration::from_secs(65);

/// How long to wait for running transactions when a slot is created.
const CREATE_TIMEOUT: Duration = Duration::from_secs(30);

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
    let (mut pipeline, _supervisor) = tokio::select! {
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
        Err(_) => tokio::select! {
            _ = pipeline.drain(BROKEN_SESSION_DRAIN) => {}
            () = stop_is_due(shutdown.clone(), relay.settings.shutdown_timeout) => {}
        },
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

async fn open(relay: &Relay) -> Result<(Pipeline, supervisor::Supervisor)> {
    let settings = &relay.settings;
    let target = settings.database()?;
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
    let reading = record::read(&sql, &settings.slot, &cluster);
    let earlier = answer_within(ANSWER_LIMIT, reading).await?;
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
    let recorded = answer_within(ANSWER_LIMIT, Recorded::after(&sql, confirmed)).await?;
    // From here on the session serves the pipeline, which must not wait for long.
    let set = sql.batch_execute("SET statement_timeout = '5s'");
    answer_within(ANSWER_LIMIT, set).await?;
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
    let taking = record::take(
        &sql,
        &settings.slot,
        &cluster,
        PgLsn::from(confirmed.as_u64()),
        &relay.instance,
    );
    answer_within(ANSWER_LIMIT, taking).await?;
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
) -> Result<(Pipeline, supervisor::Supervisor)> {
    let settings = &relay.settings;
    let target = settings.database()?;
    let subject = Subject {
        target: target.clone(),
        slot: settings.slot.clone(),
        publication: settings.publication.clone(),
        tables: relay.captured.clone(),
        system_identifier: cluster.system_identifier,
        lease: source.lease_proof(),
        wal_sender_timeout: settings.wal_sender_timeout,
    };
    let (supervisor, supervision) = supervisor::start(subject, state, relay.metrics.clone());
    let (written_sender, written) = mpsc::unbounded_channel();
    let pipeline = Pipeline {
        source,
        intake: Intake::new(
            settings.tables.clone().into(),
            Arc::from(settings.project()?),
            relay.metrics.clone(),
        ),
        watermark: Watermark::new(start),
        lanes: Lanes::new(settings.in_flight_requests),
        recorded,
        sql: Some(sql),
        writer: Writer::start(target.clone(), written_sender),
        written,
        publisher: relay.publisher.clone(),
        topic_maker: TopicMaker::new(relay.topics.clone()),
        supervision,
        budget: Budget::new(settings.in_flight_bytes),
        backlog: Backlog::default(),
        backoff: Backoff::new(
            u64::from(std::process::id()) << 32 | start.lsn().as_u64() & 0xFFFF_FFFF,
        ),
        metrics: relay.metrics.clone(),
        log: ThrottledLog::default(),
        publishing: JoinSet::new(),
    };
    Ok((pipeline, supervisor))
}

async fn check_publication(relay: &Relay, sql: &Sql) -> Result<PublicationState> {
    let publication = &relay.settings.publication;
    let looking = publication::inspect(sql, publication, &relay.captured);
    let state = answer_within(ANSWER_LIMIT, looking).await?;
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
    let found = answer_within(ANSWER_LIMIT, slots::find(sql, name)).await?;
    if found.is_none() {
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
