//! One drain of the backlog, by `pg_recvlogical` or by the relay, with its time and its memory.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::database::Database;
use super::report::Drain;
use crate::process::{self, Usage, binary, usage};

/// How often the position of the slot is looked at; small against any drain.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

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
    let binary = binary();
    let (_emulator, host) = process::emulator(&binary, "127.0.0.1:0")?;
    let began = Instant::now();
    let mut relay = process::relay(&binary, &database.url(), &host)?;
    let reached = format!(
        "SELECT (confirmed_flush_lsn >= '{end}')::text FROM pg_replication_slots \
         WHERE slot_name = '{SLOT}'"
    );
    while database.text(&reached).await? != "true" {
        relay.usage()?;
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    let seconds = began.elapsed().as_secs_f64();
    let usage = relay.usage()?;
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
