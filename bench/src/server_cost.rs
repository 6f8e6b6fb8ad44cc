//! Measures what reading the outbox costs PostgreSQL, per event: the CPU time of all server processes, and the bytes of
//! WAL that the server writes. The readers are the relay and Debezium's engine.
//!
//! Each drain has its own slot, which the benchmark creates before it writes the backlog of this drain. So the
//! walsender also reads the WAL of the relay's dispatch rows, as in production, but no WAL of earlier drains. A drain
//! of the relay ends when the slot has confirmed the last event and the walsender has read all WAL.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::backlog::Backlog;
use crate::contestant::{DISPATCH, SLOT};
use crate::cores::Cores;
use crate::database::Database;
use crate::peers::Emulator;
use crate::process::{self, Running, Usage, cpu_of_single_thread};
use crate::report::{Aim, Line};
use crate::sample::median;

/// Maximum CPU time of the server, as a multiple of its CPU time for Debezium.
const AIM: f64 = 1.25;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum duration of a drain. A drain that takes longer counts as failed.
const LIMIT: Duration = Duration::from_secs(600);

/// Empties the outbox. Disables its trigger for a moment, because the trigger refuses TRUNCATE.
const EMPTY: &str = "\
    ALTER TABLE outbox.events DISABLE TRIGGER USER; TRUNCATE outbox.events; \
    ALTER TABLE outbox.events ENABLE TRIGGER USER";

/// The rows of a transaction.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Shape {
    OneRow,
    HundredRows,
}

impl Shape {
    pub(crate) const ALL: [Self; 2] = [Self::OneRow, Self::HundredRows];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OneRow => "server-1-row",
            Self::HundredRows => "server-100-row",
        }
    }

    fn backlog(self, events: u64) -> Backlog {
        let rows = match self {
            Self::OneRow => 1,
            Self::HundredRows => 100,
        };
        Backlog::new(events, Some(rows), Some(1_000))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// The program of `bench/debezium`.
    Debezium,
    Relay,
    /// The relay with `dispatch = exceptions`.
    RelayExceptions,
}

/// All readers. The first one is the baseline.
const READERS: [Reader; 3] = [Reader::Debezium, Reader::Relay, Reader::RelayExceptions];

impl Reader {
    fn name(self) -> &'static str {
        match self {
            Self::Debezium => "Debezium",
            Self::Relay => "relay",
            Self::RelayExceptions => "relay, dispatch = exceptions",
        }
    }

    fn start(self, url: &str, host: &str, events: u64) -> Result<Running, String> {
        let mut command = match self {
            Self::Debezium => {
                let target = debezium();
                let target = target.display();
                let mut command = Command::new("java");
                command.args(["-cp", &format!("{target}/classes:{target}/lib/*"), "Reader"]);
                command.arg(events.to_string());
                command
            }
            Self::Relay | Self::RelayExceptions => {
                let mut command = Command::new(process::binary());
                let setting = (self == Self::RelayExceptions).then_some(DISPATCH);
                command.arg("run").envs(setting);
                command
            }
        };
        process::start(command.envs(process::environment(url, host)))
    }
}

/// The folder of the built program of `bench/debezium`.
fn debezium() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("debezium/target")
}

/// The reason to skip these measurements, or `None` if the program of `bench/debezium` is built.
pub(crate) fn left_out() -> Option<&'static str> {
    let built = debezium().join("classes").is_dir();
    (!built).then_some("build bench/debezium first: mvn -f bench/debezium compile")
}

/// What one drain cost. The CPU times (`walsender`, `dispatch`, `others`, `program`) are in microseconds per event.
#[derive(Debug, Default)]
struct Paid {
    walsender: f64,
    dispatch: f64,
    /// All other processes of the server.
    others: f64,
    program: f64,
    wal_bytes: f64,
    seconds: f64,
}

impl Paid {
    fn server(&self) -> f64 {
        self.walsender + self.dispatch + self.others
    }

    fn to_json(&self) -> Value {
        json!({
            "walsender_cpu_us_per_event": self.walsender,
            "dispatch_cpu_us_per_event": self.dispatch,
            "other_server_cpu_us_per_event": self.others,
            "program_cpu_us_per_event": self.program,
            "wal_bytes_per_event": self.wal_bytes,
            "seconds": self.seconds,
        })
    }
}

/// Drains a backlog of this shape with each reader, `runs` times.
pub(crate) async fn measure(shape: Shape, runs: u32, events: u64) -> Result<Vec<Line>, String> {
    let backlog = shape.backlog(events);
    eprintln!("  each drain: {}", backlog.describe());
    let database = Database::start(&process::binary()).await?;
    let mut paid = READERS.map(|_| Vec::new());
    for run in 0..runs as usize {
        // The readers take turns in going first.
        for turn in 0..READERS.len() {
            let nth = (run + turn) % READERS.len();
            let one = drain(READERS[nth], &database, &backlog).await?;
            eprintln!(
                "  run {}: {}: {}",
                run + 1,
                READERS[nth].name(),
                one.to_json()
            );
            paid[nth].push(one);
        }
    }
    let [debezium, relay, exceptions] = &paid;
    Ok([(READERS[1], relay), (READERS[2], exceptions)]
        .into_iter()
        .flat_map(|(reader, ours)| lines(shape, reader, debezium, ours))
        .collect())
}

/// Returns two lines of the report: one compares CPU time, the other WAL.
fn lines(shape: Shape, reader: Reader, debezium: &[Paid], ours: &[Paid]) -> [Line; 2] {
    let line = |unit, figure: fn(&Paid) -> f64, ratio, aim| Line {
        scenario: format!("{} {}", shape.name(), reader.name()),
        unit,
        baseline_is: READERS[0].name().into(),
        ours_is: reader.name().into(),
        baseline: median(debezium.iter().map(figure)),
        ours: median(ours.iter().map(figure)),
        ratio,
        aim,
        cpu_aim: None,
        costs: None,
        runs: ours.len(),
        samples: json!({
            "baseline": debezium.iter().map(Paid::to_json).collect::<Vec<_>>(),
            "ours": ours.iter().map(Paid::to_json).collect::<Vec<_>>(),
        }),
        note: None,
    };
    let pairs = debezium.iter().zip(ours);
    let ratio = median(pairs.map(|(theirs, ours)| ours.server() / theirs.server()));
    [
        line(
            "us of server CPU/event",
            Paid::server,
            ratio,
            Aim::RatioAtMost(AIM),
        ),
        line(
            "bytes of WAL/event",
            |paid| paid.wal_bytes,
            f64::NAN,
            Aim::None,
        ),
    ]
}

async fn drain(reader: Reader, database: &Database, backlog: &Backlog) -> Result<Paid, String> {
    database.free_slot(SLOT).await?;
    database.execute(EMPTY).await?;
    database.forget().await?;
    database.new_slot(SLOT).await?;
    let end = database.load(backlog).await?;
    let emulator = Emulator::start(0, false, Cores::Shared)?;
    let mut server = ServerCpu::start(database).await?;
    let wal = database
        .text("SELECT pg_current_wal_insert_lsn()::text")
        .await?;
    let began = Instant::now();
    let mut program = reader.start(&database.url(), &emulator.host, backlog.events)?;
    let (mut used, mut roles) = (Usage::default(), (None, None));
    loop {
        let seen = database.observe(SLOT, &end).await?;
        roles = (seen.walsender.or(roles.0), seen.dispatch.or(roles.1));
        server.sample(database).await?;
        used = process::usage(program.0.id()).unwrap_or(used);
        match (reader, program.0.try_wait().map_err(|e| e.to_string())?) {
            (Reader::Debezium, Some(status)) if status.success() => break,
            (_, Some(status)) => return Err(format!("{} ended with {status}", reader.name())),
            (Reader::Relay | Reader::RelayExceptions, None)
                if seen.drained && has_read_all(database).await? =>
            {
                break;
            }
            _ if began.elapsed() > LIMIT => return Err("it takes too long".into()),
            _ => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    server.sample(database).await?;
    let written = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '%')::bigint";
    let wal_bytes = database.count(&written.replace('%', &wal)).await?;
    drop(program);
    let stored = emulator.finish()?.stored;
    if reader != Reader::Debezium && stored != backlog.events {
        return Err(format!(
            "{stored} of {} events were published",
            backlog.events
        ));
    }
    let per_event = |amount: f64| amount / backlog.events as f64;
    let walsender = server.of(roles.0);
    let dispatch = server.of(roles.1);
    Ok(Paid {
        walsender: per_event(walsender * 1e6),
        dispatch: per_event(dispatch * 1e6),
        others: per_event((server.total() - walsender - dispatch) * 1e6),
        program: per_event(used.cpu_seconds * 1e6),
        wal_bytes: per_event(wal_bytes as f64),
        seconds,
    })
}

/// Whether the slot's walsender has read all WAL that is on disk.
async fn has_read_all(database: &Database) -> Result<bool, String> {
    let read = format!(
        "SELECT count(*) FROM pg_stat_replication r JOIN pg_replication_slots s ON s.active_pid = r.pid \
         WHERE s.slot_name = '{SLOT}' AND r.sent_lsn >= pg_current_wal_flush_lsn()"
    );
    Ok(database.count(&read).await? > 0)
}

/// The CPU time that each process of the server has used since the start of a drain, in seconds. The session of
/// this benchmark itself is left out.
struct ServerCpu {
    own: u32,
    /// The CPU time at the start and at the last sample. A process that started later starts at 0.
    processes: HashMap<u32, (f64, f64)>,
}

impl ServerCpu {
    async fn start(database: &Database) -> Result<Self, String> {
        let own = database.count("SELECT pg_backend_pid()::bigint").await?;
        let own = u32::try_from(own).map_err(|e| e.to_string())?;
        let mut cpu = Self {
            own,
            processes: HashMap::new(),
        };
        cpu.sample(database).await?;
        for (first, last) in cpu.processes.values_mut() {
            *first = *last;
        }
        Ok(cpu)
    }

    async fn sample(&mut self, database: &Database) -> Result<(), String> {
        for pid in database.pids().await? {
            if pid != self.own
                && let Some(cpu) = cpu_of_single_thread(pid)
            {
                self.processes.entry(pid).or_default().1 = cpu;
            }
        }
        Ok(())
    }

    fn of(&self, pid: Option<u32>) -> f64 {
        let process = pid.and_then(|pid| self.processes.get(&pid));
        process.map_or(0.0, |(first, last)| last - first)
    }

    fn total(&self) -> f64 {
        self.processes
            .values()
            .map(|(first, last)| last - first)
            .sum()
    }
}
