//! Several relays on one database: each delivers its share of the keys, and nobody else does.

use pubsub_emulator::{Action, Fault, RunningEmulator};

use crate::harness::{self, Database, Relay, eventually, init, insert_orders};

/// A server on which the shards are prepared, and nothing else; `None`, loudly, on PostgreSQL 14.
pub(crate) async fn sharded(shards: &[&str]) -> Option<(Database, RunningEmulator)> {
    sharded_with(shards, &[]).await
}

pub(crate) async fn sharded_with(
    shards: &[&str],
    more: &[(&str, &str)],
) -> Option<(Database, RunningEmulator)> {
    let database = Database::private().await;
    if !has_row_filters(&database).await {
        eprintln!("SKIPPED shards: publications have no row filters before PostgreSQL 15");
        return None;
    }
    database.drop_slot().await;
    for shard in shards {
        prepare(&database, shard, more);
    }
    Some((database, harness::emulator().await))
}

pub(crate) async fn has_row_filters(database: &Database) -> bool {
    let version = "SELECT current_setting('server_version_num')::bigint";
    database.number(version).await >= 150_000
}

/// `postrider init --apply` for one shard.
pub(crate) fn prepare(database: &Database, shard: &str, more: &[(&str, &str)]) {
    let settings = [more, &[("POSTRIDER_SHARD", shard)]].concat();
    init(&database.url, database.slot(), &settings);
}

/// The relay of one shard; of the empty text the one without.
pub(crate) fn start(database: &Database, emulator: &RunningEmulator, shard: &str) -> Relay {
    start_with(database, emulator, shard, &[])
}

pub(crate) fn start_with(
    database: &Database,
    emulator: &RunningEmulator,
    shard: &str,
    more: &[(&str, &str)],
) -> Relay {
    let settings = [more, &[("POSTRIDER_SHARD", shard)]].concat();
    Relay::start_with(database, &emulator.addr().to_string(), &settings)
}

/// Events that have no record, of which the share `shard` of 2 is counted.
pub(crate) async fn unrecorded(database: &Database, shard: i32) -> i64 {
    database
        .number(&format!(
            "SELECT count(*) FROM outbox.events e \
             WHERE (coalesce(hashtext(aggregateid), 0) & 2147483647) % 2 = {shard} \
               AND NOT EXISTS (SELECT FROM outbox.dispatch d WHERE d.event_id = e.id)"
        ))
        .await
}

/// Everything has come once, in order.
pub(crate) async fn assert_once_and_in_order(database: &Database, emulator: &RunningEmulator) {
    database.wait_until_recorded().await;
    let report = harness::check(database, emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
}

/// Whether each key was recorded by one shard of two, and both have some.
async fn assert_each_key_has_one_shard(database: &Database) {
    let several = "SELECT count(*) FROM (SELECT FROM outbox.dispatch \
                   GROUP BY ordering_key HAVING min(ordinal % 2) <> max(ordinal % 2)) k";
    assert_eq!(database.number(several).await, 0);
    let shards = "SELECT count(DISTINCT ordinal % 2) FROM outbox.dispatch";
    assert_eq!(database.number(shards).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_shards_deliver_everything_once_between_them_each_key_by_one_and_in_order() {
    let Some((database, emulator)) = sharded(&["0/2", "1/2"]).await else {
        return;
    };
    let relays = ["0/2", "1/2"].map(|shard| start(&database, &emulator, shard));
    insert_orders(&database, 2_000, 40).await;
    // A transaction with rows of both.
    database
        .execute(
            "INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             SELECT 'order', 'o-' || n % 40, 'OrderPlaced', 10000 + n, '{}', clock_timestamp() \
             FROM generate_series(1, 2000) n",
        )
        .await;
    insert_orders(&database, 500, 40).await;
    assert_once_and_in_order(&database, &emulator).await;
    assert_each_key_has_one_shard(&database).await;
    for relay in relays {
        assert_goes_on(&relay);
        relay.stop().await;
    }
}

/// Its session goes on, and it has missed nothing.
fn assert_goes_on(relay: &Relay) {
    let log = relay.log();
    for trouble in ["publication-", "shards-mixed", "recover", "trying again"] {
        assert!(!log.contains(trouble), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_of_one_shard_repeats_what_had_no_record_and_the_other_goes_on() {
    let Some((database, emulator)) = sharded(&["0/2", "1/2"]).await else {
        return;
    };
    let other = start(&database, &emulator, "1/2");
    for round in 0..3 {
        let relay = start(&database, &emulator, "0/2");
        insert_orders(&database, 700 + round, 30).await;
        relay.kill_9();
        insert_orders(&database, 300, 30).await;
        eventually("the other shard has recorded its share", || async {
            (unrecorded(&database, 1).await == 0).then_some(())
        })
        .await;
    }
    let _relay = start(&database, &emulator, "0/2");
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
    assert_each_key_has_one_shard(&database).await;
    assert_goes_on(&other);
}

/// Of one key nothing is answered, so that both slots stand before what is recorded: several pages of
/// it, where most rows of each page may be the other's.
#[tokio::test(flavor = "multi_thread")]
async fn a_shard_that_comes_again_to_what_both_have_recorded_repeats_nothing_of_it() {
    let Some((database, emulator)) = sharded(&["0/2", "1/2"]).await else {
        return;
    };
    for key in ["o-1", "o-2", "o-3", "o-4"] {
        let fault = Fault::new(Action::NeverAnswer).on_ordering_key(key);
        emulator.faults().inject(fault);
    }
    let relays = ["0/2", "1/2"].map(|shard| start(&database, &emulator, shard));
    insert_orders(&database, 100, 20).await;
    database
        .execute(
            "INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             SELECT 'order', 'o-' || n % 20, 'OrderPlaced', 1000 + n, '{}', clock_timestamp() \
             FROM generate_series(1, 12000) n",
        )
        .await;
    eventually("all but what is withheld is recorded", || async {
        let missing = unrecorded(&database, 0).await + unrecorded(&database, 1).await;
        (missing == 12_100 / 20 * 4).then_some(())
    })
    .await;
    for relay in relays {
        relay.kill_9();
    }
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    emulator.faults().lift_all();
    let _relays = ["0/2", "1/2"].map(|shard| start(&database, &emulator, shard));
    assert_once_and_in_order(&database, &emulator).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_without_a_key_are_delivered_by_the_first_shard() {
    let Some((database, emulator)) = sharded(&["0/3", "1/3", "2/3"]).await else {
        return;
    };
    let _relays = ["0/3", "1/3", "2/3"].map(|shard| start(&database, &emulator, shard));
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
             SELECT 'order', CASE WHEN n % 3 = 0 THEN 'k-' || n END, 'OrderPlaced', '{}' \
             FROM generate_series(1, 600) n",
        )
        .await;
    assert_once_and_in_order(&database, &emulator).await;
    let elsewhere = "SELECT count(*) FROM outbox.dispatch \
                     WHERE ordering_key IS NULL AND ordinal % 3 <> 0";
    assert_eq!(database.number(elsewhere).await, 0);
}

const TABLES: &str = "\
    [[tables]]\ntable = \"public.jobs\"\ncolumns = { id = \"seq\" }\n\
    [[tables]]\ntable = \"public.sales\"\n\
    [[tables]]\ntable = \"public.notes\"\ncolumns = { aggregateid = \"\" }\nordering = \"none\"\n";

/// Keys that are numbers, in partitions, and uuids; and rows without keys, shared out by their id.
const CREATE_TABLES: &str = "\
    CREATE TABLE public.jobs (seq bigserial, aggregatetype text, aggregateid bigint, \
        event_type text, payload json) PARTITION BY RANGE (seq); \
    CREATE TABLE public.jobs_1 PARTITION OF public.jobs FOR VALUES FROM (1) TO (200); \
    CREATE TABLE public.jobs_2 PARTITION OF public.jobs FOR VALUES FROM (200) TO (100000); \
    CREATE TABLE public.sales (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype text, \
        aggregateid uuid, event_type varchar(40), payload json); \
    CREATE TABLE public.notes (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), \
        aggregatetype varchar(20), event_type text, payload json)";

const INSERT_INTO_TABLES: &str = "\
    INSERT INTO public.jobs (aggregatetype, aggregateid, event_type, payload) \
    SELECT 'order', n % 9, 'Job', '{}' FROM generate_series(1, 400) n; \
    INSERT INTO public.sales (aggregatetype, aggregateid, event_type, payload) \
    SELECT 'order', md5((n % 9)::text)::uuid, 'Sale', '{}' FROM generate_series(1, 400) n; \
    INSERT INTO public.notes (aggregatetype, event_type, payload) \
    SELECT 'order', 'Note', '{}' FROM generate_series(1, 400) n";

#[tokio::test(flavor = "multi_thread")]
async fn numbers_uuids_partitions_and_rows_without_keys_are_shared_out_too() {
    let Some((database, emulator)) = sharded(&[]).await else {
        return;
    };
    database.execute(CREATE_TABLES).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), TABLES).unwrap();
    let more = [("POSTRIDER_CONFIG", file.path().to_str().unwrap())];
    for shard in ["0/2", "1/2"] {
        prepare(&database, shard, &more);
    }
    let relays = ["0/2", "1/2"].map(|shard| start_with(&database, &emulator, shard, &more));
    database.execute(INSERT_INTO_TABLES).await;
    let records = async |count| {
        let sql = "SELECT count(*) FROM outbox.dispatch";
        eventually(&format!("{count} rows are recorded"), || async {
            (database.number(sql).await >= count).then_some(())
        })
        .await;
        assert_eq!(database.number(sql).await, count);
        assert_eq!(emulator.journal().counts().stored_messages, count as u64);
    };
    records(1_200).await;
    let keyed = "SELECT count(*) FROM (SELECT FROM outbox.dispatch WHERE ordering_key IS NOT NULL \
                 GROUP BY ordering_key HAVING min(ordinal % 2) <> max(ordinal % 2)) k";
    assert_eq!(database.number(keyed).await, 0);
    let both = "SELECT count(*) FROM (SELECT source_id IS NULL, ordering_key IS NULL, ordinal % 2 \
                FROM outbox.dispatch GROUP BY 1, 2, 3) s";
    assert_eq!(database.number(both).await, 6);
    // The tables tell the same shares as the log.
    drop(relays);
    for shard in ["0of2", "1of2"] {
        let sql = format!("SELECT pg_drop_replication_slot('postrider_{shard}')");
        eventually("the slot is free and dropped", || async {
            database.client.batch_execute(&sql).await.ok()
        })
        .await;
    }
    database.execute(INSERT_INTO_TABLES).await;
    let _relays = ["0/2", "1/2"].map(|shard| start_with(&database, &emulator, shard, &more));
    records(2_400).await;
    assert_eq!(database.number(keyed).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_slot_of_one_shard_is_made_up_for_with_its_share_alone() {
    let Some((database, emulator)) = sharded(&["0/2", "1/2"]).await else {
        return;
    };
    let relays = ["0/2", "1/2"].map(|shard| start(&database, &emulator, shard));
    insert_orders(&database, 300, 20).await;
    database.wait_until_recorded().await;
    for relay in relays {
        relay.stop().await;
    }
    insert_orders(&database, 300, 20).await;
    database
        .execute("SELECT pg_drop_replication_slot('postrider_1of2')")
        .await;
    let relay = start(&database, &emulator, "1/2");
    relay.wait_for_log("recovered: everything").await;
    assert_eq!(unrecorded(&database, 1).await, 0);
    assert!(unrecorded(&database, 0).await > 100);
    let other = start(&database, &emulator, "0/2");
    insert_orders(&database, 300, 20).await;
    assert_once_and_in_order(&database, &emulator).await;
    assert!(!other.log().contains("recover"), "{}", other.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_gap_in_one_shards_publication_are_delivered_by_that_shard() {
    let Some((database, emulator)) = sharded(&["0/2", "1/2"]).await else {
        return;
    };
    let relays = ["0/2", "1/2"].map(|shard| start(&database, &emulator, shard));
    insert_orders(&database, 100, 20).await;
    eventually("the first audits are complete", || async {
        let audited = "SELECT count(*) FROM outbox.relay WHERE audited_at IS NOT NULL";
        (database.number(audited).await == 2).then_some(())
    })
    .await;
    database
        .execute("ALTER PUBLICATION postrider_1of2 DROP TABLE outbox.events")
        .await;
    database
        .execute(
            "INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             SELECT 'order', 'gap-' || n % 9, 'OrderPlaced', n, '{}', clock_timestamp() \
             FROM generate_series(1, 90) n",
        )
        .await;
    prepare(&database, "1/2", &[]);
    assert_once_and_in_order(&database, &emulator).await;
    let [other, relay] = relays;
    relay.wait_for_log("publication-gap").await;
    assert!(!other.log().contains("publication-gap"), "{}", other.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publication_with_another_filter_is_refused_and_noticed() {
    let Some((database, emulator)) = sharded(&["0/2", "1/2"]).await else {
        return;
    };
    let relay = start(&database, &emulator, "0/2");
    insert_orders(&database, 10, 5).await;
    relay.wait_for_log("streaming").await;
    let with = |filter: &str| {
        format!(
            "BEGIN; ALTER PUBLICATION postrider_0of2 DROP TABLE outbox.events; \
             ALTER PUBLICATION postrider_0of2 ADD TABLE outbox.events {filter}; COMMIT"
        )
    };
    let others = "WHERE (mod(int4and(coalesce(hashtext(aggregateid), 0), 2147483647), 2) = 1)";
    let ours = "WHERE (mod(int4and(coalesce(hashtext(aggregateid), 0), 2147483647), 2) = 0)";
    for (nth, filter) in ["", others, "WHERE (aggregatetype = 'order')"]
        .iter()
        .enumerate()
    {
        database.execute(&with(filter)).await;
        let says = |text, times| {
            let relay = &relay;
            eventually("the relay says so once more", move || async move {
                (relay.log().matches(text).count() > times).then_some(())
            })
        };
        says("may be another relay's to send", nth).await;
        // What comes meanwhile is not this relay's to send, or not known to be.
        insert_orders(&database, 10, 5).await;
        let second = start(&database, &emulator, "0/2");
        let status = second.wait().await;
        assert_eq!(status.code(), Some(3), "{filter}");
        database.execute(&with(ours)).await;
        says("INFO streaming", nth + 1).await;
    }
    let _other = start(&database, &emulator, "1/2");
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_are_refused_before_postgresql_15() {
    let database = Database::private().await;
    if has_row_filters(&database).await {
        eprintln!("SKIPPED shards before PostgreSQL 15: this is a newer one");
        return;
    }
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator, "0/2");
    relay.wait_for_error("postgres-version").await;
    assert_eq!(relay.wait().await.code(), Some(3));
}
