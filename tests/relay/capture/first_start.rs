//! Tests of the first start on a table with old rows. The relay does not publish the old rows and
//! writes no records for them. The relay delivers new rows at once.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use pubsub_emulator::Emulator;
use tokio::sync::oneshot;

use super::table::Kind;
use super::{World, assert_done};
use crate::harness::{self, Relay, eventually};
use crate::privileges::login_role;

const HISTORY: u32 = 200_000;
/// How long the relay may take until it streams.
const STREAMS_WITHIN: Duration = Duration::from_secs(2);
/// Maximum number of first starts that a test tries. One fast start is enough, because a slow start may be
/// the fault of other programs on the machine.
const BUSY_STARTS: u32 = 5;

/// Watches the sessions of the relay until a message arrives in `until`. Returns every transaction that was open for
/// more than a second. Such a transaction keeps vacuum from removing rows.
async fn kept_open(url: String, until: oneshot::Receiver<()>) -> HashSet<String> {
    const OPEN: &str = "\
        SELECT concat_ws(' ', application_name, state, 'xid', backend_xid, 'xmin', backend_xmin, query) \
        FROM pg_stat_activity WHERE application_name LIKE 'postrider%' \
            AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL OR state LIKE 'idle in%') \
            AND coalesce(xact_start, query_start) < clock_timestamp() - interval '1 s'";
    let client = harness::connect(&url).await;
    let mut kept = HashSet::new();
    let mut until = std::pin::pin!(until);
    loop {
        let rows = client.query(OPEN, &[]).await.unwrap();
        kept.extend(rows.iter().map(|row| row.get::<_, String>(0)));
        let pause = Duration::from_millis(20);
        if tokio::time::timeout(pause, &mut until).await.is_ok() {
            return kept;
        }
    }
}

/// Starts a relay without a slot. Returns the relay if it streams in time and keeps no transaction open.
/// Otherwise returns what went wrong.
async fn light_first_start(world: &World) -> Result<Relay, String> {
    let (end, until) = oneshot::channel();
    let watch = tokio::spawn(kept_open(world.database.url.clone(), until));
    let began = Instant::now();
    let relay = world.streaming().await;
    let took = began.elapsed();
    // The relay compares the tables soon after its start.
    world.wait_until_compared(&relay).await;
    // A transaction that is open now may be too young for `kept_open`, which reports transactions after a second. So
    // wait until each of these transactions has ended, or has been open for 1.5 s.
    let now = world.database.text("SELECT clock_timestamp()::text").await;
    let young = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'postrider%' \
         AND xact_start <= '{now}' AND xact_start > clock_timestamp() - interval '1.5 s'"
    );
    eventually("no young transaction is open", || async {
        (world.database.number(&young).await == 0).then_some(())
    })
    .await;
    end.send(()).unwrap();
    let kept = watch.await.unwrap();
    println!(
        "{:?}: streaming after {took:?} on {HISTORY} old rows",
        world.kind
    );
    if took < STREAMS_WITHIN && kept.is_empty() {
        return Ok(relay);
    }
    let log = relay.log();
    relay.stop().await;
    Err(format!("{took:?} {kept:?}\n{log}"))
}

async fn a_long_history_costs_nothing(kind: Kind) {
    let mut world = World::new(kind, HISTORY).await.without_slot().await;
    let mut started = light_first_start(&world).await;
    for _ in 1..BUSY_STARTS {
        if started.is_err() {
            world = world.without_slot().await;
            started = light_first_start(&world).await;
        }
    }
    let relay = started.unwrap();
    world.insert("new", 100).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    assert_only_new_rows_have_a_record(&world, 100).await;
    world.assert_published_once(relay).await;
    assert_only_new_rows_have_a_record(&world, 100).await;
}

async fn assert_only_new_rows_have_a_record(world: &World, new: i64) {
    let records = "SELECT count(*) FROM outbox.dispatch";
    assert_eq!(world.database.number(records).await, new);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_history_of_events_costs_nothing_at_the_first_start() {
    a_long_history_costs_nothing(Kind::Events).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_history_of_numbered_rows_costs_nothing_at_the_first_start() {
    a_long_history_costs_nothing(Kind::Numbered).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_history_without_numbered_ids_costs_nothing_at_the_first_start() {
    a_long_history_costs_nothing(Kind::Uuid).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_history_in_partitions_costs_nothing_at_the_first_start() {
    a_long_history_costs_nothing(Kind::Partitioned).await;
}

/// Drops the slot, lets an operator request a recovery, and drops the slot again after this recovery.
/// Checks that no old row is published. With `by_init`, the first loss of the slot comes before any relay
/// has run. Otherwise it comes right after a first start.
async fn no_old_row_is_published_after_a_loss(kind: Kind, by_init: bool) {
    let mut world = World::new(kind, 2_000).await;
    if !by_init {
        world = world.without_slot().await;
        world.streaming().await.stop().await;
    }
    world.insert("a", 30).await;
    world.database.drop_slot().await;
    world.insert("b", 30).await;
    let asked = world.run(&["recover", "--yes"], &[]);
    assert!(asked.status.success(), "{asked:?}");
    let relay = world.relay();
    relay.wait_for_log("recovered").await;
    world.insert("c", 30).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    relay.stop().await;
    world.database.drop_slot().await;
    world.insert("d", 30).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_old_event_is_published_when_the_slot_is_lost_before_the_relay_has_run() {
    no_old_row_is_published_after_a_loss(Kind::Events, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_old_event_is_published_when_the_slot_is_lost_right_after_the_first_start() {
    no_old_row_is_published_after_a_loss(Kind::Events, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_old_numbered_row_is_published_when_the_slot_is_lost() {
    no_old_row_is_published_after_a_loss(Kind::Numbered, true).await;
    no_old_row_is_published_after_a_loss(Kind::Numbered, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_old_row_without_a_numbered_id_is_published_when_the_slot_is_lost() {
    no_old_row_is_published_after_a_loss(Kind::Uuid, true).await;
    no_old_row_is_published_after_a_loss(Kind::Uuid, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_old_row_of_a_partition_is_published_when_the_slot_is_lost() {
    no_old_row_is_published_after_a_loss(Kind::Partitioned, true).await;
    no_old_row_is_published_after_a_loss(Kind::Partitioned, false).await;
}

/// The events wait for their missing topic, so none of them has an outcome when the slot is lost. (In an old
/// version, a single such event kept the first audit from ever finishing.)
#[tokio::test(flavor = "multi_thread")]
async fn no_old_row_is_published_when_the_topic_is_missing_and_the_slot_is_lost() {
    let emulator = Emulator::builder().listen("127.0.0.1:0".parse().unwrap());
    let emulator = emulator.start().await.unwrap();
    let mut world = World::with_emulator(Kind::Numbered, 2_000, emulator).await;
    let relay = world.relay();
    world.insert("a", 30).await;
    relay.wait_for_log("topic-missing").await;
    relay.stop().await;
    world.database.drop_slot().await;
    let relay = world.relay();
    world.insert("b", 30).await;
    relay.wait_for_log("topic-missing").await;
    let topic = "projects/demo/topics/order.events";
    world.emulator.create_topic(topic).await.unwrap();
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lagging_foreign_slot_makes_no_old_row_count_as_new() {
    let mut world = World::new(Kind::Numbered, 0).await.without_slot().await;
    let slot = "SELECT pg_create_logical_replication_slot('lagging', 'pgoutput')";
    world.execute(slot).await;
    world.execute("CREATE DATABASE other").await;
    let url = world.database.server().url("other");
    let other = harness::connect(&url).await;
    let slot = "SELECT pg_create_logical_replication_slot('elsewhere', 'test_decoding')";
    other.batch_execute(slot).await.unwrap();
    world
        .execute(&Kind::Numbered.insert_old("TABLE_NAME", 1_000))
        .await;
    let relay = world.streaming().await;
    world.insert("a", 30).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    world.database.drop_slot().await;
    world.insert("b", 30).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

/// The relay delivers every row that is committed after `init` has created the slot, even if the
/// row is committed before the relay starts.
#[tokio::test(flavor = "multi_thread")]
async fn rows_committed_between_init_and_the_first_start_are_delivered() {
    for kind in [Kind::Events, Kind::Numbered, Kind::Uuid, Kind::Partitioned] {
        let mut world = World::new(kind, 100).await;
        world.insert("early", 50).await;
        let relay = world.relay();
        world.insert("late", 50).await;
        world.assert_published_once(relay).await;
    }
}

/// `init` has captured the table, so the relay must publish its rows even if the slot is lost before any
/// relay has run.
#[tokio::test(flavor = "multi_thread")]
async fn rows_committed_after_init_are_delivered_if_the_slot_is_lost_before_the_first_start() {
    let mut world = World::new(Kind::Numbered, 100).await;
    world.insert("early", 50).await;
    world.database.drop_slot().await;
    world.insert("later", 50).await;
    let relay = world.streaming().await;
    world.insert("late", 50).await;
    assert!(
        relay.log().contains("that are captured for the first time"),
        "{}",
        relay.log()
    );
    world.assert_published_once(relay).await;
}

/// Running `init` again does not change which rows belong to the relay.
#[tokio::test(flavor = "multi_thread")]
async fn init_can_run_again_at_any_time() {
    let (mut world, relay) = World::served(Kind::Numbered, 30).await;
    let config = world.settings.path().display().to_string();
    let url = world.database.url.clone();
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_CONFIG", &config),
    ];
    assert_done(&["init", "--apply"], &environment);
    world.insert("a", 30).await;
    relay.stop().await;
    world.database.drop_slot().await;
    world.insert("b", 30).await;
    let _ = world.run(&["init", "--apply"], &[]);
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

/// The first start fails, because the role of the relay has no right to read the table. The second start
/// must still publish the old rows (`start = all`), although a relay has already started once.
#[tokio::test(flavor = "multi_thread")]
async fn with_start_all_a_retry_after_a_missing_right_publishes_old_rows_in_order() {
    let mut world = World::new(Kind::Numbered, 0).await.without_slot().await;
    let url = login_role(&world.database).await;
    world.more.push(("DATABASE_URL", url));
    world.more.push(("POSTRIDER_START", "all".to_owned()));
    world.insert("a", 50).await;
    world
        .execute("REVOKE SELECT ON TABLE_NAME FROM postrider_relay")
        .await;
    let relay = world.relay();
    relay.wait_for_error("privilege-missing").await;
    relay.wait().await;
    world
        .execute("GRANT SELECT ON TABLE_NAME TO postrider_relay")
        .await;
    let relay = world.relay();
    world.insert("a", 50).await;
    world.assert_published_once(relay).await;
}

/// The first start waits for the topic of one row. A later restart with `start = all` must not publish
/// the table's old rows, because this setting only applies to new tables.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_start_that_waits_for_a_topic_never_publishes_old_rows_later() {
    let mut world = World::new(Kind::Events, 100).await.without_slot().await;
    let relay = world.streaming().await;
    let waits = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
                 VALUES ('nowhere', 'n', 'Waits', '{}')";
    world.execute(waits).await;
    relay.wait_for_log("topic-missing").await;
    world.insert("a", 10).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    relay.stop().await;
    world.more.push(("POSTRIDER_START", "all".to_owned()));
    let relay = world.relay();
    world.insert("b", 10).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    let topic = "projects/demo/topics/nowhere.events";
    world.emulator.create_topic(topic).await.unwrap();
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    let messages = world.emulator.journal().counts().stored_messages;
    assert_eq!(messages, 21, "no old row");
}

/// The number of rows that all sessions have read from the table and its partitions, plus the
/// number of entries that they have read from the indexes.
async fn rows_read(world: &World) -> i64 {
    let tables = format!(
        "'{table}'::regclass UNION \
         SELECT inhrelid FROM pg_inherits WHERE inhparent = '{table}'::regclass",
        table = world.table
    );
    let sql = format!(
        "SELECT (SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables t \
                 WHERE t.relid IN (SELECT {tables}))::bigint \
              + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes i \
                 WHERE i.relid IN (SELECT {tables}))::bigint"
    );
    world.database.number(&sql).await
}

/// Checks that the first start and the first audit of new rows read no old rows.
async fn a_first_start_reads_no_old_row(kind: Kind, old_rows: u32, more: &[(&'static str, &str)]) {
    const NEW: u32 = 100;
    /// Maximum number of rows that may be read. Larger than `NEW`, because each new row may be read
    /// several times.
    const READ_AT_MOST: i64 = 3_000;
    let mut world = World::new(kind, old_rows).await.without_slot().await;
    world.more.extend(
        more.iter()
            .map(|(name, value)| (*name, (*value).to_owned())),
    );
    let before = rows_read(&world).await;
    let relay = world.streaming().await;
    world.insert("new", NEW).await;
    let stored = || world.emulator.journal().counts().stored_messages;
    eventually("the new rows are published", || async {
        (stored() == u64::from(NEW)).then_some(())
    })
    .await;
    let floor = "SELECT floor::text::bigint FROM outbox.capture";
    let captured = world.database.number(floor).await;
    // Restart the relay: its first audit runs soon after the start and compares the new rows.
    relay.stop().await;
    let relay = world.streaming().await;
    eventually("the new rows are compared", || async {
        (world.database.number(floor).await > captured).then_some(())
    })
    .await;
    // A session writes its statistics at the latest when it ends, so stop the relay before reading
    // them.
    relay.stop().await;
    let read = rows_read(&world).await - before;
    println!("{kind:?}: {read} rows read with {old_rows} old rows");
    assert!(read <= READ_AT_MOST, "{read} rows read");
    assert_eq!(stored(), u64::from(NEW), "no old row");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_start_reads_no_row_of_a_million_old_events() {
    a_first_start_reads_no_old_row(Kind::Events, 1_000_000, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_start_reads_no_old_row_of_a_service_s_table() {
    for kind in [Kind::Numbered, Kind::Uuid, Kind::Partitioned] {
        a_first_start_reads_no_old_row(kind, 20_000, &[]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_start_without_records_reads_no_old_row() {
    let more = [("POSTRIDER_DISPATCH", "exceptions")];
    for kind in [Kind::Events, Kind::Numbered] {
        a_first_start_reads_no_old_row(kind, 20_000, &more).await;
    }
}
