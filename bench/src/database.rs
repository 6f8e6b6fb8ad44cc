//! The PostgreSQL server of a measurement. A backlog is written to the server once and drained many
//! times.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use scratch_postgres::ScratchPostgres;
use tokio_postgres::{Client, NoTls};

use crate::backlog::Backlog;
use crate::drain::Server;

/// A slot that nobody reads, at the start of the backlog. A program that must read the whole backlog from a
/// slot reads a copy of this one.
pub(crate) const ORIGIN: &str = "origin";

/// How long to wait until a terminated reader of a slot has ended.
const FREE_LIMIT: Duration = Duration::from_secs(30);

/// Reads three facts about a slot: whether the slot has confirmed a position, the process id of its
/// walsender, and the process id of the backend that writes the relay's dispatch rows. The
/// statement recognises that backend by its `application_name`.
const OBSERVE: &str = "\
    SELECT coalesce(s.confirmed_flush_lsn >= $2::text::pg_lsn, false), s.active_pid, \
           (SELECT pid FROM pg_stat_activity \
            WHERE application_name = 'postrider dispatch ' || $1 LIMIT 1) \
    FROM pg_replication_slots s WHERE s.slot_name = $1";

pub(crate) struct Database {
    server: ScratchPostgres,
    client: Client,
}

impl Database {
    /// Starts a durable server, prepares it with `postrider init --apply`, and creates the slot
    /// [`ORIGIN`].
    ///
    /// Autovacuum is off and timed checkpoints are rare, because a vacuum or a checkpoint would
    /// slow down only the program that is running at that moment.
    pub(crate) async fn start(binary: &Path) -> Result<Self, String> {
        let server = ScratchPostgres::builder()
            .durable()
            .setting("wal_level", "logical")
            .setting("max_wal_size", "8GB")
            .setting("shared_buffers", "512MB")
            .setting("checkpoint_timeout", "1h")
            .setting("autovacuum", "off")
            // The latency measurement needs commit timestamps. All other measurements record them too, because
            // their cost is too small to measure.
            .setting("track_commit_timestamp", "on")
            .start()
            .map_err(|e| e.to_string())?;
        let url = server.url("postgres");
        let client = connect(&url).await?;
        let init = Command::new(binary)
            .args(["init", "--apply", "--no-slot"])
            .env("DATABASE_URL", &url)
            .output()
            .map_err(|e| e.to_string())?;
        if !init.status.success() {
            return Err(String::from_utf8_lossy(&init.stderr).into_owned());
        }
        let database = Self { server, client };
        database
            .execute(&format!(
                "SELECT pg_create_logical_replication_slot('{ORIGIN}', 'pgoutput')"
            ))
            .await?;
        Ok(database)
    }

    pub(crate) fn url(&self) -> String {
        self.server.url("postgres")
    }

    /// The URL of the same database over the server's Unix socket.
    pub(crate) fn socket_url(&self) -> String {
        self.server.socket_url("postgres")
    }

    /// The SQL session of this benchmark itself.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) async fn connect(&self) -> Result<Client, String> {
        connect(&self.url()).await
    }

    pub(crate) async fn execute(&self, sql: &str) -> Result<(), String> {
        self.client
            .batch_execute(sql)
            .await
            .map_err(|e| format!("{e:?}"))
    }

    pub(crate) async fn text(&self, sql: &str) -> Result<String, String> {
        let row = self
            .client
            .query_one(sql, &[])
            .await
            .map_err(|e| format!("{e:?}"))?;
        row.try_get(0).map_err(|e| e.to_string())
    }

    pub(crate) async fn count(&self, sql: &str) -> Result<u64, String> {
        let row = self
            .client
            .query_one(sql, &[])
            .await
            .map_err(|e| format!("{e:?}"))?;
        let count: i64 = row.try_get(0).map_err(|e| e.to_string())?;
        u64::try_from(count).map_err(|e| e.to_string())
    }

    /// Writes the backlog, and then runs ANALYZE and CHECKPOINT. Returns the position at which the last commit
    /// ends. A reader that has reached this position has read the whole backlog.
    pub(crate) async fn load(&self, backlog: &Backlog) -> Result<String, String> {
        self.execute("SET synchronous_commit = off").await?;
        for statement in backlog.statements() {
            self.execute(&statement).await?;
        }
        let end = self
            .text("SELECT pg_current_wal_insert_lsn()::text")
            .await?;
        self.execute("SET synchronous_commit = on; ANALYZE; CHECKPOINT")
            .await?;
        Ok(end)
    }

    /// The process ids of the server and of its current sessions and background processes.
    pub(crate) async fn pids(&self) -> Result<Vec<u32>, String> {
        let pids = "SELECT coalesce(array_agg(pid), '{}') FROM pg_stat_activity";
        let row = self.client.query_one(pids, &[]).await;
        let pids: Vec<i32> = row.map_err(|e| format!("{e:?}"))?.get(0);
        let pids = pids.into_iter().filter_map(|pid| u32::try_from(pid).ok());
        Ok(self.server.pid().into_iter().chain(pids).collect())
    }

    pub(crate) async fn wal_position(&self) -> Result<String, String> {
        self.text("SELECT pg_current_wal_lsn()::text").await
    }

    /// Creates a slot at the start of the backlog. Drops an existing slot of the same name first.
    pub(crate) async fn copy_slot(&self, name: &str) -> Result<(), String> {
        self.free_slot(name).await?;
        self.execute(&format!(
            "SELECT pg_copy_logical_replication_slot('{ORIGIN}', '{name}')"
        ))
        .await
    }

    /// Creates a slot at the current end of the WAL. Drops an existing slot of the same name first.
    pub(crate) async fn new_slot(&self, name: &str) -> Result<(), String> {
        self.free_slot(name).await?;
        self.execute(&format!(
            "SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')"
        ))
        .await
    }

    /// Restores the state from before any drain: no dispatch rows, no dirty pages, and the slot at
    /// the start of the backlog.
    pub(crate) async fn prepare_drain(&self, slot: &str) -> Result<(), String> {
        self.forget().await?;
        self.copy_slot(slot).await
    }

    /// Restores the state before any relay: no slot and no records. The relay's first start with `start =
    /// all` reads all rows from the table.
    pub(crate) async fn prepare_first_start(&self, slot: &str) -> Result<(), String> {
        self.free_slot(slot).await?;
        self.forget().await
    }

    /// Removes all records of the relay, and writes all dirty pages to disk.
    pub(crate) async fn forget(&self) -> Result<(), String> {
        self.execute(
            "TRUNCATE outbox.dispatch; DELETE FROM outbox.relay; DELETE FROM outbox.capture; CHECKPOINT",
        )
        .await
    }

    /// Whether the relay has published and recorded all rows that were in the table at its first start.
    pub(crate) async fn has_published_table(&self) -> Result<bool, String> {
        let done = "SELECT count(*) FROM outbox.relay, outbox.capture \
                    WHERE recovering IS NULL AND floor > '0'";
        Ok(self.count(done).await? > 0)
    }

    /// Terminates the slot's reader and drops the slot.
    pub(crate) async fn free_slot(&self, name: &str) -> Result<(), String> {
        let began = Instant::now();
        let reader = format!(
            "SELECT count(pg_terminate_backend(active_pid)) FROM pg_replication_slots \
             WHERE slot_name = '{name}' AND active_pid IS NOT NULL"
        );
        while self.count(&reader).await? > 0 {
            if began.elapsed() > FREE_LIMIT {
                return Err(format!("slot {name} is still read"));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.execute(&format!(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
             WHERE slot_name = '{name}'"
        ))
        .await
    }

    /// Returns whether the slot's reader has confirmed `end`, and the process ids of the server
    /// processes that serve the reader.
    pub(crate) async fn observe(&self, slot: &str, end: &str) -> Result<Server, String> {
        let row = self
            .client
            .query_opt(OBSERVE, &[&slot, &end])
            .await
            .map_err(|e| format!("{e:?}"))?;
        let pid = |pid: Option<i32>| pid.and_then(|pid| u32::try_from(pid).ok());
        Ok(row.map_or_else(Server::default, |row| Server {
            drained: row.get(0),
            walsender: pid(row.get(1)),
            dispatch: pid(row.get(2)),
        }))
    }
}

async fn connect(url: &str) -> Result<Client, String> {
    let (client, connection) = tokio_postgres::connect(url, NoTls)
        .await
        .map_err(|e| e.to_string())?;
    tokio::spawn(connection);
    Ok(client)
}
