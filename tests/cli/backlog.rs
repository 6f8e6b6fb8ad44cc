//! Tests how `status` and `slot` report a backlog so large that they count only a part of the rows. A
//! larger backlog must never cause a milder alarm.

use scratch_postgres::ScratchPostgres;

use crate::support::{Database, assert_contains};

/// Number of rows of a large backlog: more than the 200,000 rows that the commands read along an index.
const MANY: u32 = 210_000;

/// Returns a database that has a slot, but that no relay has used yet. Each test has a server of its own: a
/// transaction of another test that is open while the slot is created would change how the rows are counted.
async fn without_relay(server: &ScratchPostgres) -> Database {
    let database = Database::on(server).await;
    database
        .run(&["init", "--apply", "--no-slot"])
        .await
        .assert_status(0);
    database.run(&["slot", "create"]).await.assert_status(0);
    database
}

/// Inserts `rows` events. The first event happened `oldest` (an SQL interval) ago, and the last event now.
async fn insert(database: &Database, rows: u32, oldest: &str) {
    let insert = format!(
        "insert into outbox.events (aggregatetype, aggregateid, event_type, occurred_at) \
         select 'order', 'o-' || i % 100, 'Placed', \
             clock_timestamp() - interval '{oldest}' * (1 - i / {rows}.0) \
         from generate_series(0, {rows} - 1) i"
    );
    database.execute(&insert).await;
}

/// Records the first `rows` events as published.
async fn record(database: &Database, rows: u32) {
    let record = format!(
        "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, state) \
         select pg_current_wal_lsn(), now(), row_number() over (), 1, id, 'published' \
         from (select id from outbox.events order by seq limit {rows}) e"
    );
    database.execute(&record).await;
    database
        .execute("analyze outbox.events, outbox.dispatch")
        .await;
}

#[tokio::test]
async fn a_large_backlog_without_a_relay_is_critical() {
    let server = ScratchPostgres::builder().start().unwrap();
    let database = without_relay(&server).await;
    insert(&database, MANY, "2 hours").await;
    let ran = database.run(&["status", "--json"]).await;
    ran.assert_status(2);
    let slot = &ran.json()["slot"];
    assert_eq!(slot["pending_is_lower_bound"], true, "{ran}");
    assert!(slot["pending_events"].as_u64().unwrap() >= 200_000, "{ran}");
    assert!(slot["lag_seconds"].as_f64().unwrap() >= 7_200.0, "{ran}");
    let shown = database.run(&["slot"]).await;
    assert_contains(
        &shown.stdout,
        "at least 200000 events not recorded yet, the oldest",
    );
    assert_contains(&shown.stdout, "at least 2 h");
    let drop = database.run(&["slot", "drop"]).await;
    assert_contains(&drop.stderr, "at least 200000 events not recorded");
}

/// The oldest 150,000 of 400,000 rows are delivered. The commands count only 100,000 rows at each end of the
/// table, so the oldest waiting event is in the part between the two ends.
#[tokio::test]
async fn the_oldest_waiting_event_is_found_in_the_middle_of_a_large_table() {
    let server = ScratchPostgres::builder().start().unwrap();
    let database = without_relay(&server).await;
    insert(&database, 400_000, "4000 seconds").await;
    record(&database, 150_000).await;
    let ran = database.run(&["slot", "show", "--json"]).await;
    ran.assert_status(2);
    let lag = ran.json()["lag_seconds"].as_f64().unwrap();
    assert!((2_490.0..2_700.0).contains(&lag), "{ran}");
}

/// The column `seq` can have gaps, for example because the sequence has a large cache or was restored. The
/// search for waiting events must continue below a gap.
#[tokio::test]
async fn the_oldest_waiting_event_is_found_below_a_gap_in_the_numbers() {
    for gap in ["10_000_000", "1000000000000000"] {
        let server = ScratchPostgres::builder().start().unwrap();
        let database = without_relay(&server).await;
        insert(&database, 200_000, "4000 seconds").await;
        record(&database, 150_000).await;
        let jump = format!(
            "select setval('outbox.events_seq_seq', {})",
            gap.replace('_', "")
        );
        database.execute(&jump).await;
        insert(&database, 200_000, "500 seconds").await;
        database.execute("analyze outbox.events").await;
        let ran = database.run(&["slot", "show", "--json"]).await;
        let lag = ran.json()["lag_seconds"].as_f64().unwrap();
        assert!((990.0..1_200.0).contains(&lag), "{gap}: {ran}");
    }
}

#[tokio::test]
async fn many_delivered_rows_above_the_floor_are_no_backlog() {
    let server = ScratchPostgres::builder().start().unwrap();
    let database = without_relay(&server).await;
    insert(&database, MANY + 40_000, "2 hours").await;
    record(&database, MANY + 40_000).await;
    // The rows and their records make much WAL, which nobody reads. The limit on the lag is therefore high.
    let show = ["slot", "show", "--json", "--critical-bytes", "1TB"];
    let ran = database.run(&show).await;
    ran.assert_status(1);
    assert!(ran.json()["pending_events"].is_null(), "{ran}");
    insert(&database, 3, "1 second").await;
    let ran = database.run(&show).await;
    ran.assert_status(1);
    let json = ran.json();
    assert_eq!(
        (&json["pending_events"], &json["pending_is_lower_bound"]),
        (&3.into(), &true.into())
    );
    assert!(json["lag_seconds"].as_f64().unwrap() < 200.0, "{ran}");
}

#[tokio::test]
async fn a_backlog_in_a_large_table_without_an_index_is_critical() {
    let server = ScratchPostgres::builder().start().unwrap();
    let database = without_relay(&server).await;
    let without_index = "\
        do $$ declare index regclass; begin \
            for index in select indexrelid from pg_index \
                where indrelid = 'outbox.events'::regclass and not indisprimary loop \
                execute 'drop index ' || index; \
            end loop; \
        end $$; \
        alter table outbox.events add filler text default repeat('x', 7000); \
        alter table outbox.events alter filler set storage plain";
    database.execute(without_index).await;
    insert(&database, 20_000, "2 hours").await;
    let bytes = "select pg_relation_size('outbox.events')";
    let size: i64 = database.client.query_one(bytes, &[]).await.unwrap().get(0);
    assert!(size > 128 << 20, "{size}");
    let ran = database.run(&["slot", "show", "--json"]).await;
    ran.assert_status(2);
    assert_eq!(ran.json()["pending_is_lower_bound"], true, "{ran}");
}

/// A service may write any value into `occurred_at`. So an output that computes the age from this column must
/// say so.
#[tokio::test]
async fn the_age_of_an_event_counts_from_its_commit_if_known_else_from_occurred_at() {
    let insert = "insert into outbox.events (aggregatetype, aggregateid, event_type, occurred_at) \
                  values ('order', 'o-1', 'Placed', now() - interval '2 hours')";
    let server = ScratchPostgres::builder().start().unwrap();
    let database = without_relay(&server).await;
    database.execute(insert).await;
    let ran = database.run(&["slot", "show", "--json"]).await;
    assert_eq!(ran.json()["lag_seconds_by"], "occurred_at", "{ran}");
    assert!(
        ran.json()["lag_seconds"].as_f64().unwrap() >= 7_200.0,
        "{ran}"
    );
    let ran = database.run(&["status"]).await;
    assert_contains(&ran.stdout, "the oldest 2 h old by occurred_at");

    let server = ScratchPostgres::builder()
        .setting("track_commit_timestamp", "on")
        .start()
        .unwrap();
    let database = without_relay(&server).await;
    database.execute(insert).await;
    let ran = database.run(&["slot", "show", "--json"]).await;
    assert_eq!(ran.json()["lag_seconds_by"], "commit", "{ran}");
    assert!(ran.json()["lag_seconds"].as_f64().unwrap() < 600.0, "{ran}");
    let ran = database.run(&["status"]).await;
    ran.assert_status(1);
    assert!(!ran.stdout.contains("by occurred_at"), "{ran}");
}
