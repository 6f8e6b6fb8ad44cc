//! Prepares the database of a schedule before its relay starts: runs `postrider init --apply`, and
//! creates the shop's tables, old rows, partitions and a second slot.

use std::process::Stdio;

use tokio::process::Command;

use crate::gather::HISTORY;
use crate::ground::{Database, execute};
use crate::plan::{KINDS, Plan};
use crate::relay::binary;

/// Creates the outbox table with two partitions, as a service may have created it before `postrider
/// init`.
const PARTITIONED: &str = "\
    CREATE SCHEMA outbox; CREATE SEQUENCE outbox.events_seq_seq; \
    CREATE TABLE outbox.events ( \
        id uuid NOT NULL DEFAULT gen_random_uuid(), aggregatetype text NOT NULL, \
        aggregateid text, event_type text NOT NULL, version bigint, \
        schema_version int NOT NULL DEFAULT 1, payload jsonb, headers jsonb, \
        occurred_at timestamptz NOT NULL DEFAULT now(), part int NOT NULL DEFAULT 0, \
        inserted_xid xid8 NOT NULL DEFAULT pg_current_xact_id(), \
        seq bigint DEFAULT nextval('outbox.events_seq_seq'), \
        PRIMARY KEY (id, part)) PARTITION BY LIST (part); \
    CREATE TABLE outbox.events_0 PARTITION OF outbox.events FOR VALUES IN (0); \
    CREATE TABLE outbox.events_1 PARTITION OF outbox.events FOR VALUES IN (1)";

impl Database {
    /// Creates everything that exists before the first relay starts.
    pub(crate) async fn prepare(&self, plan: &Plan) -> Result<(), String> {
        let client = self.connect().await?;
        if plan.workload.moves_rows {
            execute(&client, PARTITIONED).await?;
        }
        let table = &plan.table;
        self.init(&["init", "--apply", "--no-slot"]).await?;
        self.make_shop(plan).await?;
        if table.lagging_slot {
            let lagging = format!(
                "SELECT pg_create_logical_replication_slot('lagging_{}', 'pgoutput')",
                self.name
            );
            execute(&client, &lagging).await?;
        }
        if table.history > 0 {
            execute(&client, &history(table.history, plan.workload.hot_keys)).await?;
        }
        if table.captured_by_relay {
            return Ok(());
        }
        self.init(&["init", "--apply"]).await
    }

    async fn init(&self, arguments: &[&str]) -> Result<(), String> {
        let done = Command::new(binary()?)
            .args(arguments)
            .env_clear()
            .env("DATABASE_URL", &self.owner_url)
            .env("POSTRIDER_SLOT", &self.name)
            .stdin(Stdio::null())
            .output()
            .await
            .map_err(|e| format!("postrider init: {e}"))?;
        if done.status.success() {
            Ok(())
        } else {
            Err(format!(
                "postrider init: {}",
                String::from_utf8_lossy(&done.stderr)
            ))
        }
    }

    /// Creates aggregates with a version that the writers increment. A writer locks the aggregate's
    /// row until it commits, so the order of versions is the order of commits. The table
    /// `shop.former` keeps the events of a dropped outbox table.
    async fn make_shop(&self, plan: &Plan) -> Result<(), String> {
        let kinds = KINDS.map(|kind| format!("'{kind}'")).join(", ");
        let sql = format!(
            "CREATE SCHEMA shop; \
             CREATE TABLE shop.noise (n int, pad text); \
             CREATE TABLE shop.former \
                 (id uuid, aggregatetype text, aggregateid text, version bigint, payload jsonb); \
             CREATE TABLE shop.aggregate \
                 (kind text, id text, version bigint NOT NULL, PRIMARY KEY (kind, id)) \
                 WITH (fillfactor = 20); \
             INSERT INTO shop.aggregate SELECT kind, 'hot-' || n, 0 \
             FROM unnest(ARRAY[{kinds}]) kind, generate_series(1, {}) n",
            plan.workload.hot_keys
        );
        execute(&self.connect().await?, &sql).await
    }
}

/// SQL that inserts old rows with the keys that the writers use. The versions of old rows are lower
/// than the versions of the writers' rows.
fn history(rows: u64, hot_keys: u64) -> String {
    format!(
        "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
         SELECT 'order', 'hot-' || 1 + mod(i, {hot_keys}), 'Old', i - {rows} - 1, \
             jsonb_build_object('t', '{HISTORY}') \
         FROM generate_series(1, {rows}) i ORDER BY i"
    )
}
