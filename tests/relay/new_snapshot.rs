//! What the snapshot of a new slot shows of transactions that ran while the slot was made.
//!
//! PostgreSQL makes a slot in two steps: it waits for the transactions that run, and then for those
//! that began meanwhile. Here each of them is held up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pubsub_emulator::RunningEmulator;
use tokio_postgres::Client;

use crate::exceptions::{assert_whole_and_in_order, insert, start, stored, wait_until_delivered};
use crate::harness::{self, Database, Relay, eventually};

/// Longer than the relay takes to read the table.
const TIME_FOR_A_MISTAKE: Duration = Duration::from_secs(1);

/// A database whose slot was lost, and which had events without records before.
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

/// A transaction that has its number.
async fn begin(database: &Database) -> (Client, String) {
    let client = harness::connect(&database.url).await;
    client.batch_execute("BEGIN").await.unwrap();
    let asking = client.query_one("SELECT pg_current_xact_id()::xid::text", &[]);
    let xid = asking.await.unwrap().get(0);
    (client, xid)
}

async fn wait_until_waited_for(database: &Database, xid: &str) {
    let waiting = format!(
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) \
         WHERE backend_type = 'walsender' AND NOT granted AND transactionid::text = '{xid}'"
    );
    eventually("the new slot waits for the transaction", || async {
        (database.number(&waiting).await == 1).then_some(())
    })
    .await;
}

/// A relay that makes a slot, in the second step of that, which ends when the returned transaction does.
/// The first ends after `rows`.
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

/// Rows of subtransactions may be above the `xmax` of the snapshot that shows them.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_subtransactions_that_a_new_slot_has_waited_for_are_delivered() {
    let (database, emulator) = without_slot().await;
    let rows = (1..=3).map(|n| format!("SAVEPOINT s; {} RELEASE s;", row(n)));
    let rows: String = rows.collect();
    let (relay, second) = in_the_second_step(&database, &emulator, &rows).await;
    // The log has no moment without a transaction, from which the slot could begin at once.
    let (third, _) = begin(&database).await;
    second.batch_execute("ROLLBACK").await.unwrap();
    relay.wait_for_log("recovered").await;
    third.batch_execute("ROLLBACK").await.unwrap();
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
}

/// The commit stands in the log, and waits for a standby that is not there. (The moment before it
/// stands in `pg_xact` too cannot be held.)
#[tokio::test(flavor = "multi_thread")]
async fn no_row_is_read_while_its_transaction_is_just_being_committed() {
    const STANDBY: &str = "ALTER SYSTEM SET synchronous_standby_names = 'nobody'";
    let (database, emulator) = without_slot().await;
    let (relay, second) = in_the_second_step(&database, &emulator, "").await;
    database.execute(STANDBY).await;
    database.execute("SELECT pg_reload_conf()").await;
    let committing = harness::connect(&database.url).await;
    // The first may be committed before the server has taken the setting in.
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
    eventually("a commit waits for the standby", || async {
        (database.number(waits).await == 1).then_some(())
    })
    .await;
    second.batch_execute("ROLLBACK").await.unwrap();
    relay.wait_for_log("just being committed").await;
    tokio::time::sleep(TIME_FOR_A_MISTAKE).await;
    let before = stored(&emulator).len();
    // By then only a standby can be what they wait for.
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
