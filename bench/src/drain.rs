//! Runs one drain of a backlog, and measures how long the drain takes and how much CPU time and memory
//! the processes use.
//!
//! A drain begins with the start of the program. Its end depends on the program:
//!
//! - A program that exits on its own: the exit.
//! - The relay: the moment when the slot has confirmed the last event. By then the relay has published and
//!   recorded every event.
//! - A relay that reads the table: the end of its recovery, because these events are not in the stream.

use std::time::{Duration, Instant};

use crate::backlog::Backlog;
use crate::contestant::{Contestant, SLOT};
use crate::cores::Cores;
use crate::database::Database;
use crate::peers::{Emulator, Told};
use crate::process::{self, Running, Usage, usage};
use crate::sample::Sample;

/// Time between two samples of the processes. Short compared with any drain, so that the measured end of
/// the drain is exact.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum memory of a program. The benchmark stops a program that needs more. If the stopped program was
/// publishing to the emulator, its rate is computed from the events that it had published before the stop.
const MEMORY_LIMIT_KIB: u64 = 6 << 20;

/// Maximum duration of a drain. A drain that takes longer counts as failed.
const LIMIT: Duration = Duration::from_secs(3_600);

/// Drains `backlog`, whose WAL ends at the position `end`.
pub(crate) async fn drain(
    contestant: Contestant,
    database: &Database,
    backlog: &Backlog,
    end: &str,
    cores: Cores,
) -> Result<Sample, String> {
    if contestant.reads_the_table() {
        database.prepare_first_start(SLOT).await?;
    } else {
        database.prepare_drain(SLOT).await?;
    }
    let mut emulator = match contestant.emulator_delay_ms() {
        Some(delay_ms) => Some(Emulator::start(delay_ms, false, cores)?),
        None => None,
    };
    let host = emulator.as_ref().map_or("127.0.0.1:1", |e| &e.host);
    let command = contestant.command(database, end, host, backlog)?;
    let mut command = cores.of_program(command)?;
    let began = Instant::now();
    let mut program = process::start(&mut command)?;
    let mut spent = Spent::default();
    let mut streams_since = None;
    let over = loop {
        let mut server = database.observe(SLOT, end).await?;
        if contestant.reads_the_table() {
            server.drained = database.has_published_table().await?;
        }
        if server.walsender.is_some() {
            streams_since.get_or_insert_with(Instant::now);
        }
        let ended = spent.sample(&mut program, &server, emulator.as_mut(), contestant)?;
        match (ended, contestant.ends_by_itself()) {
            (true, true) => break Over::Drained,
            (true, false) => return Err(format!("{} ended", contestant.describe())),
            (false, false) if server.drained => break Over::Drained,
            _ if spent.program.peak_rss_kib > MEMORY_LIMIT_KIB => break Over::TooLarge,
            _ if began.elapsed() > LIMIT => return Err("it takes too long".into()),
            _ => tokio::time::sleep(POLL_INTERVAL).await,
        }
    };
    let seconds = began.elapsed().as_secs_f64();
    let streamed_seconds = streams_since.unwrap_or(began).elapsed().as_secs_f64();
    drop(program);
    let told = match emulator {
        Some(emulator) => Some(emulator.finish()?),
        None => None,
    };
    let events = match (over, &told) {
        (Over::TooLarge, Some(told)) => told.stored,
        _ => backlog.events,
    };
    is_whole(contestant, database, told.as_ref(), events).await?;
    database.free_slot(SLOT).await?;
    Ok(Sample {
        events,
        complete: over == Over::Drained,
        seconds,
        streamed_seconds,
        program: spent.program,
        walsender_cpu: spent.walsender,
        dispatch_cpu: spent.dispatch,
        emulator_cpu: spent.emulator,
        requests: told.map(|told| told.requests),
    })
}

/// Checks that all events were published, and that they have dispatch rows if the program writes
/// them.
async fn is_whole(
    contestant: Contestant,
    database: &Database,
    told: Option<&Told>,
    events: u64,
) -> Result<(), String> {
    if let Some(told) = told
        && told.stored != events
    {
        return Err(format!("{} of {events} events were published", told.stored));
    }
    if contestant.records_all() {
        let rows = "SELECT count(*) FROM outbox.dispatch";
        let rows = database.count(rows).await?;
        if rows != events {
            return Err(format!("{rows} of {events} events have a dispatch row"));
        }
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    Drained,
    TooLarge,
}

/// The state of a drain, as the server reports it.
#[derive(Debug, Default)]
pub(crate) struct Server {
    pub(crate) drained: bool,
    pub(crate) walsender: Option<u32>,
    pub(crate) dispatch: Option<u32>,
}

/// What the processes have used up to the last sample: CPU time in seconds, and the peak memory of
/// the program.
#[derive(Debug, Default)]
struct Spent {
    program: Usage,
    walsender: f64,
    dispatch: f64,
    emulator: f64,
}

impl Spent {
    /// Samples the CPU time of all processes. Returns whether the program has exited successfully.
    fn sample(
        &mut self,
        program: &mut Running,
        server: &Server,
        emulator: Option<&mut Emulator>,
        contestant: Contestant,
    ) -> Result<bool, String> {
        // If a process has exited, its figures stay as they were in its last sample.
        if let Some(usage) = usage(program.0.id()) {
            self.program = usage;
        }
        if let Some(usage) = server.walsender.and_then(usage) {
            self.walsender = usage.cpu_seconds;
        }
        if let Some(usage) = server.dispatch.and_then(usage) {
            self.dispatch = usage.cpu_seconds;
        }
        if let Some(emulator) = emulator {
            self.emulator = emulator.usage()?.cpu_seconds;
        }
        match program.0.try_wait().map_err(|e| e.to_string())? {
            None => Ok(false),
            Some(status) if status.success() => Ok(true),
            Some(status) => Err(format!("{} ended with {status}", contestant.describe())),
        }
    }
}
