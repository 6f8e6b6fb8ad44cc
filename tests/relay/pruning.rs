//! The pruning statements of docs/how-to/operations.md: they delete in steps, while the relay runs,
//! and delete no undelivered event.

use pubsub_emulator::RunningEmulator;

use crate::exceptions::{BAD, poison, stored, wait_until_vouched};
use crate::harness::{self, Database, Relay, eventually};

/// More rows than one step of a statement deletes.
const OLD: u32 = 12_000;

/// The statement in the docs page that contains these words.
fn documented(words: &str) -> &'static str {
    let page = include_str!("../../docs/how-to/operations.md");
    let blocks = page.split("```sql\n").skip(1);
    let mut statements = blocks.filter_map(|block| block.split("```").next());
    statements
        .find(|sql| sql.starts_with("DELETE FROM outbox.") && sql.contains(words))
        .unwrap()
}

async fn insert(database: &Database, count: u32, key: &str, age: &str) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, occurred_at) \
             SELECT 'order', '{key}-' || i % 50, 'OrderPlaced', '{{}}', now() - interval '{age}' \
             FROM generate_series(1, {count}) i"
        ))
        .await;
}

async fn wait_until_stored(emulator: &RunningEmulator, count: u32) {
    eventually("everything is stored", || async {
        (stored(emulator).len() == count as usize).then_some(())
    })
    .await;
}

/// Checks that it prunes old delivered rows, but neither an old row that waits in quarantine nor
/// new rows.
async fn prunes_what_is_delivered(dispatch: &str, statement: &str) {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    let host = emulator.addr().to_string();
    let run = || Relay::start_with(&database, &host, &[("POSTRIDER_DISPATCH", dispatch)]);
    let relay = run();
    insert(&database, OLD, "o", "8 days").await;
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, payload, occurred_at) \
             VALUES ('{BAD}', 'order', 'bad', 'Bad', '{{}}', now() - interval '8 days')"
        ))
        .await;
    wait_until_stored(&emulator, OLD).await;
    database.wait_until_confirmed().await;
    database
        .execute("UPDATE outbox.dispatch SET dispatched_at = now() - interval '8 days'")
        .await;
    insert(&database, 100, "new", "1 hour").await;
    wait_until_stored(&emulator, OLD + 100).await;
    database.wait_until_confirmed().await;
    if dispatch == "exceptions" {
        wait_until_vouched(&database).await;
    }

    let mut steps = Vec::new();
    while steps.last() != Some(&0) {
        steps.push(database.client.execute(statement, &[]).await.unwrap());
    }
    assert_eq!(steps, [10_000, u64::from(OLD) - 10_000, 0]);
    let left = "SELECT string_agg(DISTINCT split_part(aggregateid, '-', 1), ' ') || count(*) \
                FROM outbox.events";
    assert_eq!(database.text(left).await, "bad new101");

    insert(&database, 100, "after", "0").await;
    wait_until_stored(&emulator, OLD + 200).await;
    relay.stop().await;
    let before = emulator.journal().counts().stored_messages;
    let relay = run();
    insert(&database, 100, "later", "0").await;
    wait_until_stored(&emulator, OLD + 300).await;
    relay.stop().await;
    let after = emulator.journal().counts().stored_messages;
    assert_eq!(after, before + 100, "nothing is sent again");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_statement_prunes_in_steps_and_keeps_waiting_events() {
    prunes_what_is_delivered("full", documented("d.dispatched_at")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_records_the_documented_statement_prunes_in_steps_and_keeps_quarantined_events() {
    prunes_what_is_delivered("exceptions", documented("c.floor")).await;
}

/// A missing topic holds back the confirmed position while other topics continue. The records of
/// those topics keep a restart from publishing their events again.
#[tokio::test(flavor = "multi_thread")]
async fn records_behind_the_confirmed_position_outlive_pruning_and_a_restart_repeats_nothing() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let run = || Relay::start_with(&database, &host, &[]);
    let relay = run();
    insert(&database, 300, "early", "0").await;
    wait_until_stored(&emulator, 300).await;
    database.wait_until_confirmed().await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
             VALUES ('nowhere', 'n-1', 'Lost', '{}')",
        )
        .await;
    insert(&database, 300, "late", "0").await;
    wait_until_stored(&emulator, 600).await;
    let recorded = "SELECT count(*) FROM outbox.dispatch WHERE state = 'published'";
    eventually("everything published is recorded", || async {
        (database.number(recorded).await == 600).then_some(())
    })
    .await;
    // Everything published is pruned, and a month passes.
    database
        .execute(
            "DELETE FROM outbox.events WHERE aggregatetype = 'order'; \
             UPDATE outbox.dispatch SET dispatched_at = now() - interval '31 days'",
        )
        .await;
    let prune = documented("s.confirmed_flush_lsn").replace("postrider", database.slot());
    assert_eq!(database.client.execute(&prune, &[]).await.unwrap(), 300);
    assert_eq!(database.client.execute(&prune, &[]).await.unwrap(), 0);
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    let relay = run();
    relay.wait_for_log("streaming").await;
    let topic = "projects/demo/topics/nowhere.events";
    emulator.create_topic(topic).await.unwrap();
    wait_until_stored(&emulator, 601).await;
    relay.stop().await;
    let messages = emulator.journal().counts().stored_messages;
    assert_eq!(messages, 601, "nothing is sent again");
}
