//! Helpers for all tests. They start a database server, an emulator, and the relay in its own
//! process. They also wait, up to a deadline, until a condition holds.

mod database;
mod relay_process;

use std::time::{Duration, Instant};

use pubsub_emulator::checks::{self, Report};
use pubsub_emulator::{Emulator, RunningEmulator};

pub(crate) use database::{Database, connect};
pub(crate) use relay_process::{Relay, postrider, signal};

/// How long a test waits for a condition before it fails. Generous, because machines are shared.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Calls `probe` until it returns a value. Panics with `what`, the awaited condition, after
/// [`PATIENCE`].
pub(crate) async fn eventually<T, F: Future<Output = Option<T>>>(
    what: &str,
    mut probe: impl FnMut() -> F,
) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = probe().await {
            return value;
        }
        assert!(
            Instant::now() < deadline,
            "still not after {PATIENCE:?}: {what}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Compares the emulator's journal with the rows of `outbox.events`.
#[must_use]
pub(crate) async fn check(database: &Database, emulator: &RunningEmulator) -> Report {
    checks::check(&emulator.journal().attempts(), &database.expected().await)
}

/// Like [`check`], but also requires that every recorded event came from the stream. Otherwise the
/// test could not notice an event that the stream lost, because the auditor delivers such an event.
/// (The LSN of a commit is always a multiple of 8. The LSN in the record of an event from a table never is.)
#[must_use]
pub(crate) async fn check_streamed(database: &Database, emulator: &RunningEmulator) -> Report {
    let from_a_table = "SELECT count(*) FROM outbox.dispatch \
                        WHERE mod(commit_lsn - '0/0'::pg_lsn, 8) <> 0";
    assert_eq!(database.number(from_a_table).await, 0, "from a table");
    check(database, emulator).await
}

/// Waits until killed relays can no longer have an effect. First the server must end their sessions,
/// because the last statements of a session may still record outcomes. Then the journal must not
/// change for 200 ms, because requests of the relays may still be in the network.
pub(crate) async fn wait_until_killed_relays_are_gone(
    database: &Database,
    emulator: &RunningEmulator,
) {
    let sessions = "SELECT count(*) FROM pg_stat_activity \
                    WHERE application_name LIKE 'postrider%' AND datname = current_database()";
    eventually("the sessions of the killed relays have ended", || async {
        (database.number(sessions).await == 0).then_some(())
    })
    .await;
    eventually("the journal has been quiet for a while", || async {
        let attempts = || emulator.journal().counts().attempts;
        let before = attempts();
        tokio::time::sleep(Duration::from_millis(200)).await;
        (before == attempts()).then_some(())
    })
    .await;
}

/// Starts an emulator with the topic `order.events` of project `demo`.
pub(crate) async fn emulator() -> RunningEmulator {
    let emulator = Emulator::builder()
        .listen("127.0.0.1:0".parse().unwrap())
        .start()
        .await
        .unwrap();
    emulator
        .create_topic("projects/demo/topics/order.events")
        .await
        .unwrap();
    emulator
}

/// Inserts `count` events over `keys` keys, one transaction per event.
pub(crate) async fn insert_orders(database: &Database, count: u32, keys: u32) {
    database.execute(&insert_orders_sql(count, keys)).await;
}

/// The statement that [`insert_orders`] runs.
pub(crate) fn insert_orders_sql(count: u32, keys: u32) -> String {
    format!(
        "DO $$ BEGIN FOR i IN 1..{count} LOOP \
         INSERT INTO outbox.events \
             (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
         VALUES ('order', 'o-' || (i % {keys}), 'OrderPlaced', i, \
                 jsonb_build_object('n', i), clock_timestamp()); \
         COMMIT; END LOOP; END $$"
    )
}

/// The number of events of `outbox.events` that `postrider audit` counts as sent again.
pub(crate) fn sent_again(database: &Database) -> u64 {
    let environment = [("DATABASE_URL", database.url.as_str())];
    let ran = postrider(&["audit", "--json"], &environment).output();
    let ran = ran.unwrap();
    let report: serde_json::Value = serde_json::from_slice(&ran.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&ran.stderr)));
    report["tables"][0]["sent_again"].as_u64().unwrap()
}

/// Opens a gRPC connection to the emulator at `host`, which is `host:port`.
pub(crate) async fn channel(host: &str) -> tonic::transport::Channel {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{host}")).unwrap();
    eventually("the emulator takes connections", || async {
        endpoint.connect().await.ok()
    })
    .await
}
