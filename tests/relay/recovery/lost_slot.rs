//! Tests in which a slot is dropped, advanced, recreated or invalidated while no relay runs, while a
//! relay opens the slot, or while a relay runs.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_dropped_while_the_relay_was_down_loses_nothing() {
    let (database, emulator) = served_and_stopped().await;
    insert(&database, 201, 500).await;
    database.drop_slot().await;
    insert(&database, 701, 500).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("recovered").await;
    insert(&database, 1201, 300).await;
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    assert!(relay.log().contains("slot-missing"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_recreated_after_a_clean_stop_is_noticed() {
    let (database, emulator) = served_and_stopped().await;
    database.drop_slot().await;
    insert(&database, 201, 500).await;
    create_slot(&database).await;
    insert(&database, 701, 500).await;
    let relay = Relay::start(&database, &emulator);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    assert!(relay.log().contains("slot-recreated"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_advanced_by_somebody_else_is_noticed() {
    let (database, emulator) = served_and_stopped().await;
    insert(&database, 201, 500).await;
    let slot = database.slot();
    database
        .execute(&format!(
            "SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"
        ))
        .await;
    insert(&database, 701, 200).await;
    let relay = Relay::start(&database, &emulator);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    assert!(relay.log().contains("slot-recreated"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_recreated_after_a_crash_of_the_relay_loses_nothing() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 1, 200).await;
    database.wait_until_recorded().await;
    relay.kill_9();
    database.drop_slot().await;
    // Give these rows keys of their own. After a crash the audit delivers them while other rows are streamed,
    // so their order relative to these other rows is not fixed.
    database.execute(&insert_sql("gap", 201, 300)).await;
    create_slot(&database).await;
    insert(&database, 501, 200).await;
    let relay = Relay::start(&database, &emulator);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clean_stop_and_start_recovers_nothing() {
    let (database, emulator) = served_and_stopped().await;
    for round in 1..4 {
        insert(&database, round * 200 + 1, 200).await;
        let relay = Relay::start(&database, &emulator);
        database.wait_until_recorded().await;
        database.wait_until_confirmed().await;
        assert!(!relay.log().contains("recovering"), "{}", relay.log());
        relay.stop().await;
    }
    assert_eq!(emulator.journal().counts().stored_messages, 800);
}

/// Starts a server that invalidates a slot after a few megabytes of WAL.
pub(crate) fn impatient_server() -> ScratchPostgres {
    ScratchPostgres::builder()
        .initdb_arg("--wal-segsize=1")
        .setting("max_slot_wal_keep_size", "1MB")
        .setting("min_wal_size", "2MB")
        .setting("max_wal_size", "4MB")
        .start()
        .unwrap()
}

async fn impatient() -> Database {
    Database::on(impatient_server()).await
}

/// Writes WAL until the server invalidates the slot.
pub(crate) async fn invalidate_slot(database: &Database) {
    eventually("the slot is lost", || async {
        database
            .execute("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 900000))")
            .await;
        database.execute("CHECKPOINT").await;
        let lost = "SELECT count(*) FROM pg_replication_slots WHERE wal_status = 'lost'";
        (database.number(lost).await == 1).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalidated_slot_is_replaced() {
    let (database, emulator) = served_by(impatient().await).await;
    insert(&database, 201, 300).await;
    invalidate_slot(&database).await;
    insert(&database, 501, 200).await;
    let relay = Relay::start(&database, &emulator);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    assert!(relay.log().contains("slot-lost"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_invalidated_during_a_pubsub_outage_is_replaced_by_the_running_relay() {
    let database = impatient().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 1, 200).await;
    database.wait_until_recorded().await;
    let down = Fault::new(Action::Fail(Code::Unavailable));
    let down = emulator.faults().inject(down);
    insert(&database, 201, 300).await;
    relay.wait_for_log("pubsub-unreachable").await;
    invalidate_slot(&database).await;
    relay.wait_for_log("slot-lost").await;
    insert(&database, 501, 200).await;
    emulator.faults().lift(down);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

/// Opens a session that looks like the dispatch writer of another relay, and runs a long statement
/// in it. A relay that opens the slot waits until the statement ends or is cancelled.
async fn busy_writer(database: &Database) {
    let writer = harness::connect(&database.url).await;
    let name = format!(
        "SET application_name = 'postrider dispatch {}'",
        database.slot()
    );
    writer.batch_execute(&name).await.unwrap();
    tokio::spawn(async move { writer.batch_execute("SELECT pg_sleep(60)").await });
    eventually("the statement runs", || async {
        (database.number(&busy_writers(database)).await == 1).then_some(())
    })
    .await;
}

/// Starts a relay, and waits until it has read the state of the slot. The relay cannot open the slot
/// yet, because it waits for the statement of [`busy_writer`].
async fn opening_relay(database: &Database, emulator: &RunningEmulator) -> Relay {
    let host = emulator.addr().to_string();
    let patient = [
        ("POSTRIDER_WAL_SENDER_TIMEOUT_S", "200"),
        ("POSTRIDER_PUBLISH_TIMEOUT_S", "45"),
    ];
    let relay = Relay::start_with(database, &host, &patient);
    eventually("the relay waits for the other writer", || async {
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'postrider' \
             AND datname = current_database() AND query LIKE '%count(*) as sessions from%'";
        (database.number(waiting).await == 1).then_some(())
    })
    .await;
    relay
}

/// SQL that counts the running statements of [`busy_writer`].
fn busy_writers(database: &Database) -> String {
    format!(
        "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)' \
         AND state = 'active' AND application_name = 'postrider dispatch {}'",
        database.slot()
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_recreated_while_a_relay_opens_it_is_noticed_and_loses_nothing() {
    let (database, emulator) = served_and_stopped().await;
    insert(&database, 201, 100).await;
    busy_writer(&database).await;
    let relay = opening_relay(&database, &emulator).await;
    database.drop_slot().await;
    insert(&database, 301, 100).await;
    create_slot(&database).await;
    insert(&database, 401, 100).await;
    let cancel = busy_writers(&database).replace("count(*)", "pg_cancel_backend(pid)");
    database.execute(&cancel).await;
    relay
        .wait_for_log("the slot has changed while it was being opened")
        .await;
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    assert!(relay.log().contains("slot-recreated"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_dropped_while_a_relay_opens_it_is_noticed_and_loses_nothing() {
    let (database, emulator) = served_and_stopped().await;
    insert(&database, 201, 100).await;
    busy_writer(&database).await;
    let relay = opening_relay(&database, &emulator).await;
    database.drop_slot().await;
    let cancel = busy_writers(&database).replace("count(*)", "pg_cancel_backend(pid)");
    database.execute(&cancel).await;
    relay
        .wait_for_log("the slot has changed while it was being opened")
        .await;
    insert(&database, 301, 100).await;
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    assert!(relay.log().contains("slot-missing"), "{}", relay.log());
}
