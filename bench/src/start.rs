//! Measures the time from the start of the program to streaming, and the size of the binary.
//!
//! The relay counts as streaming when `/readyz` reports that it is ready, and `pg_recvlogical` when
//! the slot is active.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::contestant::{self, SLOT};
use crate::cores::Cores;
use crate::database::Database;
use crate::peers::Emulator;
use crate::process;
use crate::report::{Aim, Line};
use crate::sample::median;

/// Time between two checks. Short compared with any start, so that the measured time is exact.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

const LIMIT: Duration = Duration::from_secs(30);

const START_AIM_MS: f64 = 150.0;
const SIZE_AIM_MB: f64 = 20.0;

/// Measures the start time and the size of the binary. Returns a line for each of the two.
pub(crate) async fn measure(runs: u32) -> Result<Vec<Line>, String> {
    let database = Database::start(&process::binary()).await?;
    let emulator = Emulator::start(0, false, Cores::Shared)?;
    let (mut baseline, mut ours) = (Vec::new(), Vec::new());
    for run in 1..=runs {
        let mut turns = [false, true];
        if run % 2 == 0 {
            turns.reverse();
        }
        for is_ours in turns {
            database.new_slot(SLOT).await?;
            if is_ours {
                ours.push(relay(&database, &emulator.host)?)
            } else {
                baseline.push(recvlogical(&database).await?)
            }
        }
        eprintln!(
            "  run {run}: pg_recvlogical {:.0} ms, ours {:.0} ms",
            baseline.last().copied().unwrap_or(f64::NAN),
            ours.last().copied().unwrap_or(f64::NAN)
        );
    }
    emulator.finish()?;
    let bytes = std::fs::metadata(process::binary()).map_err(|e| e.to_string())?;
    let line = |scenario: &str, unit, baseline: &[f64], ours: &[f64], aim| Line {
        scenario: scenario.into(),
        unit,
        baseline_is: if baseline.is_empty() {
            "-"
        } else {
            "pg_recvlogical"
        }
        .into(),
        ours_is: "relay".into(),
        baseline: median(baseline.iter().copied()),
        ours: median(ours.iter().copied()),
        ratio: f64::NAN,
        aim: Aim::AtMost(aim),
        cpu_aim: None,
        costs: None,
        runs: ours.len(),
        samples: json!({ "baseline": baseline, "ours": ours }),
        note: None,
    };
    let size = [bytes.len() as f64 / 1e6];
    Ok(vec![
        line("start to streaming", "ms", &baseline, &ours, START_AIM_MS),
        line("size of the binary", "MB", &[], &size, SIZE_AIM_MB),
    ])
}

async fn recvlogical(database: &Database) -> Result<f64, String> {
    let mut command = contestant::recvlogical(&database.url(), "/dev/null")?;
    let began = Instant::now();
    let _running = process::start(&mut command)?;
    while database.observe(SLOT, "0/0").await?.walsender.is_none() {
        if began.elapsed() > LIMIT {
            return Err("pg_recvlogical does not stream".into());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(began.elapsed().as_secs_f64() * 1_000.0)
}

fn relay(database: &Database, host: &str) -> Result<f64, String> {
    let port = free_port()?;
    let url = database.url();
    let mut command = Command::new(process::binary());
    command
        .arg("run")
        .envs(process::environment(&url, host))
        .env("POSTRIDER_HTTP_ADDR", port.to_string());
    let began = Instant::now();
    let mut relay = process::start(&mut command)?;
    while !is_ready(port) {
        relay.usage()?;
        if began.elapsed() > LIMIT {
            return Err("the relay does not stream".into());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(began.elapsed().as_secs_f64() * 1_000.0)
}

fn free_port() -> Result<SocketAddr, String> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| listener.local_addr())
        .map_err(|e| e.to_string())
}

/// Whether `/readyz` reports that the relay is ready. The relay is not ready if nobody listens on
/// the port.
fn is_ready(port: SocketAddr) -> bool {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(port)?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
}
