//! Tests with `dispatch = exceptions` in which the publication leaves rows out for a while, or names a
//! whole schema instead of the table.

use std::io::Write;

use super::{
    after_some_events, assert_whole_and_in_order, insert, insert_sql, rows, start, start_with,
    stored, wait_until_delivered, wait_until_vouched,
};
use crate::harness::{self, Database, Relay, eventually};

const OUT: &str = "ALTER PUBLICATION postrider DROP TABLE outbox.events";
const IN: &str = "ALTER PUBLICATION postrider ADD TABLE outbox.events";

/// The gap may open and close between two checks of the publication. The relay must deliver the rows even
/// if neither check sees the gap.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_publication_gap_are_delivered_by_a_running_relay() {
    let (database, emulator, relay) = after_some_events(300).await;
    for round in 0..2 {
        database.execute(OUT).await;
        let gap = format!("gap{round}");
        database.execute(&insert_sql(&gap, 1, 50)).await;
        database.execute(IN).await;
        insert(&database, 1_000 + round * 300, 300).await;
        wait_until_delivered(&database, &emulator, &relay).await;
        assert_whole_and_in_order(&database, &emulator, &relay).await;
    }
    assert!(relay.log().contains("publication-gap"), "{}", relay.log());
    assert_eq!(rows(&database, "published").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_gap_made_while_no_relay_ran_are_delivered_in_order() {
    let (database, emulator, relay) = after_some_events(300).await;
    relay.stop().await;
    database.execute(OUT).await;
    insert(&database, 301, 100).await;
    database.execute(IN).await;
    insert(&database, 401, 100).await;
    let relay = start(&database, &emulator);
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
    assert!(
        relay.log().contains("publication-changed"),
        "{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_renamed_for_a_while_loses_nothing() {
    let (database, emulator, relay) = after_some_events(100).await;
    relay.stop().await;
    let row = "INSERT INTO outbox.away (aggregatetype, aggregateid, event_type, version, \
               occurred_at) VALUES ('order', 'o-1', 'OrderPlaced', 201, clock_timestamp())";
    for sql in [
        "ALTER TABLE outbox.events RENAME TO away",
        row,
        "ALTER TABLE outbox.away RENAME TO events",
    ] {
        database.execute(sql).await;
    }
    let relay = start(&database, &emulator);
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publication_for_all_tables_in_a_schema_is_refused() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let version = "SELECT current_setting('server_version_num')::bigint";
    if database.number(version).await < 150_000 {
        return;
    }
    database
        .execute(
            "ALTER PUBLICATION postrider DROP TABLE outbox.events; \
             ALTER PUBLICATION postrider ADD TABLES IN SCHEMA outbox",
        )
        .await;
    let relay = start(&database, &emulator);
    relay.wait_for_error("publication-drift").await;
    assert!(
        relay.log().contains("only through its schema"),
        "{}",
        relay.log()
    );
    assert!(!relay.wait().await.success());
}

/// The settings change to a table that has nothing to do with the captured table. The rows of the new
/// table are captured from the moment when the table is published.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_table_that_replaces_the_captured_one_in_the_publication_are_delivered() {
    let (database, emulator, relay) = after_some_events(20).await;
    wait_until_vouched(&database).await;
    relay.stop().await;
    for sql in [
        "CREATE TABLE public.later (LIKE outbox.events INCLUDING ALL)",
        "ALTER PUBLICATION postrider SET TABLE public.later",
        "INSERT INTO public.later (aggregatetype, aggregateid, event_type, payload) \
         SELECT 'order', 'later', 'OrderPlaced', '{}' FROM generate_series(1, 10)",
    ] {
        database.execute(sql).await;
    }
    let mut settings = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    settings
        .write_all(b"[[tables]]\ntable = \"public.later\"\n")
        .unwrap();
    let path = settings.path().display().to_string();
    let relay = start_with(&database, &emulator, &[("POSTRIDER_CONFIG", &path)]);
    let later = "SELECT id::text FROM public.later";
    let rows = database.client.query(later, &[]).await.unwrap();
    let ids: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    eventually("every row of the new table is delivered", || async {
        let stored = stored(&emulator);
        ids.iter().all(|id| stored.contains(id)).then_some(())
    })
    .await;
    relay.stop().await;
}

/// A second relay starts with a wrong setting, as can happen in a deployment, and exits. The first relay has
/// the right publication, so it has nothing to recover.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_with_a_wrong_publication_does_not_disturb_the_first() {
    let (database, emulator, relay) = after_some_events(100).await;
    let host = emulator.addr().to_string();
    let wrong = [("POSTRIDER_PUBLICATION", "misspelt")];
    let second = Relay::start_with(&database, &host, &wrong);
    second.wait_for_error("publication-missing").await;
    assert_eq!(second.wait().await.code(), Some(3));
    let noted = "SELECT count(*) FROM outbox.relay WHERE audited_publication = ''";
    assert_eq!(database.number(noted).await, 0);
    insert(&database, 101, 100).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
    assert!(!relay.log().contains("recovering"), "{}", relay.log());
}
