//! One drain of the backlog, by `pg_recvlogical` or by the relay, with its time and its memory.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::database::Database;
use super::report::{Drain, Usage};
use crate::step;

/// How often the position of the slot is looked at; small against any drain.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// The unit of times in /proc on Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// The release binary under test.
pub(super) fn binary() -> PathBuf {
    step::root().join("target/release/postrider")
}

/// `pg_recvlogical` to /dev/null until `end`.
pub(super) async fn baseline(database: &Database, end: &str) -> Result<Drain, String> {
    const SLOT: &str = "baseline";
    database.copy_slot(SLOT).await?;
    let began = Instant::now();
    let mut child = Command::new(pg_recvlogical()?)
        .args([
            "--dbname",
            &database.url(),
            "--slot",
            SLOT,
            "--start",
            "--endpos",
            end,
        ])
        .args(["-o", "proto_version=1", "-o", "publication_names=postrider"])
        .args([
            "--fsync-interval=0",
            "--status-interval=1",
            "--file=/dev/null",
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("pg_recvlogical: {e}"))?;
    let usage = wait(&mut child)?;
    let seconds = began.elapsed().as_secs_f64();
    database
        .execute(&format!("SELECT pg_drop_replication_slot('{SLOT}')"))
        .await?;
    Ok(Drain { seconds, usage })
}

fn wait(child: &mut Child) -> Result<Usage, String> {
    let mut last = Usage::default();
    loop {
        last = usage(child.id()).unwrap_or(last);
        match child.try_wait().map_err(|e| e.to_string())? {
            Some(status) if status.success() => return Ok(last),
            Some(status) => return Err(format!("pg_recvlogical ended with {status}")),
            None => std::thread::sleep(LOOK_INTERVAL),
        }
    }
}

/// The relay with full dispatch rows, until its slot has confirmed `end`.
pub(super) async fn relay(database: &Database, end: &str, events: u64) -> Result<Drain, String> {
    const SLOT: &str = "postrider";
    database
        .execute("TRUNCATE outbox.dispatch; DELETE FROM outbox.relay; CHECKPOINT")
        .await?;
    database.copy_slot(SLOT).await?;
    let (_emulator, host) = emulator()?;
    let began = Instant::now();
    let mut relay = Running(
        Command::new(binary())
            .arg("run")
            .env("DATABASE_URL", database.url())
            .env("PUBSUB_EMULATOR_HOST", host)
            .env("PUBSUB_PROJECT_ID", "bench")
            .env("POSTRIDER_HTTP_ADDR", "off")
            .env("RUST_LOG", "error")
            .spawn()
            .map_err(|e| e.to_string())?,
    );
    let reached = format!(
        "SELECT (confirmed_flush_lsn >= '{end}')::text FROM pg_replication_slots \
         WHERE slot_name = '{SLOT}'"
    );
    while database.text(&reached).await? != "true" {
        if let Some(status) = relay.0.try_wait().map_err(|e| e.to_string())? {
            return Err(format!("the relay ended with {status}"));
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    let seconds = began.elapsed().as_secs_f64();
    let usage = usage(relay.0.id()).unwrap_or_default();
    let recorded = database
        .text("SELECT count(*)::text FROM outbox.dispatch")
        .await?;
    if recorded != events.to_string() {
        return Err(format!("{recorded} of {events} events have a dispatch row"));
    }
    drop(relay);
    database
        .execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
             WHERE active_pid IS NOT NULL",
        )
        .await?;
    Ok(Drain { seconds, usage })
}

/// Our own emulator as a process, on a free port.
fn emulator() -> Result<(Running, String), String> {
    use std::io::{BufRead, BufReader};
    let mut child = Command::new(binary())
        .args(["emulator", "--listen", "127.0.0.1:0"])
        .args(["--topic", "projects/bench/topics/order.events"])
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| e.to_string())?;
    let stdout = child
        .stdout
        .take()
        .expect("invariant: the output is a pipe");
    let running = Running(child);
    let mut line = String::new();
    BufReader::new(stdout)
        .read_line(&mut line)
        .map_err(|e| e.to_string())?;
    let host = line
        .trim()
        .rsplit_once('=')
        .map(|(_, host)| host.to_owned());
    Ok((
        running,
        host.ok_or("the emulator did not say where it listens")?,
    ))
}

/// A process that ends with us.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the process has used until now; `None` when it is gone.
fn usage(pid: u32) -> Option<Usage> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let peak = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name in parentheses come the state and, as 12th and 13th from there, user and
    // system time.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |n: usize| fields.get(n)?.parse::<f64>().ok();
    Some(Usage {
        peak_rss_kib: peak.trim().strip_suffix(" kB")?.trim().parse().ok()?,
        cpu_seconds: (ticks(11)? + ticks(12)?) / TICKS_PER_SECOND,
    })
}

fn pg_recvlogical() -> Result<PathBuf, String> {
    if let Some(folder) = std::env::var_os(scratch_postgres::BIN_FOLDER_VARIABLE) {
        return Ok(PathBuf::from(folder).join("pg_recvlogical"));
    }
    let versions = std::fs::read_dir("/usr/lib/postgresql").map_err(|e| e.to_string())?;
    let found = versions
        .flatten()
        .map(|version| version.path().join("bin/pg_recvlogical"));
    found
        .filter(|path| path.exists())
        .max()
        .ok_or_else(|| "no pg_recvlogical".into())
}
