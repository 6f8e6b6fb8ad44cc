//! Measures an idle relay: its CPU time, and the WAL that it causes the server to write.
//!
//! Windows with and without the relay alternate on the same server. The windows without the relay
//! are the baseline, because the server's own bookkeeping writes some WAL.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::contestant::SLOT;
use crate::cores::Cores;
use crate::database::Database;
use crate::peers::Emulator;
use crate::process;
use crate::report::{Aim, Line};
use crate::sample::median;

/// How long the server must write no WAL to count as idle. After any write, PostgreSQL's background writer adds a
/// record of the running transactions. This record may come up to 25 s later: the background writer keeps 15 s
/// between two such records, and sleeps up to 10 s when it has little to do. Two seconds are a margin.
const REST: Duration = Duration::from_secs(27);

/// Maximum time to wait until the server is idle. After that time, the measurement begins even if
/// the server still writes WAL, because that WAL is a result too.
const REST_LIMIT: Duration = Duration::from_secs(60);

/// The aim for the relay's CPU time, in percent of a core.
const CPU_AIM: f64 = 0.2;

/// The result of one window: the bytes of WAL that the server wrote, and the relay's CPU time in
/// percent of a core.
#[derive(Debug, Clone, Copy)]
struct Window {
    wal_bytes: f64,
    cpu_percent: f64,
}

/// Measures windows of this length. Returns one line for the CPU time and one for the WAL.
pub(crate) async fn measure(runs: u32, length: Duration) -> Result<Vec<Line>, String> {
    let database = Database::start(&process::binary()).await?;
    database.new_slot(SLOT).await?;
    let rest = REST.min(length);
    let (mut alone, mut idle) = (Vec::new(), Vec::new());
    for run in 1..=runs {
        let mut turns = [false, true];
        if run % 2 == 0 {
            turns.reverse();
        }
        for is_ours in turns {
            come_to_rest(&database, rest).await?;
            if !is_ours {
                alone.push(without_relay(&database, length).await?);
                continue;
            }
            let window = with_relay(&database, length, rest).await?;
            eprintln!(
                "  run {run}: {:.3} % of a core, {} bytes of WAL",
                window.cpu_percent, window.wal_bytes
            );
            idle.push(window);
        }
    }
    let line = |scenario: &str, unit, baseline_is: &str, baseline, ours, aim| Line {
        scenario: scenario.into(),
        unit,
        baseline_is: baseline_is.into(),
        ours_is: format!("relay with nothing to do for {} s", length.as_secs()),
        baseline,
        ours,
        ratio: f64::NAN,
        aim,
        cpu_aim: None,
        costs: None,
        runs: idle.len(),
        samples: json!({
            "baseline_wal_bytes": alone.iter().map(|w| w.wal_bytes).collect::<Vec<_>>(),
            "wal_bytes": idle.iter().map(|w| w.wal_bytes).collect::<Vec<_>>(),
            "cpu_percent": idle.iter().map(|w| w.cpu_percent).collect::<Vec<_>>(),
        }),
        note: None,
    };
    let of = |windows: &[Window], figure: fn(&Window) -> f64| median(windows.iter().map(figure));
    let cpu = of(&idle, |w| w.cpu_percent);
    let (theirs, ours) = (of(&alone, |w| w.wal_bytes), of(&idle, |w| w.wal_bytes));
    let nobody = "the server without a relay";
    Ok(vec![
        line(
            "idle CPU",
            "% of a core",
            "-",
            f64::NAN,
            cpu,
            Aim::AtMost(CPU_AIM),
        ),
        line(
            "idle WAL",
            "bytes",
            nobody,
            theirs,
            ours,
            Aim::AboveBaselineAtMost(0.0),
        ),
    ])
}

async fn without_relay(database: &Database, length: Duration) -> Result<Window, String> {
    let before = written(database).await?;
    tokio::time::sleep(length).await;
    Ok(Window {
        wal_bytes: written(database).await? - before,
        cpu_percent: 0.0,
    })
}

async fn with_relay(
    database: &Database,
    length: Duration,
    rest: Duration,
) -> Result<Window, String> {
    let emulator = Emulator::start(0, false, Cores::Shared)?;
    let mut relay = process::relay(&process::binary(), &database.url(), &emulator.host)?;
    come_to_rest(database, rest).await?;
    if database.observe(SLOT, "0/0").await?.walsender.is_none() {
        return Err("the relay does not stream".into());
    }
    let (before, used) = (written(database).await?, relay.usage()?.cpu_seconds);
    let began = Instant::now();
    tokio::time::sleep(length).await;
    let used = relay.usage()?.cpu_seconds - used;
    let window = Window {
        wal_bytes: written(database).await? - before,
        cpu_percent: 100.0 * used / began.elapsed().as_secs_f64(),
    };
    drop(relay);
    emulator.finish()?;
    Ok(window)
}

/// Bytes of WAL that the server has written since it was created.
async fn written(database: &Database) -> Result<f64, String> {
    let bytes = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint";
    Ok(database.count(bytes).await? as f64)
}

/// Waits until the server has written nothing for `rest`, but at most `REST_LIMIT`.
async fn come_to_rest(database: &Database, rest: Duration) -> Result<(), String> {
    let began = Instant::now();
    let (mut last, mut since) = (written(database).await?, Instant::now());
    while since.elapsed() < rest && began.elapsed() < REST_LIMIT {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = written(database).await?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(())
}
