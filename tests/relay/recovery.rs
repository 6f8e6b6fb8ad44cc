//! The slot is lost, made anew, or was never there, and nothing is lost with it: the rows without
//! a record come from the tables, each key in its order, and then the stream goes on.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use pubsub_emulator::{Action, Fault, RunningEmulator};
use scratch_postgres::{ScratchPostgres, StopMode};

use tonic::Code;

use crate::harness::{self, Database, Relay, eventually, insert_orders};

/// Inserts events with the versions `first..first + count`, one transaction each, over 7 keys.
/// Versions never repeat: they are what a key is ordered by when it comes from the table.
async fn insert(database: &Database, first: u32, count: u32) {
    database.execute(&insert_sql("o", first, count)).await;
}

fn insert_sql(key: &str, first: u32, count: u32) -> String {
    format!(
        "DO $$ BEGIN FOR i IN {first}..{last} LOOP \
         INSERT INTO outbox.events \
             (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
         VALUES ('order', '{key}-' || (i % 7), 'OrderPlaced', i, \
                 jsonb_build_object('n', i), clock_timestamp()); \
         COMMIT; END LOOP; END $$",
        last = first + count - 1
    )
}

/// Makes a slot at the end of the WAL, as if it had always been there.
async fn create_slot(database: &Database) {
    let slot = database.slot();
    database
        .execute(&format!(
            "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
        ))
        .await;
}

/// 200 events delivered by a relay that was then stopped in good order.
async fn served_and_stopped() -> (Database, RunningEmulator) {
    served_by(Database::start().await).await
}

async fn served_by(database: Database) -> (Database, RunningEmulator) {
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 1, 200).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    (database, emulator)
}

async fn recorded(database: &Database) -> i64 {
    database
        .number("SELECT count(*) FROM outbox.dispatch")
        .await
}

async fn wait_until_recovered(database: &Database) {
    eventually("the mark of the recovery is gone", || async {
        let marked = "SELECT count(*) FROM outbox.relay WHERE recovering IS NOT NULL";
        (database.number(marked).await == 0).then_some(())
    })
    .await;
}

/// Everything has come once, but for what a lost slot cut short, in order, and the relay streams.
async fn assert_nothing_is_lost_or_repeated(
    database: &Database,
    emulator: &RunningEmulator,
    relay: &Relay,
) {
    database.wait_until_recorded().await;
    wait_until_recovered(database).await;
    database.wait_until_confirmed().await;
    let report = harness::check(database, emulator).await;
    let once = report.duplicates.is_empty() || relay.has_lost_its_slot();
    assert!(report.is_clean() && once, "{report}\n{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_was_dropped_while_the_relay_was_down_costs_nothing() {
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
async fn a_slot_that_was_dropped_and_made_again_after_a_clean_stop_is_noticed() {
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
async fn a_slot_that_was_advanced_behind_our_back_is_noticed() {
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
async fn a_slot_that_was_made_again_after_a_crash_of_the_relay_loses_nothing() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 1, 200).await;
    database.wait_until_recorded().await;
    relay.kill_9();
    database.drop_slot().await;
    // Of their own keys: after a crash the loss is found by the audit, beside the stream.
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

/// A server that gives a slot up soon.
async fn impatient() -> Database {
    let server = ScratchPostgres::builder()
        .initdb_arg("--wal-segsize=1")
        .setting("max_slot_wal_keep_size", "1MB")
        .setting("min_wal_size", "2MB")
        .setting("max_wal_size", "4MB")
        .start()
        .unwrap();
    Database::on(server).await
}

/// Writes log until the server gives the slot up.
async fn make_it_give_up(database: &Database) {
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
async fn a_slot_that_the_server_has_given_up_is_replaced() {
    let (database, emulator) = served_by(impatient().await).await;
    insert(&database, 201, 300).await;
    make_it_give_up(&database).await;
    insert(&database, 501, 200).await;
    let relay = Relay::start(&database, &emulator);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    assert!(relay.log().contains("slot-lost"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_the_server_gives_up_while_pubsub_is_down_is_replaced_by_the_running_relay() {
    let database = impatient().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 1, 200).await;
    database.wait_until_recorded().await;
    let down = Fault::new(Action::Fail(Code::Unavailable));
    let down = emulator.faults().inject(down);
    insert(&database, 201, 300).await;
    relay.wait_for_log("pubsub-unreachable").await;
    make_it_give_up(&database).await;
    relay.wait_for_log("slot-lost").await;
    insert(&database, 501, 200).await;
    emulator.faults().lift(down);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_start_with_all_delivers_what_is_in_the_table_while_writers_go_on() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    database.drop_slot().await;
    insert(&database, 1, 4_000).await;
    // So that the seam lasts for a while.
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(30))).times(200));
    let writers: Vec<_> = ["a", "b", "o"]
        .map(|key| {
            let url = database.url.clone();
            tokio::spawn(async move {
                let client = harness::connect(&url).await;
                for first in 0..12 {
                    let sql = insert_sql(key, 4_001 + first * 100, 100);
                    client.batch_execute(&sql).await.unwrap();
                }
            })
        })
        .into();
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_START", "all")]);
    for writer in writers {
        writer.await.unwrap();
    }
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    assert!(relay.log().contains("first-start"), "{}", relay.log());
    relay.stop().await;
    // The second start is not the first.
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_START", "all")]);
    relay.wait_for_log("streaming").await;
    assert!(!relay.log().contains("recovering"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_known_by_a_number_are_recovered_by_it() {
    let database = Database::start().await;
    database
        .execute(
            "CREATE TABLE public.jobs (seq bigserial PRIMARY KEY, kind text NOT NULL, \
                 owner text, job text, payload json); \
             ALTER PUBLICATION postrider SET TABLE public.jobs",
        )
        .await;
    let emulator = harness::emulator().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("postrider.toml");
    std::fs::write(
        &file,
        "[[tables]]\ntable = \"public.jobs\"\ncolumns = { id = \"seq\", aggregatetype = \"kind\", \
         aggregateid = \"owner\", event_type = \"job\" }\n",
    )
    .unwrap();
    let more = [("POSTRIDER_CONFIG", file.to_str().unwrap())];
    let host = emulator.addr().to_string();
    let insert = "INSERT INTO public.jobs (kind, owner, job, payload) \
                  SELECT 'order', 'k-' || n % 5, 'Job', '{}' FROM generate_series(1, 400) n";
    let recorded = "SELECT count(*) FROM public.jobs j JOIN outbox.dispatch d \
                    ON d.event_id = outbox.event_uuid('public.jobs', j.seq::text)";
    let relay = Relay::start_with(&database, &host, &more);
    database.execute(insert).await;
    let all_recorded = async |count| {
        eventually("the jobs are recorded", || async {
            (database.number(recorded).await == count).then_some(())
        })
        .await;
    };
    all_recorded(400).await;
    relay.stop().await;
    database.drop_slot().await;
    database.execute(insert).await;
    let relay = Relay::start_with(&database, &host, &more);
    all_recorded(800).await;
    wait_until_recovered(&database).await;
    assert_eq!(emulator.journal().counts().stored_messages, 800);
    for attempt in emulator.journal().attempts() {
        let ids = attempt.event_ids.iter().flatten();
        let numbers: Vec<u32> = ids
            .map(|id| id.rsplit(':').next().unwrap().parse().unwrap())
            .collect();
        assert!(numbers.is_sorted(), "{numbers:?}\n{}", relay.log());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_without_a_version_are_recovered_in_the_order_of_commits_where_the_server_keeps_it() {
    let server = ScratchPostgres::builder()
        .setting("track_commit_timestamp", "on")
        .start()
        .unwrap();
    let (database, emulator) = served_by(Database::on(server).await).await;
    database.drop_slot().await;
    let id = |n: u32| format!("00000000-0000-4000-8000-00000000000{n}");
    let insert_one = |n: u32| {
        format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type) \
             VALUES ('{}', 'order', 'interleaved', 'Happened')",
            id(n)
        )
    };
    let slow = harness::connect(&database.url).await;
    slow.batch_execute("BEGIN").await.unwrap();
    for n in [1, 3] {
        slow.batch_execute(&insert_one(n)).await.unwrap();
        // Committed before it, though inserted after it, and at a later time by its column.
        database.execute(&insert_one(n + 1)).await;
    }
    slow.batch_execute("COMMIT").await.unwrap();
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    wait_until_recovered(&database).await;
    let attempts = emulator.journal().attempts();
    let of_the_key = attempts
        .iter()
        .filter(|attempt| attempt.is_stored() && *attempt.ordering_key == *"interleaved");
    let published: Vec<String> = of_the_key
        .flat_map(|attempt| attempt.event_ids.iter().flatten())
        .map(|id| id.to_string())
        .collect();
    assert_eq!(published, [2, 4, 1, 3].map(id), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_in_the_middle_of_a_recovery_begins_it_again_and_repeats_only_what_had_no_record() {
    let (database, emulator) = served_and_stopped().await;
    database.drop_slot().await;
    insert(&database, 201, 3_000).await;
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(5))));
    for round in 1..=5 {
        // Small requests, so that there is a middle.
        let more = [("POSTRIDER_IN_FLIGHT_REQUESTS", "1")];
        let relay = Relay::start_with(&database, &emulator.addr().to_string(), &more);
        eventually("some more events are recorded", || async {
            (recorded(&database).await > 200 + round * 2).then_some(())
        })
        .await;
        insert(&database, 3_001 + round as u32 * 200, 100).await;
        relay.kill_9();
    }
    emulator.faults().lift_all();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    let recorded_before = recorded(&database).await;
    let stored_before = emulator.journal().counts().stored_messages;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    wait_until_recovered(&database).await;
    insert(&database, 5_001, 100).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    let stored_after = emulator.journal().counts().stored_messages;
    assert_eq!(
        stored_after - stored_before,
        3_800 - recorded_before as u64,
        "the last run sends exactly what had no record"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_pubsub_during_a_recovery_costs_lag_alone() {
    let (database, emulator) = served_and_stopped().await;
    database.drop_slot().await;
    insert(&database, 201, 2_000).await;
    emulator.faults().refuse_connections(true);
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("recovering").await;
    insert(&database, 2_201, 300).await;
    relay.wait_for_log("pubsub-unreachable").await;
    let confirmed = database.confirmed().await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(database.confirmed().await, confirmed, "{}", relay.log());
    emulator.faults().refuse_connections(false);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_stands_by_during_a_recovery_and_ends_it_when_the_first_dies() {
    let (database, emulator) = served_and_stopped().await;
    database.drop_slot().await;
    insert(&database, 201, 2_000).await;
    emulator.faults().refuse_connections(true);
    let first = Relay::start(&database, &emulator);
    // From then on it holds the new slot.
    first.wait_for_log("the table is read").await;
    let second = Relay::start(&database, &emulator);
    second.wait_for_log("standby").await;
    insert(&database, 2_201, 300).await;
    first.kill_9();
    second.wait_for_log("recovery-unfinished").await;
    emulator.faults().refuse_connections(false);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_relays_that_find_the_slot_missing_at_once_lose_and_swap_nothing() {
    let (database, emulator) = served_and_stopped().await;
    for round in 0..3 {
        database.drop_slot().await;
        insert(&database, 201 + round * 500, 500).await;
        let relays: Vec<Relay> = (0..3).map(|_| Relay::start(&database, &emulator)).collect();
        database.wait_until_recorded().await;
        wait_until_recovered(&database).await;
        for relay in relays {
            relay.stop().await;
        }
    }
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_finds_the_slot_missing_too_late_leaves_no_mark_behind() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 1, 200).await;
    database.wait_until_recorded().await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    database.drop_slot().await;
    let mut other = harness::connect(&database.url).await;
    let lock = other.transaction().await.unwrap();
    // Of a kind that has no transaction id: the new slot would wait for it.
    lock.batch_execute("LOCK TABLE outbox.relay IN SHARE MODE")
        .await
        .unwrap();
    let late = Relay::start(&database, &emulator);
    late.wait_for_log("slot-missing").await;
    eventually("it waits to mark the slot", || async {
        let waits = "SELECT count(*) FROM pg_stat_activity \
                     WHERE wait_event_type = 'Lock' AND query LIKE '%INTO outbox.relay%'";
        (database.number(waits).await == 1).then_some(())
    })
    .await;
    // Meanwhile the slot is made, and another relay reads it.
    create_slot(&database).await;
    let reader = Relay::start(&database, &emulator);
    eventually("the slot is read", || async {
        let held = "SELECT count(*) FROM pg_replication_slots WHERE active";
        (database.number(held).await == 1).then_some(())
    })
    .await;
    lock.commit().await.unwrap();
    late.wait_for_log("standby for").await;
    let marked = "SELECT count(*) FROM outbox.relay WHERE recovering IS NOT NULL";
    assert_eq!(database.number(marked).await, 0, "{}", late.log());
    insert(&database, 201, 100).await;
    assert_nothing_is_lost_or_repeated(&database, &emulator, &reader).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_time_without_publication_that_the_slot_cannot_pass_come_from_the_table() {
    let (database, emulator) = served_and_stopped().await;
    let columns = "SELECT string_agg(tablename, ',') FROM pg_publication_tables";
    assert_eq!(database.text(columns).await, "events");
    database.execute("DROP PUBLICATION postrider").await;
    // Of their own keys: PostgreSQL 18 passes them without a word, and the audit finds them.
    database.execute(&insert_sql("gap", 201, 100)).await;
    database
        .execute("CREATE PUBLICATION postrider FOR TABLE outbox.events WITH (publish = 'insert', publish_via_partition_root = true)")
        .await;
    insert(&database, 301, 100).await;
    let relay = Relay::start(&database, &emulator);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    relay.wait_for_log("publication-gap").await;
}

/// 200 events delivered, and 300 more of which the log can be read to the middle.
async fn served_with_a_damaged_log() -> (Database, RunningEmulator) {
    let (mut database, emulator) = served_by(Database::private().await).await;
    let place = "SELECT file_name || ' ' || file_offset \
                 FROM pg_walfile_name_offset(pg_current_wal_lsn())";
    insert(&database, 201, 150).await;
    let place = database.text(place).await;
    insert(&database, 351, 150).await;
    let (file, offset) = place.split_once(' ').unwrap();
    let wal = database.server().data_dir().join("pg_wal").join(file);
    let wal = std::fs::File::options().write(true).open(wal).unwrap();
    wal.write_all_at(&[0xFF; 64], offset.parse().unwrap())
        .unwrap();
    (database, emulator)
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_behind_a_place_of_the_log_that_cannot_be_decoded_come_from_the_table() {
    let (database, emulator) = served_with_a_damaged_log().await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("recovered").await;
    insert(&database, 501, 100).await;
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    assert!(relay.log().contains("slot-stuck"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_may_not_recover_stops_where_the_log_cannot_be_decoded() {
    let (database, emulator) = served_with_a_damaged_log().await;
    let host = emulator.addr().to_string();
    let more = [("POSTRIDER_SLOT_ON_LOSS", "stop")];
    let relay = Relay::start_with(&database, &host, &more);
    relay.wait_for_error("slot-stuck").await;
    assert_eq!(relay.wait().await.code(), Some(3));
    let before = recorded(&database).await;
    assert!((200..500).contains(&before), "{before}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_may_not_recover_stops_with_the_reason_until_a_person_asks_for_it() {
    let (database, emulator) = served_and_stopped().await;
    database.drop_slot().await;
    insert(&database, 201, 100).await;
    let host = emulator.addr().to_string();
    let more = [("POSTRIDER_SLOT_ON_LOSS", "stop")];
    let relay = Relay::start_with(&database, &host, &more);
    relay.wait_for_error("slot-missing").await;
    relay.wait_for_log("postrider recover --dry-run").await;
    assert_eq!(relay.wait().await.code(), Some(3));
    assert_eq!(recorded(&database).await, 200, "nothing was delivered");
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("POSTRIDER_SLOT", database.slot()),
    ];
    let asked = harness::postrider(&["recover", "--yes"], &environment)
        .output()
        .unwrap();
    assert!(asked.status.success(), "{asked:?}");
    let relay = Relay::start_with(&database, &host, &more);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_relay_that_is_asked_to_recover_does_so_at_once() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 1, 200).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("POSTRIDER_SLOT", database.slot()),
    ];
    let asked = harness::postrider(&["recover", "--yes"], &environment)
        .output()
        .unwrap();
    assert!(asked.status.success(), "{asked:?}");
    relay.wait_for_log("recovered").await;
    insert(&database, 201, 100).await;
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_holds_the_new_slot_up_is_named_and_waited_for() {
    let (mut database, emulator) = served_by(Database::private().await).await;
    database.drop_slot().await;
    let blocker = harness::connect(&database.server().socket_url("postgres")).await;
    blocker
        .batch_execute("BEGIN; CREATE TABLE made_by_a_long_batch (n int)")
        .await
        .unwrap();
    insert(&database, 201, 100).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("slot-busy").await;
    assert!(
        relay.log().contains("idle transaction of server process"),
        "{}",
        relay.log()
    );
    blocker.batch_execute("COMMIT").await.unwrap();
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_standby_without_the_slot_is_served_from_its_tables() {
    let (mut database, emulator) = served_by(Database::private().await).await;
    insert(&database, 201, 300).await;
    database
        .server()
        .stop(StopMode::Fast, harness::PATIENCE)
        .unwrap();
    let standby = ScratchPostgres::builder()
        .standby_of(database.server())
        .start()
        .unwrap();
    let client = harness::connect(&standby.url("postgres")).await;
    client
        .batch_execute("SELECT pg_promote(true)")
        .await
        .unwrap();
    database.client = client;
    database.url = standby.url("postgres");
    insert(&database, 501, 200).await;
    let relay = Relay::start(&database, &emulator);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    let timeline = "SELECT timeline::bigint FROM outbox.relay";
    assert_eq!(database.number(timeline).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_another_timeline_that_has_the_slot_goes_on_and_is_audited() {
    let (database, emulator) = served_and_stopped().await;
    database
        .execute("UPDATE outbox.relay SET timeline = 7")
        .await;
    insert(&database, 201, 200).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("was promoted from a standby").await;
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    assert!(!relay.log().contains("recovering"), "{}", relay.log());
    let timeline = "SELECT timeline::bigint FROM outbox.relay";
    assert_eq!(database.number(timeline).await, 1);
}

/// Copies what a dump would hold of the outbox to another cluster.
async fn migrate(from: &Database, to: &Database) {
    for table in ["outbox.events", "outbox.dispatch", "outbox.relay"] {
        let rows = from
            .client
            .query(&format!("SELECT to_jsonb(t)::text FROM {table} t"), &[])
            .await
            .unwrap();
        for row in rows {
            let json: String = row.get(0);
            to.client
                .execute(
                    &format!(
                        "INSERT INTO {table} SELECT * \
                         FROM jsonb_populate_record(null::{table}, $1::text::jsonb)"
                    ),
                    &[&json],
                )
                .await
                .unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_cluster_is_refused_until_it_is_adopted_and_its_log_collides_with_no_record() {
    let (old, emulator) = served_by(Database::private().await).await;
    insert(&old, 201, 100).await;
    let new = Database::private().await;
    migrate(&old, &new).await;
    // A record of the old cluster at a place that the new one's log will come to.
    new.execute(
        "UPDATE outbox.dispatch SET commit_lsn = pg_current_wal_lsn() + (ordinal + 100000000) \
         WHERE event_id IN (SELECT event_id FROM outbox.dispatch LIMIT 1)",
    )
    .await;
    let relay = Relay::start(&new, &emulator);
    relay.wait_for_error("foreign-cluster").await;
    relay.wait_for_log("recover --adopt").await;
    assert_eq!(relay.wait().await.code(), Some(3));
    let environment = [
        ("DATABASE_URL", new.url.as_str()),
        ("POSTRIDER_SLOT", new.slot()),
    ];
    let recover = |arguments: &[&str]| {
        let mut all = vec!["recover"];
        all.extend(arguments);
        harness::postrider(&all, &environment).output().unwrap()
    };
    let refused = recover(&["--yes"]);
    assert_eq!(refused.status.code(), Some(3), "{refused:?}");
    let adopted = recover(&["--adopt", "--yes"]);
    assert!(adopted.status.success(), "{adopted:?}");
    let ahead = "SELECT count(*) FROM outbox.dispatch WHERE commit_lsn > pg_current_wal_lsn()";
    assert_eq!(new.number(ahead).await, 0);
    insert(&new, 301, 100).await;
    let relay = Relay::start(&new, &emulator);
    assert_nothing_is_lost_or_repeated(&new, &emulator, &relay).await;
    let again = recover(&["--adopt", "--yes"]);
    assert_eq!(again.status.code(), Some(2), "nothing to adopt: {again:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_the_first_start_stay_where_they_are_unless_all_is_asked_for() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    database.drop_slot().await;
    insert_orders(&database, 50, 5).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("first start: created the slot").await;
    insert_orders(&database, 20, 5).await;
    eventually("what came after the start is delivered", || async {
        (emulator.journal().counts().stored_messages == 20).then_some(())
    })
    .await;
    relay.stop().await;
}

/// A session that looks like the dispatch writer of another relay with a statement running, which
/// a relay that opens the slot waits for. Over when it is cancelled.
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

/// A relay that has looked at the slot and not opened it: it waits for the writer.
async fn opening_relay(database: &Database, emulator: &RunningEmulator) -> Relay {
    let host = emulator.addr().to_string();
    let patient = [
        ("POSTRIDER_WAL_SENDER_TIMEOUT_S", "200"),
        ("POSTRIDER_PUBLISH_TIMEOUT_S", "45"),
    ];
    let relay = Relay::start_with(database, &host, &patient);
    eventually("the relay waits for the other writer", || async {
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'postrider' \
             AND datname = current_database() AND query LIKE '%where application_name in (select left(%'";
        (database.number(waiting).await == 1).then_some(())
    })
    .await;
    relay
}

fn busy_writers(database: &Database) -> String {
    format!(
        "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)' \
         AND state = 'active' AND application_name = 'postrider dispatch {}'",
        database.slot()
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_made_anew_while_a_relay_is_opening_it_is_noticed_and_costs_nothing() {
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
async fn a_recovery_that_may_not_use_enough_temporary_files_says_which_limit_to_raise() {
    let (database, emulator) = served_by(Database::private().await).await;
    database.drop_slot().await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             SELECT 'order', 'o-' || n % 7, 'OrderPlaced', n, jsonb_build_object('n', n) \
             FROM generate_series(201, 10000) n; \
             ALTER ROLE postgres SET work_mem = '64kB'; \
             ALTER ROLE postgres SET temp_file_limit = '64kB'",
        )
        .await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_error("postgres-statement").await;
    let log = relay.log();
    assert!(
        log.contains("SQLSTATE 53400") && log.contains("raise temp_file_limit"),
        "{log}"
    );
    assert_eq!(relay.wait().await.code(), Some(3), "{log}");
    database
        .execute("ALTER ROLE postgres RESET temp_file_limit")
        .await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    assert_eq!(emulator.journal().counts().stored_messages, 10_000);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_vanishes_while_a_relay_is_opening_it_is_noticed_and_costs_nothing() {
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

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_cannot_be_mapped_is_set_aside_by_a_recovery_and_blocks_its_key_alone() {
    let (database, emulator) = served_and_stopped().await;
    database.drop_slot().await;
    insert(&database, 201, 70).await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, headers) \
             VALUES ('order', 'o-1', 'Headers', 271, '[1]')",
        )
        .await;
    insert(&database, 272, 70).await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    wait_until_recovered(&database).await;
    database.wait_until_confirmed().await;
    let set_aside = "SELECT string_agg(DISTINCT split_part(d.error, ':', 1), ' ') \
         FROM outbox.dispatch d JOIN outbox.events e ON e.id = d.event_id \
         WHERE d.state = 'quarantined' AND e.event_type = 'Headers' AND d.ordering_key = 'o-1'";
    assert_eq!(database.text(set_aside).await, "event-invalid");
    let waiting = "SELECT count(*) FROM outbox.dispatch WHERE ordering_key = 'o-1' \
         AND state = 'quarantined' AND error LIKE 'waits for event %'";
    assert_eq!(database.number(waiting).await, 10, "{}", relay.log());
    let others = "SELECT count(*) FROM outbox.dispatch WHERE ordering_key <> 'o-1' \
         AND state <> 'published'";
    assert_eq!(database.number(others).await, 0);
    assert_eq!(emulator.journal().counts().stored_messages, 330);
    // The key stays blocked in the stream, too.
    insert(&database, 342, 7).await;
    database.wait_until_recorded().await;
    assert_eq!(database.number(waiting).await, 11, "{}", relay.log());
    relay.stop().await;
}
