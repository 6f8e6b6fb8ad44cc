//! One schedule from its plan to its verdict.
//!
//! The database, the relay, the writers and the watch start, and the faults of the plan happen.
//! Then the harness ends every fault. The relay must now deliver every event, confirm the slot up
//! to the end of the WAL, and exit on SIGTERM. Finally the judges in `verdict` get the evidence.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use pubsub_emulator::{Attempt, Emulator, RunningEmulator};
use tokio::task::JoinSet;
use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use crate::dossier;
use crate::fault::Fault;
use crate::gather::{self, one};
use crate::ground::Ground;
use crate::log::Log;
use crate::plan::{KINDS, Plan, Release};
use crate::random::Random;
use crate::seat::Seat;
use crate::stage::{Occurrence, Stage};
use crate::table::undecodable_id;
use crate::verdict::{self, Evidence, Quarantine, Verdict};
use crate::watch::{Seen, Watch};
use crate::workload::{self, Writers, Written, refused_id};

pub(crate) const PROJECT: &str = "torture";

/// How long the relay may take to deliver everything after all faults are over. The relay waits for at
/// most 10 s between two attempts, so this is enough for several attempts.
const DELIVERY_LIMIT: Duration = Duration::from_secs(60);

const POLL_INTERVAL: Duration = Duration::from_millis(15);

/// The full name of the topic for a kind of aggregates.
pub(crate) fn topic(kind: &str) -> String {
    format!("projects/{PROJECT}/topics/{kind}.events")
}

#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) plan: Plan,
    pub(crate) verdict: Verdict,
    pub(crate) occurrences: Vec<Occurrence>,
    pub(crate) written: Written,
    pub(crate) polls: u64,
    /// How often a relay began to deliver unrecorded rows from the tables.
    pub(crate) recoveries: u64,
    pub(crate) took: Duration,
    pub(crate) relay_log: Vec<String>,
    /// All attempts to publish. Empty, like `history`, unless the schedule failed.
    pub(crate) attempts: Vec<Attempt>,
    /// One line for each event.
    pub(crate) history: Vec<String>,
}

/// Plays the schedule on the job's server.
///
/// # Errors
/// Returns an error if the harness itself cannot continue. The verdict contains the errors of the
/// relay.
pub(crate) async fn run(plan: Plan, ground: &Ground) -> Result<Outcome, String> {
    let began = Instant::now();
    let database = ground.database(&plan).await?;
    let emulator = emulator(&plan).await?;
    let watch = Watch::start(database.clone(), emulator.journal(), plan.loses_rows());
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
        injected: Vec::new(),
        poison: Vec::new(),
        gaps: Vec::new(),
        occurrences: Vec::new(),
        ends: JoinSet::new(),
        encoding: plan.table.encoding,
        random: random.fork(),
    };
    let mut refused = refused_ids(&plan);
    stage.refuse(refused.iter().cloned());
    refused.extend(undecodable_ids(&plan));
    let played = play(&mut stage, &plan, &mut random).await?;
    let seen = watch.seen();
    let polls = seen.polls;
    let client = database.connect().await?;
    let written = &played.written;
    let quarantine = Quarantine {
        refused,
        whole_key: plan.relay.quarantines_key,
        release: plan.release,
        set_aside: played.set_aside,
    };
    let evidence = evidence(&plan, &stage, &client, written, seen, quarantine).await?;
    // Judging takes long and must not block the runtime, which also runs the emulators of other schedules. A
    // blocked emulator reads requests late, and its journal then looks as if the relay had sent them late.
    let mut verdict = tokio::task::block_in_place(|| verdict::judge(&evidence));
    verdict.add_misbehaviour(played.misbehaviour);
    let (history, attempts) = if verdict.is_clean() {
        (Vec::new(), Vec::new())
    } else {
        (dossier::history(&evidence), evidence.attempts)
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
        written: played.written,
        polls,
        recoveries: evidence.log.recoveries(),
        took: began.elapsed(),
        relay_log: evidence.log.lines,
        attempts,
        history,
    })
}

/// Starts the emulator with the topics of all kinds of events.
async fn emulator(plan: &Plan) -> Result<RunningEmulator, String> {
    let mut emulator = Emulator::builder();
    if let Some(age) = plan.goaway {
        emulator = emulator.max_connection_age(age);
    }
    let emulator = emulator.start().await.map_err(|e| e.to_string())?;
    for kind in KINDS {
        let created = emulator.create_topic(&topic(kind)).await;
        created.map_err(|e| e.to_string())?;
    }
    Ok(emulator)
}

/// The ids of the events that Pub/Sub refuses.
fn refused_ids(plan: &Plan) -> HashSet<String> {
    let poison = plan.workload.poison.iter();
    poison
        .map(|(writer, transaction)| refused_id(*writer, *transaction))
        .collect()
}

/// The ids of the events that PostgreSQL cannot send in the stream.
fn undecodable_ids(plan: &Plan) -> impl Iterator<Item = String> {
    plan.steps.iter().filter_map(|step| match step.fault {
        Fault::Undecodable(number) => Some(undecodable_id(number)),
        _ => None,
    })
}

/// Collects everything that the judges need.
async fn evidence(
    plan: &Plan,
    stage: &Stage<'_>,
    client: &Client,
    written: &Written,
    seen: Seen,
    quarantine: Quarantine,
) -> Result<Evidence, String> {
    Ok(Evidence {
        attempts: stage.journal.attempts(),
        events: gather::events(client).await?,
        records: gather::records(client).await?,
        begun_after: written.begun_after.clone(),
        committed_by: written.committed_by.clone(),
        samples: seen.samples,
        recorded_at: seen.recorded_at,
        occurrences: stage.occurrences.clone(),
        publish_timeout: plan.relay.publish_timeout,
        closes_connections: plan.goaway.is_some(),
        exceptions: plan.relay.exceptions,
        buckets: plan.relay.buckets,
        relays: plan.relay.count,
        from_table: plan.reads_from_table(),
        gaps: stage.gaps.clone(),
        quarantine,
        log: stage.log.all(),
    })
}

/// The result of playing a schedule.
struct Played {
    written: Written,
    /// Events that were in quarantine after everything else was delivered.
    set_aside: HashSet<String>,
    /// What the relay did wrong while the schedule was played, if anything.
    misbehaviour: Option<String>,
}

/// Plays the schedule: starts the writers, causes the faults, and waits for the end.
async fn play(stage: &mut Stage<'_>, plan: &Plan, random: &mut Random) -> Result<Played, String> {
    stage.slow_down();
    let mut misbehaviour = None;
    if plan.loses_rows() {
        misbehaviour = serve_first(stage, plan).await.err();
    }
    let writers = Writers::start(stage.database, &plan.workload, plan.loses_rows(), random);
    let written = if plan.backlog {
        let written = writers.finish().await?;
        misbehaviour = misbehaviour.or(faults(stage, plan).await.err());
        written
    } else {
        misbehaviour = misbehaviour.or(faults(stage, plan).await.err());
        writers.finish().await?
    };
    stage.make_well().await;
    workload::tidy(stage.database).await?;
    let mut set_aside = HashSet::new();
    if misbehaviour.is_none() {
        misbehaviour = end(stage, plan, &mut set_aside).await.err();
    }
    Ok(Played {
        written,
        set_aside,
        misbehaviour,
    })
}

/// Starts the relays before the writers, for two reasons: only a slot from which a relay has read can be lost,
/// and no guarantee covers rows from before the first start. If the plan has a backlog, stops the relays again.
async fn serve_first(stage: &mut Stage<'_>, plan: &Plan) -> Result<(), String> {
    stage.start_relays()?;
    stage.served().await?;
    if plan.backlog {
        stage.stop_relays().await
    } else {
        Ok(())
    }
}

async fn faults(stage: &mut Stage<'_>, plan: &Plan) -> Result<(), String> {
    if stage.relays.is_empty() {
        stage.start_relays()?;
    }
    stage.run(&plan.steps).await
}

/// Waits until everything that can be delivered is delivered. Then releases the quarantined events
/// if the plan says so, and stops the relays.
async fn end(
    stage: &mut Stage<'_>,
    plan: &Plan,
    set_aside: &mut HashSet<String>,
) -> Result<(), String> {
    deliver(stage, plan.relay.exceptions).await?;
    *set_aside = gather::set_aside(&stage.database.connect().await?).await?;
    if plan.release != Release::Never {
        stage.release_all().await?;
    }
    stage.stop_relays().await
}

/// Waits until every event is delivered, and the slot has confirmed all WAL that existed at the time of the call. An
/// event counts as delivered if it has a record. With `exceptions`, published events have no record, so an event also
/// counts as delivered if Pub/Sub has stored it.
async fn deliver(stage: &mut Stage<'_>, exceptions: bool) -> Result<(), String> {
    let client = stage.database.connect().await?;
    let target: PgLsn = one(&client, "SELECT pg_current_wal_lsn()").await?;
    let deadline = Instant::now() + DELIVERY_LIMIT;
    loop {
        let confirmed: PgLsn = one(
            &client,
            "SELECT coalesce(max(confirmed_flush_lsn), '0/0') FROM pg_replication_slots \
             WHERE slot_name = current_database()",
        )
        .await?;
        let mut undelivered = gather::unrecorded(&client).await?;
        if exceptions {
            let journal = &stage.journal;
            let stored = tokio::task::block_in_place(|| gather::stored(&journal.attempts()));
            undelivered.retain(|id| !stored.contains(id));
        }
        if undelivered.is_empty() && confirmed >= target {
            return Ok(());
        }
        stage.relays_must_run()?;
        if Instant::now() > deadline {
            return Err(format!(
                "{DELIVERY_LIMIT:?} after the last fault {} events have no outcome and the slot \
                 has confirmed {confirmed} of {target}",
                undelivered.len()
            ));
        }
        tokio::time::sleep(POLL_INTERVAL * if exceptions { 10 } else { 1 }).await;
    }
}
