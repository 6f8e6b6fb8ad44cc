//! One schedule from its plan to its verdict.
//!
//! Database, relay, writers and watch start; the faults happen; then everything is made well, and
//! the relay must deliver what there is, confirm it, and end when it is asked to. What was gathered
//! on the way goes to the judges in `verdict`.

use std::time::{Duration, Instant};

use pubsub_emulator::{Attempt, Emulator};
use tokio::task::JoinSet;
use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use super::ground::Ground;
use super::log::Log;
use super::plan::{KINDS, Plan};
use super::seat::Seat;
use super::stage::{Occurrence, Stage};
use super::verdict::{self, Event, Evidence, Record, Verdict};
use super::watch::Watch;
use super::workload::{self, Writers, Written};

pub(super) const PROJECT: &str = "torture";

/// How long the delivery of everything may take once nothing is in its way any more. The longest
/// pause of the relay between two attempts is 10 s.
const DELIVERY_LIMIT: Duration = Duration::from_secs(60);

const LOOK_INTERVAL: Duration = Duration::from_millis(15);

/// The full name of a kind's topic.
pub(super) fn topic(kind: &str) -> String {
    format!("projects/{PROJECT}/topics/{kind}.events")
}

/// What came of a schedule.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) plan: Plan,
    pub(super) verdict: Verdict,
    pub(super) occurrences: Vec<Occurrence>,
    pub(super) written: Written,
    pub(super) looks: u64,
    pub(super) took: Duration,
    pub(super) relay_log: Vec<String>,
    /// Only of a schedule that failed.
    pub(super) attempts: Vec<Attempt>,
}

/// Runs it on the job's ground.
///
/// # Errors
/// When the harness itself cannot go on; what the relay does wrong is in the verdict.
pub(super) async fn run(plan: Plan, ground: &Ground) -> Result<Outcome, String> {
    let began = Instant::now();
    let database = ground.database(&plan).await?;
    let emulator = Emulator::builder()
        .start()
        .await
        .map_err(|e| e.to_string())?;
    for kind in KINDS {
        emulator
            .create_topic(&topic(kind))
            .await
            .map_err(|e| e.to_string())?;
    }
    let watch = Watch::start(database.clone(), emulator.journal());
    let mut random = plan.random.clone();
    let mut seats = Vec::new();
    for _ in 0..plan.relay.count {
        seats.push(Seat::new(&plan, ground, &database, &emulator).await?);
    }
    let mut stage = Stage {
        ground,
        database: &database,
        watch: &watch,
        seats,
        log: Log::default(),
        relays: Vec::new(),
        pubsub: emulator.faults(),
        journal: emulator.journal(),
        answer_delay: plan.answer_delay,
        slow: None,
        occurrences: Vec::new(),
        ends: JoinSet::new(),
        random: random.fork(),
    };
    let writers = Writers::start(&database, &plan.workload, &mut random);
    let (written, misbehaviour) = play(&mut stage, &plan, writers).await?;
    let seen = watch.seen();
    let looks = seen.looks;
    let client = database.connect().await?;
    let evidence = Evidence {
        attempts: emulator.journal().attempts(),
        events: events(&client).await?,
        records: records(&client).await?,
        committed_by: written.committed_by.clone(),
        samples: seen.samples,
        recorded_at: seen.recorded_at,
        occurrences: stage.occurrences.clone(),
        publish_timeout: plan.relay.publish_timeout,
        relays: plan.relay.count,
        log: stage.log.all(),
    };
    let mut verdict = verdict::judge(&evidence);
    verdict.add_misbehaviour(misbehaviour);
    let attempts = match verdict.is_clean() {
        true => Vec::new(),
        false => evidence.attempts,
    };
    let occurrences = std::mem::take(&mut stage.occurrences);
    drop(stage);
    drop(watch);
    emulator.shutdown().await;
    ground.clear(&database).await?;
    Ok(Outcome {
        plan,
        verdict,
        occurrences,
        written,
        looks,
        took: began.elapsed(),
        relay_log: evidence.log.lines,
        attempts,
    })
}

/// The schedule proper. What the relay does not do as it should comes back as a text.
async fn play(
    stage: &mut Stage<'_>,
    plan: &Plan,
    writers: Writers,
) -> Result<(Written, Option<String>), String> {
    stage.slow_down();
    let (written, misbehaviour) = if plan.backlog {
        let written = writers.finish().await?;
        (written, faults(stage, plan).await.err())
    } else {
        let misbehaviour = faults(stage, plan).await.err();
        (writers.finish().await?, misbehaviour)
    };
    stage.make_well().await;
    workload::tidy(stage.database).await?;
    let misbehaviour = match misbehaviour {
        None => deliver_and_stop(stage).await.err(),
        found => found,
    };
    Ok((written, misbehaviour))
}

async fn faults(stage: &mut Stage<'_>, plan: &Plan) -> Result<(), String> {
    stage.start_relays()?;
    stage.run(&plan.steps).await
}

/// Waits until every event has its record and the slot has confirmed everything, then ends the
/// relays.
async fn deliver_and_stop(stage: &mut Stage<'_>) -> Result<(), String> {
    let client = stage.database.connect().await?;
    let target: PgLsn = one(&client, "SELECT pg_current_wal_lsn()").await?;
    let deadline = Instant::now() + DELIVERY_LIMIT;
    loop {
        let unrecorded: i64 = one(
            &client,
            "SELECT count(*) FROM outbox.events e \
             WHERE NOT EXISTS (SELECT FROM outbox.dispatch d WHERE d.event_id = e.id)",
        )
        .await?;
        let confirmed: PgLsn = one(
            &client,
            "SELECT confirmed_flush_lsn FROM pg_replication_slots \
             WHERE database = current_database()",
        )
        .await?;
        if unrecorded == 0 && confirmed >= target {
            break;
        }
        stage.relays_must_run()?;
        if Instant::now() > deadline {
            return Err(format!(
                "{DELIVERY_LIMIT:?} after the last fault {unrecorded} events have no record and \
                 the slot has confirmed {confirmed} of {target}"
            ));
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    for relay in std::mem::take(&mut stage.relays) {
        relay.stop().await?;
    }
    Ok(())
}

async fn one<T>(client: &Client, sql: &str) -> Result<T, String>
where
    T: for<'a> tokio_postgres::types::FromSql<'a>,
{
    let row = client.query_one(sql, &[]).await;
    row.and_then(|row| row.try_get(0))
        .map_err(|e| format!("{sql}: {e:?}"))
}

/// What stands in the outbox: the truth about what was committed.
async fn events(client: &Client) -> Result<Vec<Event>, String> {
    let rows = client
        .query(
            "SELECT id::text, aggregatetype, coalesce(aggregateid, ''), coalesce(version, 0), \
                    payload->>'t' \
             FROM outbox.events",
            &[],
        )
        .await
        .map_err(|e| format!("{e:?}"))?;
    let event = |row: &tokio_postgres::Row| Event {
        id: row.get(0),
        topic: topic(row.get(1)),
        key: row.get(2),
        version: row.get(3),
        transaction: row.get(4),
    };
    Ok(rows.iter().map(event).collect())
}

async fn records(client: &Client) -> Result<Vec<Record>, String> {
    let rows = client
        .query(
            "SELECT event_id::text, commit_lsn, ordinal, state, topic, coalesce(ordering_key, ''), \
                    message_id \
             FROM outbox.dispatch ORDER BY commit_lsn, ordinal",
            &[],
        )
        .await
        .map_err(|e| format!("{e:?}"))?;
    let record = |row: &tokio_postgres::Row| Record {
        event_id: row.get(0),
        commit_lsn: row.get::<_, PgLsn>(1).into(),
        ordinal: row.get(2),
        state: row.get(3),
        topic: row.get::<_, Option<String>>(4).unwrap_or_default(),
        key: row.get(5),
        message_id: row
            .get::<_, Option<String>>(6)
            .and_then(|id| id.parse().ok()),
    };
    Ok(rows.iter().map(record).collect())
}
