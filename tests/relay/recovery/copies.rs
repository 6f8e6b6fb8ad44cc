//! Tests that a relay on a copy of the production database, with production's settings except
//! `DATABASE_URL`, does not publish production's events.

use super::*;

/// Prepares a production database with 50 undelivered events. A relay on a copy of this database finds
/// these events in the tables.
async fn production() -> (Database, RunningEmulator) {
    let (database, emulator) = served_by(Database::private().await).await;
    insert(&database, 201, 50).await;
    (database, emulator)
}

fn published(emulator: &RunningEmulator) -> usize {
    emulator.journal().attempts().len()
}

/// Starts a relay on the copy with the URL `copy`. Checks that the relay stops with the error `code` and
/// publishes nothing.
async fn assert_refused(
    production: &Database,
    emulator: &RunningEmulator,
    copy: &str,
    more: &[(&str, &str)],
    code: &str,
) {
    let before = published(emulator);
    let mut settings = vec![("DATABASE_URL", copy)];
    settings.extend(more);
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(production, &host, &settings);
    relay.wait_for_error(code).await;
    assert_eq!(relay.wait().await.code(), Some(3));
    assert_eq!(published(emulator), before);
}

/// Starts a standby server with a copy of production's files. The standby server has no slots, like a
/// copy made by `pg_basebackup`.
async fn standby_of(production: &mut Database) -> ScratchPostgres {
    let server = production.server();
    server.stop(StopMode::Fast, harness::PATIENCE).unwrap();
    let copy = ScratchPostgres::builder()
        .standby_of(server)
        .start()
        .unwrap();
    server.start_again().unwrap();
    production.reconnect().await;
    copy
}

/// Creates a standby server of production and promotes it. Also returns a connection to it.
async fn promoted_copy(production: &mut Database) -> (ScratchPostgres, tokio_postgres::Client) {
    let copy = standby_of(production).await;
    let client = harness::connect(&copy.url("postgres")).await;
    client
        .batch_execute("SELECT pg_promote(true)")
        .await
        .unwrap();
    (copy, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_on_a_standby_server_name_it_and_miss_no_slot_there() {
    let (mut database, _emulator) = production().await;
    let standby = standby_of(&mut database).await;
    let url = standby.url("postgres");
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_SLOT", database.slot()),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    for arguments in [
        &["status"][..],
        &["slot", "show"],
        &["slot", "list"],
        &["slot", "create", "--yes"],
        &["slot", "drop", "--yes"],
        &["slot", "advance", "--to", "0/FFFFFF0", "--yes"],
        &["audit"],
        &["replay", "--key", "o-1", "--dry-run"],
        &["prune", "--older-than", "1d", "--dry-run"],
    ] {
        let ran = harness::postrider(arguments, &environment).output();
        let said = String::from_utf8(ran.unwrap().stderr).unwrap();
        assert!(
            said.contains("error[postgres-standby]"),
            "{arguments:?}: {said}"
        );
    }
    let checked = harness::postrider(&["check"], &environment).output();
    let said = String::from_utf8(checked.unwrap().stdout).unwrap();
    assert!(said.contains("postgres-standby"), "{said}");
    assert!(!said.contains("create the slot"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_the_database_on_the_same_server_is_refused_even_if_the_slot_is_gone() {
    let (mut database, emulator) = production().await;
    let url = database.server().url("copy");
    let maintenance = database.server().socket_url("template1");
    // PostgreSQL cannot copy a database that other sessions use, so connect to another database.
    database.client = harness::connect(&maintenance).await;
    eventually("the database is copied", || async {
        let copying = database
            .client
            .batch_execute("CREATE DATABASE copy TEMPLATE postgres");
        copying.await.ok()
    })
    .await;
    database.reconnect().await;
    assert_refused(&database, &emulator, &url, &[], "foreign-cluster").await;
    database.drop_slot().await;
    assert_refused(&database, &emulator, &url, &[], "foreign-cluster").await;
    let other_slot = [("POSTRIDER_SLOT", "copy")];
    assert_refused(&database, &emulator, &url, &other_slot, "table-captured").await;

    // After `recover --adopt`, the relay is allowed to publish from the copy.
    let environment = [("DATABASE_URL", url.as_str()), ("POSTRIDER_SLOT", "copy")];
    let adopting = harness::postrider(&["recover", "--adopt", "--yes"], &environment);
    let adopted = { adopting }.output().unwrap();
    assert!(adopted.status.success(), "{adopted:?}");
    let host = emulator.addr().to_string();
    let settings = [("DATABASE_URL", url.as_str()), ("POSTRIDER_SLOT", "copy")];
    let relay = Relay::start_with(&database, &host, &settings);
    relay.wait_for_log("recovered").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renamed_database_is_the_same_database() {
    let (mut database, emulator) = production().await;
    let maintenance = database.server().socket_url("template1");
    database.client = harness::connect(&maintenance).await;
    eventually("the database is renamed", || async {
        let renaming = "ALTER DATABASE postgres RENAME TO shop";
        database.client.batch_execute(renaming).await.ok()
    })
    .await;
    database.url = database.server().url("shop");
    database.client = harness::connect(&database.url).await;
    let relay = Relay::start(&database, &emulator);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_copy_of_the_files_is_refused_if_a_lost_slot_stops_the_relay() {
    let (mut database, emulator) = production().await;
    let (copy, _client) = promoted_copy(&mut database).await;
    let stops = [("POSTRIDER_SLOT_ON_LOSS", "stop")];
    let url = copy.url("postgres");
    assert_refused(&database, &emulator, &url, &stops, "slot-missing").await;
    let relay = Relay::start(&database, &emulator);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

/// The statement in docs/how-to/operations.md that marks a copy.
fn fence() -> String {
    let page = include_str!("../../../docs/how-to/operations.md");
    let from = page.find("UPDATE outbox.relay").unwrap();
    let statement = &page[from..];
    statement[..=statement.find(';').unwrap()].to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_the_files_marked_as_a_copy_is_refused_with_any_settings() {
    let (mut database, emulator) = production().await;
    let (copy, client) = promoted_copy(&mut database).await;
    client.batch_execute(&fence()).await.unwrap();
    let url = copy.url("postgres");
    assert_refused(&database, &emulator, &url, &[], "foreign-cluster").await;
}
