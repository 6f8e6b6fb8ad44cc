//! Tests in which one value of a row is damaged on disk. The row goes to quarantine with PostgreSQL's
//! error as the reason, and all other keys continue: in a recovery, in an audit and in a release.

use std::io::Write;

use pubsub_emulator::RunningEmulator;
use scratch_postgres::StopMode;

use crate::harness::{self, Database, Relay, eventually};

const STATES: &str = "SELECT coalesce(string_agg(aggregateid || ' ' || state, ', ' \
                      ORDER BY aggregateid), '') \
                      FROM outbox.dispatch JOIN outbox.events ON id = event_id";

/// Starts a relay, and waits until it has delivered an event. From then on, PostgreSQL stores large
/// values of `payload` out of line.
async fn served() -> (Database, RunningEmulator, Relay) {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    database
        .execute("ALTER TABLE outbox.events ALTER COLUMN payload SET STORAGE EXTERNAL")
        .await;
    insert(&database, "before", "'{}'").await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    (database, emulator, relay)
}

async fn insert(database: &Database, key: &str, payload: &str) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
             VALUES ('order', '{key}', 'OrderPlaced', {payload})"
        ))
        .await;
}

/// Inserts one row for each of five keys. The payload of the row `bad` is stored out of line, and
/// is overwritten with zeros while the server is down.
async fn insert_around_damage(database: &mut Database) {
    for key in ["a", "b"] {
        insert(database, key, "'{}'").await;
    }
    insert(
        database,
        "bad",
        "jsonb_build_object('x', repeat('y', 30000))",
    )
    .await;
    for key in ["c", "d"] {
        insert(database, key, "'{}'").await;
    }
    let file = database
        .text(
            "SELECT pg_relation_filepath(reltoastrelid) FROM pg_class \
             WHERE oid = 'outbox.events'::regclass",
        )
        .await;
    database.execute("CHECKPOINT").await;
    let server = database.server();
    server.stop(StopMode::Fast, harness::PATIENCE).unwrap();
    let path = server.data_dir().join(file);
    let length = std::fs::metadata(&path).unwrap().len();
    assert!(length > 0, "the value is stored out of line");
    let mut file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all(&vec![0; length as usize]).unwrap();
    server.start_again().unwrap();
    database.reconnect().await;
}

async fn assert_only_the_bad_row_waits(database: &Database, relay: &Relay) {
    eventually("every event is recorded", || async {
        assert!(!relay.log().contains("error["), "{}", relay.log());
        let states = database.text(STATES).await;
        (states.matches(',').count() == 5).then_some(())
    })
    .await;
    assert_eq!(
        database.text(STATES).await,
        "a published, b published, bad quarantined, before published, c published, d published",
        "{}",
        relay.log()
    );
    let reason = "SELECT error FROM outbox.dispatch WHERE state = 'quarantined'";
    let reason = database.text(reason).await;
    assert!(
        reason.contains("payload") && reason.contains("missing chunk number"),
        "{reason}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_quarantines_a_damaged_row_and_a_release_reads_it_again() {
    let (mut database, emulator, relay) = served().await;
    relay.stop().await;
    insert_around_damage(&mut database).await;
    database.drop_slot().await;
    let relay = Relay::start(&database, &emulator);
    assert_only_the_bad_row_waits(&database, &relay).await;
    // Release the row, although its value is still damaged.
    database
        .execute(
            "UPDATE outbox.dispatch SET state = 'released', error = NULL \
             WHERE state = 'quarantined'",
        )
        .await;
    eventually("the row is in quarantine again", || async {
        let again = "SELECT count(*) FROM outbox.dispatch WHERE error IS NOT NULL";
        (database.number(again).await == 1).then_some(())
    })
    .await;
    assert_only_the_bad_row_waits(&database, &relay).await;
    insert(&database, "a", "'{}'").await;
    database.wait_until_recorded().await;
    relay.stop().await;
}

/// The relay crashes. The test inserts rows and advances the slot past them, so the stream leaves these rows out. A
/// crashed relay has not recorded its final position, so the next relay does not notice the advance. It streams
/// without a recovery, and finds the rows by its audit.
#[tokio::test(flavor = "multi_thread")]
async fn an_audit_quarantines_a_damaged_row_that_the_stream_left_out() {
    let (mut database, emulator, relay) = served().await;
    relay.kill_9();
    insert_around_damage(&mut database).await;
    let slot = database.slot().to_owned();
    eventually("the slot is free and advanced", || async {
        let advance = format!("SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())");
        database.client.batch_execute(&advance).await.ok()
    })
    .await;
    let relay = Relay::start(&database, &emulator);
    assert_only_the_bad_row_waits(&database, &relay).await;
    assert!(!relay.log().contains("recovering"), "{}", relay.log());
    relay.stop().await;
}
