//! Daily partitions of `outbox.events`: the relay adds them ahead, and drops those whose events are all
//! old and published, while services go on writing.

use std::time::{Duration, Instant};

use pubsub_emulator::RunningEmulator;
use scratch_postgres::ScratchPostgres;

use crate::exceptions::{BAD, poison, stored};
use crate::harness::{self, Database, Relay, connect, eventually, postrider};

/// Old events of each day.
const OLD: i64 = 3_000;

/// No young event becomes this old during a test. A tenth of it is the pause between two runs, which is short.
const PRUNE_AFTER: (&str, &str) = ("POSTRIDER_PRUNE_AFTER", "100s");

/// A database whose outbox has daily partitions, some of them for days of the past.
async fn partitioned() -> Database {
    let server = ScratchPostgres::builder().setting("wal_level", "logical");
    let server = server.start().unwrap();
    let url = server.socket_url("postgres");
    let arguments = ["init", "--apply", "--partition", "daily"];
    let init = postrider(&arguments, &[("DATABASE_URL", url.as_str())]).output();
    let init = init.unwrap();
    assert!(init.status.success(), "{init:?}");
    let database = Database::on_with(server, &[PRUNE_AFTER]).await;
    for days in [8, 9, 10] {
        database
            .execute(&format!(
                "DO $$ DECLARE day date := (now() AT TIME ZONE 'UTC')::date - {days}; BEGIN \
                 EXECUTE format('CREATE TABLE outbox.%I PARTITION OF outbox.events \
                     FOR VALUES FROM (%L) TO (%L)', 'events_' || to_char(day, 'YYYYMMDD'), \
                     day::timestamp AT TIME ZONE 'UTC', (day + 1)::timestamp AT TIME ZONE 'UTC'); \
                 END $$"
            ))
            .await;
    }
    database
}

async fn insert(database: &Database, count: i64, key: &str, days: u32) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, payload, created_at, occurred_at) \
             SELECT 'order', '{key}-' || i % 50, 'OrderPlaced', '{{}}', at, at \
             FROM generate_series(1, {count}) i, \
                 (SELECT date_trunc('day', now(), 'UTC') - interval '{days} days' + \
                      interval '1 hour') t (at)"
        ))
        .await;
}

/// The partitions, by their age in days; the default one has none.
async fn days(database: &Database) -> Vec<i32> {
    let sql = "SELECT (now() AT TIME ZONE 'UTC')::date - to_date(right(relname, 8), 'YYYYMMDD') \
               FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid \
               WHERE inhparent = 'outbox.events'::regclass AND relname ~ '[0-9]{8}$' ORDER BY 1";
    let rows = database.client.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

async fn wait_until_stored(database: &Database, emulator: &RunningEmulator, count: i64) {
    eventually("everything is stored", || async {
        (i64::try_from(stored(emulator).len()).unwrap() == count).then_some(())
    })
    .await;
    database.wait_until_recorded().await;
}

/// Inserts events while another session keeps a transaction on the table open. Returns the time of the slowest
/// insert.
async fn write_beside_an_open_transaction(database: &Database, time: Duration) -> Duration {
    let holder = connect(&database.url).await;
    let emit = "SELECT outbox.emit('order', 'young', 'OrderPlaced', '{}')";
    holder
        .batch_execute(&format!("BEGIN; {emit}"))
        .await
        .unwrap();
    let (began, mut longest) = (Instant::now(), Duration::ZERO);
    while began.elapsed() < time {
        let insert = Instant::now();
        database.execute(emit).await;
        longest = longest.max(insert.elapsed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    holder.batch_execute("COMMIT").await.unwrap();
    longest
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_drops_old_partitions_while_services_write_and_repeats_nothing() {
    let database = partitioned().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    let host = emulator.addr().to_string();
    let run = || Relay::start_with(&database, &host, &[PRUNE_AFTER]);
    assert_eq!(days(&database).await, [-3, -2, -1, 0, 8, 9, 10]);
    let relay = run();
    relay.wait_for_log("streaming").await;
    for days in [8, 9, 10] {
        insert(&database, OLD, "old", days).await;
    }
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, created_at) \
             SELECT '{BAD}', 'order', 'bad', 'Bad', created_at FROM outbox.events \
             WHERE created_at < now() - interval '9 days' \
               AND created_at > now() - interval '10 days' LIMIT 1"
        ))
        .await;
    let day_of_bad = database
        .number(&format!(
            "SELECT ((now() AT TIME ZONE 'UTC')::date - (created_at AT TIME ZONE 'UTC')::date)::bigint \
             FROM outbox.events WHERE id = '{BAD}'"
        ))
        .await;
    // No day has a partition for these.
    insert(&database, 10, "far", 20).await;
    wait_until_stored(&database, &emulator, 3 * OLD + 10).await;
    relay.stop().await;
    database
        .execute("UPDATE outbox.dispatch SET dispatched_at = now() - interval '8 days'")
        .await;
    // The audit of a new relay moves the floor above the old rows.
    let relay = run();
    let longest = write_beside_an_open_transaction(&database, Duration::from_secs(15)).await;
    assert!(longest < Duration::from_secs(5), "{longest:?}");
    eventually("old partitions are dropped", || async {
        let left = [-3, -2, -1, 0, i32::try_from(day_of_bad).unwrap()];
        (days(&database).await == left).then_some(())
    })
    .await;
    let kept = "SELECT count(*) FROM outbox.events WHERE created_at < now() - interval '7 days'";
    eventually("other old rows are deleted, with their records", || async {
        database.execute("CHECKPOINT").await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        let records = "SELECT count(*) FROM outbox.dispatch d \
                       WHERE dispatched_at < now() - interval '7 days' AND state = 'published'";
        let left = (database.number(kept).await, database.number(records).await);
        (left == (1, 0)).then_some(())
    })
    .await;
    relay.wait_for_log("pruned").await;

    relay.stop().await;
    database.drop_slot().await;
    insert(&database, 100, "late", 0).await;
    let relay = run();
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    let messages = emulator.journal().counts().stored_messages;
    let distinct = u64::try_from(stored(&emulator).len()).unwrap();
    assert_eq!(messages, distinct, "nothing is sent again");
    let young = "SELECT count(*) FROM outbox.events WHERE aggregateid LIKE 'young%' \
                 OR aggregateid LIKE 'late-%'";
    let young = u64::try_from(database.number(young).await).unwrap();
    assert!(distinct >= u64::try_from(3 * OLD + 10).unwrap() + young);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_role_of_the_relay_adds_and_drops_partitions_only_of_the_outbox_and_of_the_past() {
    let database = partitioned().await;
    let emulator = harness::emulator().await;
    let url = crate::privileges::login_role(&database).await;
    let relay_role = connect(&url).await;
    let gone = "SELECT outbox.drop_partition('events_' || to_char(now() AT TIME ZONE 'UTC' + $1::text::interval, 'YYYYMMDD'))";
    for days in ["0 days", "1 day", "-100 days"] {
        relay_role.execute(gone, &[&days]).await.unwrap();
    }
    let others =
        "SELECT outbox.drop_partition('events_default'), outbox.drop_partition('dispatch')";
    relay_role.execute(others, &[]).await.unwrap();
    assert_eq!(days(&database).await, [-3, -2, -1, 0, 8, 9, 10]);
    let direct = relay_role
        .batch_execute("DROP TABLE outbox.events_default")
        .await;
    assert!(direct.is_err());
    // It drops empty partitions, and adds a missing one.
    let tomorrow = "SELECT 'outbox.events_' || to_char(now() AT TIME ZONE 'UTC' + interval '1 day', 'YYYYMMDD')";
    let tomorrow = database.text(tomorrow).await;
    database.execute(&format!("DROP TABLE {tomorrow}")).await;
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[("DATABASE_URL", &url), PRUNE_AFTER]);
    eventually("partitions are added and dropped", || async {
        (days(&database).await == [-3, -2, -1, 0]).then_some(())
    })
    .await;
    relay.stop().await;
}

/// Without records the floor alone proves that an event is published.
#[tokio::test(flavor = "multi_thread")]
async fn without_records_old_partitions_are_dropped_below_the_floor_and_nothing_is_lost() {
    let database = partitioned().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    let host = emulator.addr().to_string();
    let settings = [PRUNE_AFTER, ("POSTRIDER_DISPATCH", "exceptions")];
    let run = || Relay::start_with(&database, &host, &settings);
    let relay = run();
    relay.wait_for_log("streaming").await;
    for days in [8, 9, 10] {
        insert(&database, OLD, "old", days).await;
    }
    database
        .execute(&format!(
            "INSERT INTO outbox.events \
                 (id, aggregatetype, aggregateid, event_type, created_at, occurred_at) \
             SELECT '{BAD}', 'order', 'bad', 'Bad', created_at, created_at FROM outbox.events \
             ORDER BY created_at LIMIT 1"
        ))
        .await;
    eventually(
        "the day of the bad event and the young days stay",
        || async {
            let stays =
                "SELECT count(*) FROM outbox.events WHERE created_at < now() - interval '7 days'";
            (days(&database).await == [-3, -2, -1, 0, 10] && database.number(stays).await == 1)
                .then_some(())
        },
    )
    .await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    database.drop_slot().await;
    insert(&database, 100, "late", 0).await;
    let relay = run();
    eventually("everything is stored", || async {
        (stored(&emulator).len() == 9_100).then_some(())
    })
    .await;
    relay.stop().await;
}
