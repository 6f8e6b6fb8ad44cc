//! Tests of `postrider audit` without a relay: how the command compares rows with dispatch rows,
//! and its exit codes.

use std::time::Duration;

use scratch_postgres::ScratchPostgres;

use crate::support::{Database, assert_contains, command};

/// Records the first `count` events as published, at a position that the slot has passed.
async fn record(database: &Database, count: i64) {
    database
        .execute(&format!(
            "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, \
                 state, topic, ordering_key) \
             select '0/10', now(), seq, 1, id, 'published', 'projects/p/topics/order.events', \
                 aggregateid \
             from outbox.events where seq <= {count} \
             on conflict do nothing"
        ))
        .await;
}

/// Advances the slot to the end of the WAL. A test that calls this has a server of its own, because other
/// tests would write more WAL.
async fn advance(database: &Database) {
    database
        .execute(&format!(
            "select pg_replication_slot_advance('{}', pg_current_wal_lsn())",
            database.name
        ))
        .await;
}

/// Runs the audit, and returns its peak resident memory in KiB.
async fn peak_rss_kib(database: &Database) -> u64 {
    let mut audit = command(&["audit"], &database.env()).spawn().unwrap();
    let path = format!("/proc/{}/status", audit.id().unwrap());
    let mut peak = 0;
    loop {
        // After the process has ended, the file has no line `VmHWM`.
        let status = std::fs::read_to_string(&path).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        if let Some(kib) = line.and_then(|line| line.trim().strip_suffix(" kB")) {
            peak = kib.parse().unwrap();
        }
        if let Some(ended) = audit.try_wait().unwrap() {
            assert_eq!(ended.code(), Some(1), "the rows wait");
            return peak;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn the_memory_of_an_audit_does_not_grow_with_the_table() {
    let database = Database::initialised().await;
    let insert = |count| {
        format!(
            "alter table outbox.events disable trigger user; \
             insert into outbox.events (aggregatetype, aggregateid, event_type) \
             select 'order', n::text, 'E' from generate_series(1, {count}) n"
        )
    };
    database.execute(&insert(6_000)).await;
    let small = peak_rss_kib(&database).await;
    database.execute(&insert(94_000)).await;
    let large = peak_rss_kib(&database).await;
    // The ids of the additional rows alone are 3 MB of text, so an audit that keeps them exceeds this limit.
    assert!(large < small + 2_048, "{small} KiB, then {large} KiB");
}

#[tokio::test]
async fn rows_without_a_record_wait_until_the_slot_has_passed_them() {
    let server = ScratchPostgres::builder().start().unwrap();
    let database = Database::initialised_on(&server).await;
    database.emit(12_000).await;
    record(&database, 11_980).await;
    let ran = database.run(&["audit"]).await;
    ran.assert_status(1);
    assert_contains(&ran.stdout, "outbox.events: 12000 rows");
    assert_contains(&ran.stdout, "     11980  published");
    assert_contains(&ran.stdout, "        20  waiting for the relay");
    assert_contains(&ran.stdout, "The slot has not yet passed the newest rows");
    assert!(!ran.stdout.contains("Nothing is missing"), "{}", ran.stdout);

    advance(&database).await;
    let ran = database.run(&["audit", "--json"]).await;
    ran.assert_status(2);
    let json = ran.json();
    let table = &json["tables"][0];
    assert_eq!(json["result"], "missing");
    assert_eq!(table["missing"]["events"], 20);
    assert_eq!(table["missing"]["first_ids"].as_array().unwrap().len(), 10);
    let first = "select id::text from outbox.events where seq = 11981";
    assert_eq!(table["missing"]["first_ids"][0], database.text(first).await);

    record(&database, 12_000).await;
    let ran = database.run(&["audit"]).await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "Complete: every event has its outcome.");
}

#[tokio::test]
async fn events_in_quarantine_are_counted_and_named() {
    let server = ScratchPostgres::builder().start().unwrap();
    let database = Database::initialised_on(&server).await;
    database.emit(3).await;
    record(&database, 3).await;
    database
        .execute(
            "update outbox.dispatch set state = 'quarantined', attempts = 11, \
                 error = 'event-refused: no' where ordinal = 2",
        )
        .await;
    advance(&database).await;
    let ran = database.run(&["audit"]).await;
    ran.assert_status(1);
    assert_contains(&ran.stdout, "         1  in quarantine");
    assert_contains(
        &ran.stdout,
        "were sent again because the first answer was lost",
    );
    assert_contains(&ran.stdout, "Nothing is missing");
}

#[tokio::test]
async fn an_event_recorded_twice_is_reported_and_a_replayed_one_is_not() {
    let database = Database::initialised().await;
    database.emit(40).await;
    record(&database, 40).await;
    database
        .execute(
            "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, \
                 state, topic, ordering_key) \
             select '0/20', committed_at, ordinal, 1, event_id, state, topic, ordering_key \
             from outbox.dispatch where ordinal <= 12; \
             update outbox.dispatch set attempts = 2, replay = 'again' where ordinal = 30",
        )
        .await;
    let ran = database.run(&["audit"]).await;
    assert_contains(
        &ran.stdout,
        "        12  are recorded as published under more than one commit",
    );
    let id = "select id::text from outbox.events where seq = 1";
    assert_contains(&ran.stdout, &database.text(id).await);
    assert!(!ran.stdout.contains("sent again"), "{ran}");
    let json = database.run(&["audit", "--json"]).await.json();
    let table = &json["tables"][0];
    assert_eq!(
        (&table["rows"], &table["recorded_twice"]),
        (&40.into(), &12.into())
    );
    let ids = table["first_ids_recorded_twice"].as_array().unwrap();
    assert_eq!(ids.len(), 10, "the list of ids is bounded");
}

#[tokio::test]
async fn without_records_the_audit_says_that_it_cannot_find_missing_events() {
    let server = ScratchPostgres::builder().start().unwrap();
    let database = Database::initialised_on(&server).await;
    database.emit(5).await;
    let mode = [("POSTRIDER_DISPATCH", "exceptions")];
    advance(&database).await;
    let ran = database.run_with(&["audit"], &mode).await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "         5  published, without a record");
    assert_contains(&ran.stdout, "cannot find a missing event");
}

#[tokio::test]
async fn since_leaves_out_older_rows() {
    let database = Database::initialised().await;
    database.emit(7_000).await;
    database
        .execute(
            "alter table outbox.events disable trigger user; \
             update outbox.events set occurred_at = now() - interval '3 days' where seq <= 6000",
        )
        .await;
    let json = database.run(&["audit", "--since", "1d", "--json"]).await;
    assert_eq!(json.json()["tables"][0]["rows"], 1_000);
}

#[tokio::test]
async fn a_table_without_seq_is_compared_by_ranges_of_blocks() {
    let database = Database::new().await;
    database
        .execute(
            "create table public.plain (id uuid primary key default gen_random_uuid(), \
                 aggregatetype text not null, aggregateid text, event_type text not null, \
                 payload jsonb)",
        )
        .await;
    let table = [("POSTRIDER_TABLE", "public.plain")];
    let ran = database
        .run_with(&["init", "--apply", "--no-columns"], &table)
        .await;
    ran.assert_status(0);
    database
        .execute(
            "insert into public.plain (aggregatetype, event_type) \
             select 'order', 'OrderPlaced' from generate_series(1, 30000)",
        )
        .await;
    let ran = database.run_with(&["audit", "--json"], &table).await;
    ran.assert_status(1);
    let table = &ran.json()["tables"][0];
    assert_eq!(table["rows"], 30_000);
    assert_eq!(table["waiting"]["events"], 30_000);
}

/// These commands read `outbox.dispatch` together with the captured tables. If `outbox.dispatch` is missing, the
/// error must not say that a captured table was altered.
#[tokio::test]
async fn a_missing_table_of_the_relay_is_named_by_every_command_that_walks_over_the_tables() {
    let database = Database::initialised().await;
    database.emit(1).await;
    database
        .execute("alter table outbox.dispatch rename to elsewhere")
        .await;
    for command in [
        &["audit"][..],
        &["prune", "--older-than", "1d", "--dry-run"],
        &["recover", "--dry-run"],
        &["event", "--key", "1"],
    ] {
        let ran = database
            .run_with(command, &[("PUBSUB_PROJECT_ID", "demo")])
            .await;
        ran.assert_error("schema-missing", 3);
        assert_contains(&ran.stderr, "outbox.dispatch");
        assert_contains(&ran.stderr, "postrider init --apply");
    }
}
