//! Tests in which the publication is dropped and recreated, or gets another table. The relay must lose no
//! event.

use super::*;

/// PostgreSQL 14 to 17 cannot decode past a row that was inserted while the publication did not exist.
/// PostgreSQL 18 skips such a row. On all versions, the relay must find the row in its table.
#[tokio::test(flavor = "multi_thread")]
async fn dropping_and_recreating_the_publication_loses_no_event() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 100, 5).await;
    // Wait until the relay streams, because a relay that finds no publication at startup exits.
    relay.wait_for_log("streaming").await;
    database.execute(DROP).await;
    insert_gap(&database, 50).await;
    database.execute(CREATE).await;
    insert(&database, "later", 100).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_older_than_its_publication_loses_no_event() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 10, 2).await;
    database.wait_until_audited().await;
    relay.stop().await;
    database.execute(DROP).await;
    insert_gap(&database, 50).await;
    database.execute(CREATE).await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn adding_a_table_with_old_rows_delivers_only_its_new_rows() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    database.wait_until_audited().await;
    relay.stop().await;
    database
        .execute(
            "CREATE TABLE older (LIKE outbox.events INCLUDING ALL); \
             INSERT INTO older (aggregatetype, aggregateid, event_type) \
                 SELECT 'order', 'old', 'OrderPlaced' FROM generate_series(1, 100); \
             ALTER PUBLICATION postrider ADD TABLE older",
        )
        .await;
    database
        .execute(
            "INSERT INTO older (aggregatetype, aggregateid, event_type) \
             VALUES ('order', 'new', 'OrderPlaced')",
        )
        .await;
    let file = tempfile::NamedTempFile::new().unwrap();
    let tables = "[[tables]]\n[[tables]]\ntable = 'public.older'\n";
    std::fs::write(file.path(), tables).unwrap();
    let path = file.path().display().to_string();
    let addr = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_CONFIG", &path)]);
    eventually("each new row of both tables has a record", || async {
        let records = "SELECT count(*) FROM outbox.dispatch";
        (database.number(records).await == 21).then_some(())
    })
    .await;
    assert_eq!(emulator.journal().counts().stored_messages, 21);
    relay.stop().await;
}
