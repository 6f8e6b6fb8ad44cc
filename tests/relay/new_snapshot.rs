//! Tests that a recovery loses no event of transactions that run while PostgreSQL creates the new
//! slot.
//!
//! PostgreSQL creates a slot in two steps. First it waits for the running transactions, then for
//! those that began in the meantime. These tests hold up each step with an open transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pubsub_emulator::RunningEmulator;
use tokio_postgres::Client;

use crate::exceptions::{assert_whole_and_in_order, insert, start, stored, wait_until_delivered};
use crate::harness::{self, Database, Relay, eventually};

/// How long a test waits for a mistake: long enough for a faulty relay to read the table and
/// publish its rows.
const TIME_FOR_A_MISTAKE: Duration = Duration::from_secs(1);

/// Publishes 50 events with `dispatch = exceptions`, which leaves no dispatch rows, and drops the
/// slot.
async fn without_slot() -> (Database, RunningEmulator) {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator);
    insert(&database, 1, 50).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    relay.stop().await;
    database.drop_slot().await;
    (database, emulator)
}

/// Begins a transaction. Returns its connection and the lower 32 bits of its id.
pub(crate) async fn begin(database: &Database) -> (Client, String) {
    let client = harness::connect(&database.url).await;
    client.batch_execute("BEGIN").await.unwrap();
    let asking = client.query_one("SELECT pg_current_xact_id()::xid::text", &[]);
    let xid = asking.await.unwrap().get(0);
    (client, xid)
}

/// Waits until PostgreSQL waits for a transaction while it creates a slot. `xid` has the lower 32
/// bits of the transaction's id.
pub(crate) async fn wait_until_waited_for(database: &Database, xid: &str) {
    let waiting = format!(
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) \
         WHERE backend_type = 'walsender' AND NOT granted AND transactionid::text = '{xid}'"
    );
    eventually("the new slot waits for the transaction", || async {
        (database.number(&waiting).await == 1).then_some(())
    })
    .await;
}

/// Starts a relay, which creates a slot, and waits until PostgreSQL is in the second step of the
/// creation. This step lasts until the transaction of the returned connection ends. The transaction
/// that held up the first step runs the SQL `rows` and commits.
async fn in_the_second_step(
    database: &Database,
    emulator: &RunningEmulator,
    rows: &str,
) -> (Relay, Client) {
    let (first, xid) = begin(database).await;
    let relay = start(database, emulator);
    wait_until_waited_for(database, &xid).await;
    first.batch_execute(rows).await.unwrap();
    let (second, xid) = begin(database).await;
    first.batch_execute("COMMIT").await.unwrap();
    wait_until_waited_for(database, &xid).await;
    (relay, second)
}

fn row(version: u32) -> String {
    format!(
        "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload, \
             occurred_at) \
         VALUES ('order', 'slow', 'OrderPlaced', {version}, '{{}}', clock_timestamp());"
    )
}

/// A recovery must also find rows of subtransactions. Their transaction ids may be above the `xmax` of a
/// snapshot in which the rows are visible.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_subtransactions_that_a_new_slot_waited_for_are_delivered() {
    let (database, emulator) = without_slot().await;
    let rows = (1..=3).map(|n| format!("SAVEPOINT s; {} RELEASE s;", row(n)));
    let rows: String = rows.collect();
    let (relay, second) = in_the_second_step(&database, &emulator, &rows).await;
    // Begin a third transaction before the second ends. Otherwise no transaction would run for a
    // moment, and the slot could start at this point of the WAL.
    let (third, _) = begin(&database).await;
    second.batch_execute("ROLLBACK").await.unwrap();
    relay.wait_for_log("recovered").await;
    third.batch_execute("ROLLBACK").await.unwrap();
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
}

/// A commit is already in the WAL, but other sessions do not see it yet, because the session that
/// commits waits for a synchronous standby server that does not exist. (A commit is also in this
/// state for a moment before it reaches `pg_xact`, but a test cannot prolong this moment.)
#[tokio::test(flavor = "multi_thread")]
async fn no_row_is_read_while_its_transaction_is_committing() {
    const STANDBY: &str = "ALTER SYSTEM SET synchronous_standby_names = 'nobody'";
    let (database, emulator) = without_slot().await;
    let (relay, second) = in_the_second_step(&database, &emulator, "").await;
    database.execute(STANDBY).await;
    database.execute("SELECT pg_reload_conf()").await;
    let committing = harness::connect(&database.url).await;
    // Commit rows repeatedly, because the first commits may finish before the server has loaded
    // `synchronous_standby_names`.
    let is_over = Arc::new(AtomicBool::new(false));
    let seen = is_over.clone();
    let committing = tokio::spawn(async move {
        for version in 1.. {
            committing.batch_execute(&row(version)).await.unwrap();
            if seen.load(Ordering::Relaxed) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    eventually("a commit waits for the standby server", || async {
        (database.number(waits).await == 1).then_some(())
    })
    .await;
    second.batch_execute("ROLLBACK").await.unwrap();
    relay.wait_for_log("just being committed").await;
    tokio::time::sleep(TIME_FOR_A_MISTAKE).await;
    let before = stored(&emulator).len();
    // The relay logs this text when it has waited for so long that only a standby server can be the
    // reason.
    relay.wait_for_log("wait for a synchronous standby").await;
    is_over.store(true, Ordering::Relaxed);
    database
        .execute("ALTER SYSTEM RESET synchronous_standby_names")
        .await;
    database.execute("SELECT pg_reload_conf()").await;
    committing.await.unwrap();
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_eq!(before, 50, "{}", relay.log());
    assert_whole_and_in_order(&database, &emulator, &relay).await;
}
