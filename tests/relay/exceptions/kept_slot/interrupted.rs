//! Tests a recovery that keeps the slot and is interrupted, or during which the publication changes again.

use super::*;

/// The relay reads rows from the table, and is killed before it has published them. Then some of the
/// rows are deleted, so only the slot still has them.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_deleted_in_the_middle_of_a_recovery_are_delivered_after_kill_9() {
    let (database, emulator, relay) = after_some_events(50).await;
    relay.stop().await;
    let mut inserted = Inserted::default();
    insert(&database, 51, 100).await;
    inserted.note(&database).await;
    database.execute(OUT).await;
    database.execute(IN).await;
    for round in 0..3 {
        emulator.faults().refuse_connections(true);
        let relay = start(&database, &emulator);
        relay.wait_for_log("finished reading the table").await;
        insert(&database, 201 + round * 100, 50).await;
        inserted.note(&database).await;
        relay.wait_for_log("pubsub-unreachable").await;
        relay.kill_9();
        harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
        let delete = format!("DELETE FROM outbox.events WHERE version % 4 = {round}");
        database.execute(&delete).await;
        emulator.faults().refuse_connections(false);
    }
    let relay = start(&database, &emulator);
    inserted.arrive_in_order(&database, &emulator, &relay).await;
    assert_kept(&relay);
}

/// A relay that stops cleanly during the recovery must not confirm the rows that it has skipped in the
/// stream, because their copies from the table are not published yet.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_deleted_after_a_clean_stop_in_a_recovery_are_delivered() {
    let (database, emulator, relay) = after_some_events(50).await;
    relay.stop().await;
    let mut inserted = Inserted::default();
    let waiting = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
                   SELECT 'nowhere', 'n-1', 'Waits', n, '{}' FROM generate_series(61, 80) n";
    database.execute(waiting).await;
    insert(&database, 141, 50).await;
    database.execute(GRANT).await;
    let relay = start(&database, &emulator);
    relay.wait_for_log("topic-missing").await;
    // Wait until the relay has read past the waiting rows in the stream. The relay has done so once it
    // delivers a row that was inserted later.
    inserted.note(&database).await;
    insert(&database, 191, 1).await;
    let newest = "SELECT id::text FROM outbox.events WHERE version = 191";
    let newest = database.text(newest).await;
    eventually("a later row is delivered", || async {
        stored(&emulator).contains(&newest).then_some(())
    })
    .await;
    relay.stop().await;
    database.execute(TRUNCATE).await;
    let topic = "projects/demo/topics/nowhere.events";
    emulator.create_topic(topic).await.unwrap();
    let _relay = start(&database, &emulator);
    inserted.wait_until_delivered(&database, &emulator).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_change_during_a_recovery_loses_nothing() {
    let (database, emulator, relay) = after_some_events(50).await;
    relay.stop().await;
    let mut inserted = Inserted::default();
    insert(&database, 51, 50).await;
    database.execute(GRANT).await;
    emulator.faults().refuse_connections(true);
    let relay = start(&database, &emulator);
    relay.wait_for_log("finished reading the table").await;
    insert(&database, 101, 50).await;
    inserted.note(&database).await;
    database.execute(OUT).await;
    // These rows have keys of their own, because the relay publishes them after later rows of the stream,
    // which would break the order of a shared key.
    database.execute(&insert_sql("gap", 151, 50)).await;
    database.execute(IN).await;
    database.execute(DELETE).await;
    insert(&database, 201, 50).await;
    emulator.faults().refuse_connections(false);
    inserted.wait_until_delivered(&database, &emulator).await;
    eventually("the relay has recovered twice", || async {
        (relay.log().matches(KEEPS).count() == 2).then_some(())
    })
    .await;
    inserted.arrive_in_order(&database, &emulator, &relay).await;
}

/// A recovery is interrupted, and begins again while a transaction is open. `begin` is the SQL that begins this
/// transaction. The transaction has inserted a row before the table was published again, so the stream leaves out the
/// row. The relay must wait until the transaction has ended, and then read the row from the table.
///
/// The open transaction is the youngest one of the test. So its id, or the id of its subtransaction, is higher than
/// all others. The relay must not overlook such a transaction.
async fn an_interrupted_recovery_waits_for(begin: &str) {
    let (database, emulator, relay) = after_some_events(50).await;
    relay.stop().await;
    let mut inserted = Inserted::default();
    insert(&database, 51, 50).await;
    inserted.note(&database).await;
    database.execute(GRANT).await;
    emulator.faults().refuse_connections(true);
    let relay = start(&database, &emulator);
    relay.wait_for_log("finished reading the table").await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    emulator.faults().refuse_connections(false);
    database.execute(OUT).await;
    let publisher = harness::connect(&database.url).await;
    publisher
        .batch_execute(&format!("BEGIN; {IN}"))
        .await
        .unwrap();
    let service = harness::connect(&database.url).await;
    let late = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
                VALUES ('order', 'late', 'OrderPlaced', 301, '{}')";
    service
        .batch_execute(&format!("{begin}; {late}"))
        .await
        .unwrap();
    publisher.batch_execute("COMMIT").await.unwrap();
    let relay = start(&database, &emulator);
    relay
        .wait_for_log("waits for transactions that were open")
        .await;
    service.batch_execute("COMMIT").await.unwrap();
    inserted.note(&database).await;
    inserted.wait_until_delivered(&database, &emulator).await;
    assert_kept(&relay);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_recovery_waits_for_the_youngest_open_transaction() {
    an_interrupted_recovery_waits_for("BEGIN").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_recovery_waits_for_the_youngest_open_subtransaction() {
    an_interrupted_recovery_waits_for("BEGIN; SAVEPOINT a").await;
}
