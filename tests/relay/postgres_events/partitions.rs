//! Tests in which a partition is attached while the relay runs.

use super::*;

/// Creates the table `outbox.parted`, whose only partition is for the versions 0 to 99. Starts a relay that
/// captures this table, and waits until the relay streams.
async fn start_parted(database: &Database, emulator: &RunningEmulator) -> Relay {
    database
        .execute(
            "CREATE TABLE outbox.parted (id uuid DEFAULT gen_random_uuid(), aggregatetype text, \
                 aggregateid text, event_type text, version bigint, schema_version int DEFAULT 1, \
                 payload jsonb, headers jsonb, occurred_at timestamptz DEFAULT clock_timestamp()) \
                 PARTITION BY RANGE (version); \
             CREATE TABLE outbox.parted_1 PARTITION OF outbox.parted FOR VALUES FROM (0) TO (100); \
             GRANT SELECT ON outbox.parted TO postrider_relay; \
             ALTER PUBLICATION postrider SET TABLE outbox.parted",
        )
        .await;
    let relay = relay_of_parted(database, emulator);
    relay.wait_for_log("streaming").await;
    relay
}

fn relay_of_parted(database: &Database, emulator: &RunningEmulator) -> Relay {
    let host = emulator.addr().to_string();
    Relay::start_with(database, &host, &[("POSTRIDER_TABLE", "outbox.parted")])
}

const CREATE_SECOND: &str = "CREATE TABLE outbox.parted_2 (LIKE outbox.parted INCLUDING DEFAULTS);";
const ATTACH_SECOND: &str = "ALTER TABLE outbox.parted \
     ATTACH PARTITION outbox.parted_2 FOR VALUES FROM (100) TO (200);";

/// SQL that inserts rows with the versions `from` to `to`.
fn insert_parted(table: &str, from: u32, to: u32) -> String {
    format!(
        "INSERT INTO outbox.{table} (aggregatetype, aggregateid, event_type, version, payload) \
         SELECT 'order', 'o-1', 'OrderPlaced', i, '{{}}' FROM generate_series({from}, {to}) i;"
    )
}

async fn wait_for_100_records(database: &Database) {
    eventually("rows of both partitions are recorded", || async {
        let recorded = "SELECT count(*) FROM outbox.dispatch WHERE state = 'published'";
        (database.number(recorded).await == 100).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_attached_while_the_relay_runs_is_delivered() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = start_parted(&database, &emulator).await;
    database.execute(&insert_parted("parted", 0, 49)).await;
    let insert = insert_parted("parted", 100, 149);
    database
        .execute(&[CREATE_SECOND, ATTACH_SECOND, &insert].concat())
        .await;
    wait_for_100_records(&database).await;
    // Message ids grow in the order in which messages are stored, so sort by message id.
    let row = database
        .client
        .query_one(
            "SELECT array_agg(p.version ORDER BY d.message_id::bigint) \
             FROM outbox.dispatch d JOIN outbox.parted p ON p.id = d.event_id",
            &[],
        )
        .await
        .unwrap();
    let versions: Vec<i64> = row.get(0);
    assert_eq!(versions, (0..50).chain(100..150).collect::<Vec<i64>>());
    assert_eq!(emulator.journal().counts().stored_messages, 100);
    assert!(!relay.log().contains("error["), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_in_a_partition_before_it_is_attached_are_delivered_from_the_table() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = start_parted(&database, &emulator).await;
    database.execute(&insert_parted("parted", 0, 49)).await;
    database.wait_until_audited().await;
    database.execute(CREATE_SECOND).await;
    database.execute(&insert_parted("parted_2", 100, 149)).await;
    database.execute(ATTACH_SECOND).await;
    // Restart the relay, because a starting relay audits the new partition at once. A running relay
    // takes up to five minutes.
    relay.stop().await;
    let relay = relay_of_parted(&database, &emulator);
    wait_for_100_records(&database).await;
    assert_eq!(emulator.journal().counts().stored_messages, 100);
    relay.wait_for_log("publication-gap").await;
}

/// Attaches a foreign table, which reads its rows from a file on the server. The test replaces `INSERTS` with a
/// statement that inserts the rows into `outbox.cold`. The SQL after `INSERTS` copies the rows to the file.
const ATTACH_FOREIGN: &str = "\
    CREATE TABLE outbox.cold (LIKE outbox.parted INCLUDING DEFAULTS); INSERTS \
    CREATE EXTENSION file_fdw; CREATE SERVER files FOREIGN DATA WRAPPER file_fdw; \
    DO $$ DECLARE file text := current_setting('data_directory') || '/cold'; BEGIN \
        EXECUTE format('COPY outbox.cold TO %L', file); \
        EXECUTE format('CREATE FOREIGN TABLE outbox.parted_2 PARTITION OF outbox.parted \
            FOR VALUES FROM (100) TO (200) SERVER files OPTIONS (filename %L)', file); \
    END $$";

const DETACH_AND_COPY: &str = "\
    ALTER TABLE outbox.parted DETACH PARTITION outbox.parted_2; \
    CREATE TABLE outbox.parted_3 (LIKE outbox.parted INCLUDING ALL); \
    INSERT INTO outbox.parted_3 SELECT * FROM outbox.parted_2; \
    ALTER TABLE outbox.parted ATTACH PARTITION outbox.parted_3 FOR VALUES FROM (100) TO (200)";

const ATTACH_UNLOGGED: &str = "\
    CREATE UNLOGGED TABLE outbox.parted_2 PARTITION OF outbox.parted FOR VALUES FROM (100) TO (200); INSERTS";

/// Attaches a partition whose 50 rows PostgreSQL does not stream. Checks that the rows are delivered if an operator
/// follows the relay's hints.
///
/// - `attach`: SQL that attaches the partition. In place of `INSERTS`, it inserts the rows into the table `into`.
/// - `hints`: the texts that the relay must log.
/// - `repair`: SQL that does what the hints say.
async fn hint_is_followed(
    dispatch: &str,
    (attach, into): (&str, &str),
    hints: &[&str],
    repair: &str,
) {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    start_parted(&database, &emulator).await.stop().await;
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("POSTRIDER_SLOT", database.slot()),
        ("POSTRIDER_TABLE", "outbox.parted"),
    ];
    let init = harness::postrider(&["init", "--apply"], &environment).output();
    assert!(init.unwrap().status.success());
    let host = emulator.addr().to_string();
    let settings = [
        ("POSTRIDER_TABLE", "outbox.parted"),
        ("POSTRIDER_DISPATCH", dispatch),
    ];
    let relay = Relay::start_with(&database, &host, &settings);
    relay.wait_for_log("streaming").await;
    database.execute(&insert_parted("parted", 0, 49)).await;
    stored(&emulator, 50).await;
    database.wait_until_audited().await;
    let inserts = insert_parted(into, 100, 149);
    database.execute(&attach.replace("INSERTS", &inserts)).await;
    for hint in hints {
        relay.wait_for_log(hint).await;
    }
    database.execute(repair).await;
    stored(&emulator, 100).await;
    relay.stop().await;
}

/// Waits until this many different events are stored.
async fn stored(emulator: &RunningEmulator, events: usize) {
    eventually("all rows are published", || async {
        let attempts = emulator.journal().attempts();
        let stored = attempts.iter().filter(|attempt| attempt.is_stored());
        let ids = stored.flat_map(|attempt| attempt.event_ids.iter().flatten());
        let ids: std::collections::BTreeSet<_> = ids.collect();
        (ids.len() == events).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_foreign_partition_are_delivered_if_the_hint_is_followed() {
    let hints = [
        "alter table outbox.parted detach partition outbox.parted_2; create an ordinary table",
        "copy the rows of outbox.parted_2 into it with every column, also inserted_xid and seq",
    ];
    for dispatch in ["full", "exceptions"] {
        hint_is_followed(dispatch, (ATTACH_FOREIGN, "cold"), &hints, DETACH_AND_COPY).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_an_unlogged_partition_are_delivered_if_the_hint_is_followed() {
    let repair = "alter table outbox.parted_2 set logged";
    for dispatch in ["full", "exceptions"] {
        hint_is_followed(dispatch, (ATTACH_UNLOGGED, "parted"), &[repair], repair).await;
    }
}
