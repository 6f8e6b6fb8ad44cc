//! The server of one scenario: loaded once, drained again and again.

use std::path::Path;
use std::process::Command;

use scratch_postgres::ScratchPostgres;
use tokio_postgres::{Client, NoTls};

use super::scenario::Scenario;

/// The slot that stands before the backlog and is never read: the others are copies of it.
const ORIGIN: &str = "origin";

pub(crate) struct Database {
    server: ScratchPostgres,
    client: Client,
}

impl Database {
    /// A durable server, prepared by `postrider init --apply`.
    pub(crate) async fn start(binary: &Path) -> Result<Self, String> {
        let server = ScratchPostgres::builder()
            .durable()
            .setting("wal_level", "logical")
            .setting("max_wal_size", "8GB")
            .setting("shared_buffers", "512MB")
            .setting("checkpoint_timeout", "1h")
            .start()
            .map_err(|e| e.to_string())?;
        let url = server.url("postgres");
        let (client, connection) = tokio_postgres::connect(&url, NoTls)
            .await
            .map_err(|e| e.to_string())?;
        tokio::spawn(connection);
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

    /// Writes the backlog, and lets the server settle.
    pub(crate) async fn load(&self, scenario: &Scenario, events: u64) -> Result<(), String> {
        self.execute("SET synchronous_commit = off").await?;
        self.execute(&scenario.sql(events)).await?;
        self.execute("SET synchronous_commit = on; ANALYZE; CHECKPOINT")
            .await
    }

    pub(crate) async fn wal_position(&self) -> Result<String, String> {
        self.text("SELECT pg_current_wal_lsn()::text").await
    }

    /// A new slot at the start of the backlog; one of the same name is dropped.
    pub(crate) async fn copy_slot(&self, name: &str) -> Result<(), String> {
        self.execute(&format!(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
             WHERE slot_name = '{name}'; \
             SELECT pg_copy_logical_replication_slot('{ORIGIN}', '{name}')"
        ))
        .await
    }
}
