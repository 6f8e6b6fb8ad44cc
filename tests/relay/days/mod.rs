//! Tests of daily partitions. `prune` and a relay with `prune_after` drop an old day as a whole, but only
//! when every row of the day may be deleted, and without delaying the services.

mod background;
mod command;
mod locks;
mod safety;

use std::time::{Duration, Instant};

use pubsub_emulator::RunningEmulator;
use scratch_postgres::ScratchPostgres;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::exceptions::stored;
use crate::harness::{Database, connect, eventually, postrider};
use crate::pruning::wait_until_settled;

/// Creates a database whose outbox has daily partitions. The relay's role may prune.
async fn daily_database() -> Database {
    let server = ScratchPostgres::builder().setting("wal_level", "logical");
    let server = server.start().unwrap();
    let url = server.socket_url("postgres");
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_PRUNE_AFTER", "1s"),
    ];
    let init = ["init", "--apply", "--partition", "daily"];
    let done = postrider(&init, &environment).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    Database::on(server).await
}

/// SQL for midnight UTC of the day that is `days` days from today.
fn midnight(days: i32) -> String {
    format!("(((now() at time zone 'UTC')::date + {days})::timestamp at time zone 'UTC')")
}

/// The name that Postrider gives to the partition of a day, and the bounds of this partition as
/// SQL.
async fn day(database: &Database, days: i32) -> (String, String) {
    let name = format!(
        "SELECT 'outbox.events_' || to_char((now() at time zone 'UTC')::date + {days}, 'YYYYMMDD')"
    );
    let bounds = format!(
        "SELECT format('FOR VALUES FROM (%L) TO (%L)', {}, {})",
        midnight(days),
        midnight(days + 1)
    );
    (database.text(&name).await, database.text(&bounds).await)
}

/// Adds a partition for a past day, as if a relay had added it in time. Returns the name of the
/// partition.
async fn add_past_day(database: &Database, days: i32) -> String {
    let (name, bounds) = day(database, days).await;
    database
        .execute(&format!(
            "CREATE TABLE {name} PARTITION OF outbox.events {bounds}"
        ))
        .await;
    name
}

/// Inserts `count` events of the day, with five keys that begin with `key`.
async fn insert(database: &Database, count: u32, key: &str, days: i32) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, occurred_at) \
             SELECT 'order', '{key}-' || i % 5, 'OrderPlaced', '{{}}', {} + i * interval '1 ms' \
             FROM generate_series(1, {count}) i",
            midnight(days)
        ))
        .await;
}

async fn exists(database: &Database, table: &str) -> bool {
    let found = format!("SELECT count(to_regclass('{table}'))");
    database.number(&found).await == 1
}

async fn rows(database: &Database, table: &str) -> i64 {
    database
        .number(&format!("SELECT count(*) FROM {table}"))
        .await
}

async fn wait_until_stored(emulator: &RunningEmulator, count: usize) {
    eventually("everything is stored", || async {
        (stored(emulator).len() == count).then_some(())
    })
    .await;
}

/// Makes all records look 30 days old.
async fn age_records(database: &Database) {
    database
        .execute("UPDATE outbox.dispatch SET dispatched_at = now() - interval '30 days'")
        .await;
}

/// Runs `postrider prune --older-than 7d --json` with the option `mode`. Returns the exit code and
/// the output.
fn prune(database: &Database, mode: &str) -> (Option<i32>, serde_json::Value) {
    prune_as(&database.url, database.slot(), mode)
}

fn prune_as(url: &str, slot: &str, mode: &str) -> (Option<i32>, serde_json::Value) {
    let environment = [("DATABASE_URL", url), ("POSTRIDER_SLOT", slot)];
    let arguments = [
        "prune",
        "--older-than",
        "7d",
        mode,
        "--json",
        "--pause",
        "1ms",
    ];
    let ran = postrider(&arguments, &environment).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    let json = serde_json::from_slice(&ran.stdout).unwrap_or(serde_json::Value::String(said));
    (ran.status.code(), json)
}

/// The number of rows of each day in `tables[0].days`, oldest day first.
fn dropped(json: &serde_json::Value) -> Vec<u64> {
    let days = json["tables"][0]["days"].as_array();
    let days = days.unwrap_or_else(|| panic!("{json:#}")).iter();
    days.map(|day| day["rows"].as_u64().unwrap()).collect()
}

/// A service that inserts one event after the other, and measures how long its slowest insert
/// takes.
struct TimedService {
    stop: oneshot::Sender<()>,
    slowest: JoinHandle<Duration>,
}

impl TimedService {
    async fn start(database: &Database) -> Self {
        let client = connect(&database.url).await;
        let (stop, mut stopped) = oneshot::channel();
        let slowest = tokio::spawn(async move {
            let mut slowest = Duration::ZERO;
            while stopped.try_recv().is_err() {
                let began = Instant::now();
                client
                    .batch_execute(
                        "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
                         VALUES ('order', 'live', 'OrderPlaced', '{}')",
                    )
                    .await
                    .unwrap();
                slowest = slowest.max(began.elapsed());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            slowest
        });
        Self { stop, slowest }
    }

    async fn stop(self) -> Duration {
        self.stop.send(()).unwrap();
        self.slowest.await.unwrap()
    }
}
