//! One drain of a backlog: its time, and what each process spent on it.
//!
//! The clock runs from the start of the program. A program that ends by itself has drained the
//! backlog when it has ended, the relay when its slot has confirmed the backlog's last event: it
//! has then also published and recorded everything, and waited for its next status message.

use std::time::{Duration, Instant};

use super::backlog::Backlog;
use super::contestant::Contestant;
use super::cores::Cores;
use super::database::Database;
use super::peers::{Emulator, Told};
use super::sample::Sample;
use crate::process::{self, Running, Usage, usage};

/// How often everything is looked at; small against any drain.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// A program that grows beyond this is stopped and judged by what it has done until then.
const MEMORY_LIMIT_KIB: u64 = 6 << 20;

/// Without an end for so long something is wrong.
const LIMIT: Duration = Duration::from_secs(3_600);

/// Drains `backlog`, which ends at `end`.
pub(super) async fn drain(
    contestant: Contestant,
    database: &Database,
    backlog: &Backlog,
    end: &str,
    cores: Cores,
) -> Result<Sample, String> {
    let slots = contestant.slots();
    database.prepare_drain(slots).await?;
    let mut emulator = match contestant.emulator_delay_ms() {
        Some(delay_ms) => Some(Emulator::start(delay_ms, false, cores)?),
        None => None,
    };
    let mut emulator_cpu = 0.0;
    let host = emulator.as_ref().map_or("127.0.0.1:1", |e| &e.host);
    let began = Instant::now();
    let mut programs = start(contestant, database, backlog, end, host, cores)?;
    let mut spent: Vec<Spent> = slots.iter().map(|_| Spent::default()).collect();
    let mut streams_since = None;
    let over = loop {
        let (mut ended, mut drained) = (false, true);
        for ((slot, program), spent) in slots.iter().zip(&mut programs).zip(&mut spent) {
            let Some(running) = program else { continue };
            let server = database.look(slot, end).await?;
            if server.walsender.is_some() {
                streams_since.get_or_insert_with(Instant::now);
            }
            ended |= spent.look(running, &server, contestant)?;
            if server.drained && slots.len() > 1 {
                // Its walsender would go on with what other drains have left in the log behind the
                // backlog, and take that time from the other.
                *program = None;
                database.free_slot(slot).await?;
            }
            drained &= server.drained;
        }
        if let Some(emulator) = &mut emulator {
            emulator_cpu = emulator.usage()?.cpu_seconds;
        }
        let is_too_large = |spent: &Spent| spent.program.peak_rss_kib > MEMORY_LIMIT_KIB;
        match (ended, contestant.ends_by_itself()) {
            (true, true) => break Over::Drained,
            (true, false) => return Err(format!("{} ended", contestant.describe())),
            (false, false) if drained => break Over::Drained,
            _ if spent.iter().any(is_too_large) => break Over::TooLarge,
            _ if began.elapsed() > LIMIT => return Err("it takes too long".into()),
            _ => tokio::time::sleep(LOOK_INTERVAL).await,
        }
    };
    let seconds = began.elapsed().as_secs_f64();
    let streamed_seconds = streams_since.unwrap_or(began).elapsed().as_secs_f64();
    drop(programs);
    let told = match emulator {
        Some(emulator) => Some(emulator.finish()?),
        None => None,
    };
    let events = match (over, &told) {
        (Over::TooLarge, Some(told)) => told.stored,
        _ => backlog.events,
    };
    is_whole(contestant, database, told.as_ref(), events).await?;
    for slot in slots {
        database.free_slot(slot).await?;
    }
    let spent = spent.iter().fold(Spent::default(), Spent::and);
    Ok(Sample {
        events,
        complete: over == Over::Drained,
        seconds,
        streamed_seconds,
        program: spent.program,
        walsender_cpu: spent.walsender,
        dispatch_cpu: spent.dispatch,
        emulator_cpu,
        requests: told.map(|told| told.requests),
    })
}

/// Starts one program for each slot.
fn start(
    contestant: Contestant,
    database: &Database,
    backlog: &Backlog,
    end: &str,
    host: &str,
    cores: Cores,
) -> Result<Vec<Option<Running>>, String> {
    let start = |nth| {
        let command = contestant.command(nth, database, end, host, backlog)?;
        process::start(&mut cores.of_program(command)?).map(Some)
    };
    (0..contestant.slots().len()).map(start).collect()
}

/// Makes sure that so many events were published, and recorded where that is done.
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

/// What the server says of a drain.
#[derive(Debug, Default)]
pub(super) struct Server {
    pub(super) drained: bool,
    pub(super) walsender: Option<u32>,
    pub(super) dispatch: Option<u32>,
}

/// CPU seconds until the last look, by process.
#[derive(Debug, Default)]
struct Spent {
    program: Usage,
    walsender: f64,
    dispatch: f64,
}

impl Spent {
    /// What several have spent; the memory is that of all together.
    fn and(self, other: &Self) -> Self {
        Self {
            program: Usage {
                peak_rss_kib: self.program.peak_rss_kib + other.program.peak_rss_kib,
                cpu_seconds: self.program.cpu_seconds + other.program.cpu_seconds,
            },
            walsender: self.walsender + other.walsender,
            dispatch: self.dispatch + other.dispatch,
        }
    }

    /// Notes what they have used; says whether the program has ended well.
    fn look(
        &mut self,
        program: &mut Running,
        server: &Server,
        contestant: Contestant,
    ) -> Result<bool, String> {
        // A process that is gone keeps its last figure.
        if let Some(usage) = usage(program.0.id()) {
            self.program = usage;
        }
        if let Some(usage) = server.walsender.and_then(usage) {
            self.walsender = usage.cpu_seconds;
        }
        if let Some(usage) = server.dispatch.and_then(usage) {
            self.dispatch = usage.cpu_seconds;
        }
        match program.0.try_wait().map_err(|e| e.to_string())? {
            None => Ok(false),
            Some(status) if status.success() => Ok(true),
            Some(status) => Err(format!("{} ended with {status}", contestant.describe())),
        }
    }
}
