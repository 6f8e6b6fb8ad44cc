//! Tests of a recovery: which rows it publishes from the tables, and in which order. In some tests, PostgreSQL
//! cannot read a part of the WAL.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn start_all_delivers_the_rows_of_the_table_while_writers_continue() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    database.drop_slot().await;
    insert(&database, 1, 4_000).await;
    // Slow down publishing, so that writers commit new rows while the recovery still reads the table.
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
    // Only the first start publishes the rows of the tables, although `start = all` is still set.
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_START", "all")]);
    relay.wait_for_log("streaming").await;
    assert!(!relay.log().contains("recovering"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_identified_by_a_number_are_recovered_by_it() {
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
        let mut numbers = Vec::new();
        for id in attempt.event_ids.iter().flatten() {
            let number = format!(
                "SELECT seq FROM public.jobs WHERE outbox.event_uuid('public.jobs', seq::text) = '{id}'"
            );
            numbers.push(database.number(&number).await);
        }
        assert!(numbers.is_sorted(), "{numbers:?}\n{}", relay.log());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_written_without_a_publication_come_from_the_table() {
    let (database, emulator) = served_and_stopped().await;
    let columns = "SELECT string_agg(tablename, ',') FROM pg_publication_tables";
    assert_eq!(database.text(columns).await, "events");
    database.execute("DROP PUBLICATION postrider").await;
    // Insert rows while the publication does not exist. PostgreSQL 18 silently leaves these rows out of the stream.
    // The relay then publishes them only after an audit, perhaps after later rows. So give these rows keys of their
    // own: otherwise the order of their keys could break.
    database.execute(&insert_sql("gap", 201, 100)).await;
    database
        .execute("CREATE PUBLICATION postrider FOR TABLE outbox.events WITH (publish = 'insert', publish_via_partition_root = true)")
        .await;
    insert(&database, 301, 100).await;
    let relay = Relay::start(&database, &emulator);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    relay.wait_for_log("publication-gap").await;
}

/// Delivers 200 events, writes 300 more events, and damages the WAL in the middle of these 300
/// events. PostgreSQL can then stream only the first 150 of them.
async fn served_with_a_damaged_log() -> (Database, RunningEmulator) {
    let (mut database, emulator) = served_by(Database::private().await).await;
    let location = "SELECT file_name || ' ' || file_offset \
                    FROM pg_walfile_name_offset(pg_current_wal_lsn())";
    insert(&database, 201, 150).await;
    let location = database.text(location).await;
    insert(&database, 351, 150).await;
    let (file, offset) = location.split_once(' ').unwrap();
    let wal = database.server().data_dir().join("pg_wal").join(file);
    let wal = std::fs::File::options().write(true).open(wal).unwrap();
    wal.write_all_at(&[0xFF; 64], offset.parse().unwrap())
        .unwrap();
    (database, emulator)
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_behind_an_undecodable_place_in_the_wal_come_from_the_table() {
    let (database, emulator) = served_with_a_damaged_log().await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("recovered").await;
    insert(&database, 501, 100).await;
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    assert!(relay.log().contains("slot-stuck"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_may_not_recover_stops_at_an_undecodable_place_in_the_wal() {
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
async fn a_relay_that_may_not_recover_stops_with_the_reason_until_an_operator_asks() {
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
async fn a_running_relay_recovers_as_soon_as_it_is_asked() {
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
async fn rows_from_before_the_first_start_are_not_sent_without_start_all() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    database.drop_slot().await;
    database.execute("DELETE FROM outbox.capture").await;
    insert_orders(&database, 50, 5).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    assert!(relay.log().contains("first start: "), "{}", relay.log());
    insert_orders(&database, 20, 5).await;
    eventually("the rows after the start are delivered", || async {
        (emulator.journal().counts().stored_messages == 20).then_some(())
    })
    .await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_quarantines_an_unmappable_row_which_blocks_only_its_key() {
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
    // Check that a streamed event of the blocked key is quarantined too.
    insert(&database, 342, 7).await;
    database.wait_until_recorded().await;
    assert_eq!(database.number(waiting).await, 11, "{}", relay.log());
    relay.stop().await;
}

/// A recovered row waits for its topic, and only its key waits with it. All other keys are
/// streamed.
#[tokio::test(flavor = "multi_thread")]
async fn a_recovered_row_whose_topic_is_missing_holds_up_its_key_alone() {
    let (database, emulator) = served_and_stopped().await;
    database.drop_slot().await;
    insert(&database, 201, 50).await;
    let lost = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
                SELECT 'nowhere', 'n-1', 'Lost', n, '{}' FROM generate_series(1, 3) n";
    database.execute(lost).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("topic-missing").await;
    insert(&database, 251, 50).await;
    // These events come from the stream, and must wait behind the recovered events of their key.
    database.execute(&lost.replace("1, 3", "4, 6")).await;
    insert(&database, 301, 50).await;
    eventually("the stream of other keys is published", || async {
        (recorded(&database).await == 350).then_some(())
    })
    .await;
    // Kill the relay. The next relay continues the recovery.
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("recovery-unfinished").await;
    insert(&database, 351, 50).await;
    let topic = "projects/demo/topics/nowhere.events";
    emulator.create_topic(topic).await.unwrap();
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

/// The release of a quarantined event need not wait for a recovered row of another key.
#[tokio::test(flavor = "multi_thread")]
async fn quarantined_events_are_released_while_a_recovered_row_waits_for_its_topic() {
    let (database, emulator) = served_and_stopped().await;
    database.drop_slot().await;
    let lost = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
                VALUES ('nowhere', 'n-1', 'Lost', 1, '{}'), ('order', 'bad', 'Bad', 1, '{}')";
    database.execute(lost).await;
    let bad = "SELECT id::text FROM outbox.events WHERE aggregateid = 'bad'";
    let event_id = database.text(bad).await;
    let fault = Fault::new(Action::Poison { event_id });
    let poisoned = emulator.faults().inject(fault);
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("topic-missing").await;
    let in_state =
        |state: &str| format!("SELECT count(*) FROM outbox.dispatch WHERE state = '{state}'");
    eventually("the bad event is quarantined", || async {
        (database.number(&in_state("quarantined")).await == 1).then_some(())
    })
    .await;
    emulator.faults().lift(poisoned);
    database
        .execute("UPDATE outbox.dispatch SET state = 'released' WHERE state = 'quarantined'")
        .await;
    eventually("the released event is published", || async {
        let left = database.number(&in_state("released")).await;
        (left == 0).then_some(())
    })
    .await;
    assert_eq!(database.number(&in_state("quarantined")).await, 0);
    emulator
        .create_topic("projects/demo/topics/nowhere.events")
        .await
        .unwrap();
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}
