//! Tests of the whole path: from a committed row to an ordered message, a dispatch row and a confirmed
//! position.

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::http::{free_addr, metric};

#[tokio::test(flavor = "multi_thread")]
async fn every_committed_row_is_published_once_in_order_recorded_and_confirmed() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    insert_orders(&database, 500, 7).await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 500, 7).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
    assert_eq!(report.stored_messages, 1_000);
    let row = database
        .client
        .query_one(
            "SELECT count(*), count(DISTINCT (commit_lsn, ordinal)), count(DISTINCT message_id), \
             min(attempts), bool_and(state = 'published'), bool_and(dispatched_at >= committed_at), \
             bool_and(ordering_key LIKE 'o-%') FROM outbox.dispatch",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(
        (
            row.get::<_, i64>(0),
            row.get::<_, i64>(1),
            row.get::<_, i64>(2)
        ),
        (1000, 1000, 1000)
    );
    assert_eq!(row.get::<_, i32>(3), 1);
    assert!(row.get::<_, bool>(4) && row.get::<_, bool>(5) && row.get::<_, bool>(6));
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rolled_back_rows_are_never_published() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 3, 1).await;
    database
        .execute(
            "BEGIN; INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
             VALUES ('order', 'o-0', 'Never'); ROLLBACK; \
             BEGIN; SAVEPOINT s; INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
             VALUES ('order', 'o-0', 'Never'); ROLLBACK TO s; COMMIT;",
        )
        .await;
    insert_orders(&database, 3, 1).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
    assert_eq!(report.stored_messages, 6);
    drop(relay);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_large_transaction_is_published_whole_and_in_order() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             SELECT 'order', 'o-' || (i % 50), 'OrderPlaced', i, jsonb_build_object('n', i) \
             FROM generate_series(1, 50000) i",
        )
        .await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
    assert_eq!(report.stored_messages, 50_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_relay_retains_no_wal_and_writes_nothing_while_other_tables_are_busy() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    let (port, host) = (free_addr(), emulator.addr().to_string());
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &port)]);
    relay.wait_for_log("streaming").await;
    database.execute("CREATE DATABASE other").await;
    let url = database.server().socket_url("other");
    let other = harness::connect(&url).await;
    let clients = [&database.client, &other];
    for client in clients {
        let create = "CREATE TABLE other (n int)";
        client.batch_execute(create).await.unwrap();
    }
    // Write to the two databases alternately. The slot must advance after each write, whether the
    // WAL comes from the relay's own database or from another database.
    for _ in 0..5 {
        for client in clients {
            let fill = "INSERT INTO other SELECT generate_series(1, 20000)";
            client.batch_execute(fill).await.unwrap();
            database.wait_until_confirmed().await;
        }
    }
    database.execute("CHECKPOINT").await;
    database.wait_until_confirmed().await;
    database.wait_until_audited().await;
    // Every write creates a new row version, so equal versions prove that the relay wrote nothing.
    let versions = "SELECT string_agg(t.xmin::text || t.ctid::text, ' ') FROM outbox.relay t";
    let written = || async { database.text(versions).await };
    let before = written().await;
    tokio::time::sleep(std::time::Duration::from_secs(12)).await;
    assert_eq!(written().await, before);
    assert_eq!(
        database
            .number("SELECT count(*) FROM outbox.dispatch")
            .await,
        0
    );
    // The metric is absent while the lag is unknown, so the value 0 is a measurement.
    assert_eq!(metric(&port, "postrider_lag_seconds").await, Some(0.0));
    // The relay measures the lag every five seconds, so wait for a new measurement. Allow a small
    // lag, because the server itself may have written a little WAL.
    eventually("the lag in bytes is small", || async {
        let bytes = metric(&port, "postrider_slot_lag_bytes").await?;
        (bytes < 65_536.0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_shutdown_of_the_server_does_not_wait_for_the_relay() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 100, 3).await;
    database
        .execute("CREATE TABLE other AS SELECT generate_series(1, 50000) n")
        .await;
    database.wait_until_recorded().await;
    let began = std::time::Instant::now();
    database
        .server()
        .stop(scratch_postgres::StopMode::Fast, harness::PATIENCE)
        .unwrap();
    assert!(
        began.elapsed() < std::time::Duration::from_secs(10),
        "took {:?}",
        began.elapsed()
    );
    drop(relay);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_topics_are_created_if_allowed_and_waited_for_if_not() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let addr = emulator.addr().to_string();
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
             VALUES ('invoice', 'i-1', 'Sent'), ('order', 'o-1', 'Placed')",
        )
        .await;
    let relay = Relay::start_with(&database, &addr, &[]);
    relay.wait_for_log("topic-missing").await;
    eventually("the existing topic is served", || async {
        let sql = "SELECT count(*) FROM outbox.dispatch WHERE topic LIKE '%order.events'";
        (database.number(sql).await == 1).then_some(())
    })
    .await;
    relay.kill_9();
    let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_CREATE_TOPICS", "true")]);
    database.wait_until_recorded().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_the_same_name_in_another_schema_is_not_the_outbox() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    database
        .execute(
            "CREATE SCHEMA other; CREATE TABLE other.events (LIKE outbox.events INCLUDING ALL); \
             ALTER PUBLICATION postrider ADD TABLE other.events",
        )
        .await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    database
        .execute(
            "INSERT INTO other.events (aggregatetype, aggregateid, event_type, payload) \
             VALUES ('order', 'o-1', 'NotAnOrder', '{}')",
        )
        .await;
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    assert_eq!(report.stored_messages, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partly_recorded_batch_is_completed_and_no_row_is_replaced() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    // Hold back delivery until the test has written one of the dispatch rows itself.
    emulator.faults().refuse_connections(true);
    let peek = format!("{}_peek", database.slot());
    database
        .text(&format!(
            "SELECT slot_name::text FROM pg_create_logical_replication_slot('{peek}', 'pgoutput')"
        ))
        .await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version) \
             SELECT 'order', 'o-1', 'Placed', i FROM generate_series(1, 3) i",
        )
        .await;
    // The `final_lsn` of a Begin message is the commit LSN. PostgreSQL 14 also sends empty
    // transactions, so select a Begin message of a transaction with an insert.
    let written = database
        .number(&format!(
            "WITH changes AS (SELECT * FROM pg_logical_slot_peek_binary_changes('{peek}', NULL, \
                 NULL, 'proto_version', '1', 'publication_names', 'postrider')), \
             begun AS (SELECT encode(substr(b.data, 2, 8), 'hex') AS lsn \
                 FROM changes b JOIN changes i ON i.xid = b.xid \
                 WHERE get_byte(b.data, 0) = ascii('B') AND get_byte(i.data, 0) = ascii('I') LIMIT 1), \
             written AS (INSERT INTO outbox.dispatch \
                 (commit_lsn, ordinal, event_id, attempts, committed_at, state, message_id) \
                 SELECT (substr(lsn, 1, 8) || '/' || substr(lsn, 9))::pg_lsn, 2, \
                     (SELECT id FROM outbox.events WHERE version = 2), 1, now(), 'published', \
                     'of an earlier attempt' \
                 FROM begun RETURNING 1) \
             SELECT count(*) FROM written"
        ))
        .await;
    assert_eq!(written, 1);
    emulator.faults().refuse_connections(false);
    database.wait_until_recorded().await;
    let rows = database
        .text(
            "SELECT string_agg(ordinal || ':' || (message_id = 'of an earlier attempt'), ' ' \
                 ORDER BY ordinal) FROM outbox.dispatch",
        )
        .await;
    assert_eq!(rows, "1:false 2:true 3:false", "{}", relay.log());
    database
        .text(&format!("SELECT pg_drop_replication_slot('{peek}')::text"))
        .await;
    database.wait_until_confirmed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn at_low_rates_records_share_transactions_and_wal_flushes() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 1, 1).await;
    database.wait_until_recorded().await;
    let began = std::time::Instant::now();
    for _ in 0..400 {
        insert_orders(&database, 1, 1).await;
    }
    database.wait_until_recorded().await;
    let most = began.elapsed().as_millis() / 25 + 3;
    let commits = database
        .number("SELECT count(DISTINCT xmin::text) FROM outbox.dispatch")
        .await;
    assert!(
        (2..=most).contains(&u128::try_from(commits).unwrap()),
        "{commits} transactions, at most {most} were due\n{}",
        relay.log()
    );
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_larger_than_the_memory_limit_is_never_held_whole() {
    const LIMIT_KIB: u64 = 80 << 10;
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start_with(
        &database,
        &emulator.addr().to_string(),
        &[("POSTRIDER_IN_FLIGHT_MIB", "2")],
    );
    let bytes = database
        .number(
            "WITH written AS ( \
                 INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
                 SELECT 'order', 'o-' || (i % 50), 'OrderPlaced', i, \
                     jsonb_build_object('pad', repeat('x', 8000)) \
                 FROM generate_series(1, 20000) i RETURNING payload) \
             SELECT sum(octet_length(payload::text)) FROM written",
        )
        .await;
    assert!(bytes > 100_000_000);
    database.wait_until_recorded().await;
    let peak = relay.peak_rss_kib();
    assert!(peak < LIMIT_KIB, "{peak} KiB\n{}", relay.log());
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    relay.stop().await;
}
