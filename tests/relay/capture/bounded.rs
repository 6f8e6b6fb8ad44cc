//! Tests that each statement of a recovery reads a bounded number of rows of a captured table. A schema
//! change, and the writers that wait behind it, therefore wait for at most one page of rows.

use pubsub_emulator::{Action, Fault};

use super::World;
use super::table::Kind;
use crate::harness::{self, eventually};

const ROWS: u32 = 20_000;

/// Maximum number of rows that one statement may read; the same value as `PAGE_ROWS` in
/// `src/capture/scan.rs`.
const PAGE_ROWS: i64 = 5_000;

/// Maximum number of rows that one statement may read if the table has no index: eight rows, each about 1 kB large, in
/// each of 2,048 blocks. (This number of blocks is `RANGE_BLOCKS` in `src/capture/scan.rs`.)
const RANGE_ROWS: i64 = 8 * 2_048;

/// Replaces the function that computes event ids with a function that also records the statement of
/// each call.
const COUNT_CALLS: &str = "\
    CREATE TABLE public.calls (process int, statement timestamptz); \
    CREATE OR REPLACE FUNCTION outbox.event_uuid(identity text, id text, inserted_xid xid8 DEFAULT null) \
    RETURNS uuid LANGUAGE plpgsql AS $$ BEGIN \
        INSERT INTO public.calls VALUES (pg_backend_pid(), statement_timestamp()); \
        RETURN CASE WHEN id IS NOT NULL THEN \
            md5(identity || ':' || id || coalesce(':' || inserted_xid::text, ''))::uuid END; \
    END $$";

/// Runs the SQL `prepare`, blocks a key, and loses the slot. Checks that no statement of the recovery reads
/// more than `at_most` rows. Published events have no records here, so the recovery reads all rows of the
/// blocked key, and `ROWS` rows of other keys.
async fn a_recovery_with_a_blocked_key_is_bounded(prepare: &str, at_most: i64) {
    let mut world = World::new(Kind::Numbered, 20).await;
    world.execute(prepare).await;
    let more = ("POSTRIDER_DISPATCH", "exceptions".to_owned());
    world.more.push(more);
    // This transaction keeps the floor below the new rows, so that the recovery must read them.
    let slow = harness::connect(&world.database.url).await;
    let begin = "BEGIN; SELECT pg_current_xact_id()";
    slow.batch_execute(begin).await.unwrap();
    world.insert("a", 50).await;
    let bad = world.row_sql("a-1");
    world.execute(&bad).await;
    let id = "SELECT outbox.event_uuid('public.numbered', id::text, inserted_xid)::text \
              FROM public.numbered ORDER BY id DESC LIMIT 1";
    let bad = world.database.text(id).await;
    let poison = Action::Poison {
        event_id: bad.clone(),
    };
    world.emulator.faults().inject(Fault::new(poison));
    world.insert("a", 50).await;
    let relay = world.relay();
    let blocked = "SELECT count(*) FROM outbox.dispatch WHERE state = 'quarantined'";
    eventually("the key is blocked", || async {
        (world.database.number(blocked).await == 11).then_some(())
    })
    .await;
    relay.stop().await;
    slow.batch_execute("ROLLBACK").await.unwrap();
    world.insert_at_once("b", ROWS).await;
    world.database.drop_slot().await;
    world.execute(COUNT_CALLS).await;
    let relay = world.relay();
    relay.wait_for_log("recovered").await;
    let most = "SELECT max(n) FROM (SELECT count(*) AS n FROM public.calls \
                GROUP BY process, statement) s";
    let most = world.database.number(most).await;
    assert!(most > 0, "the recovery has read the table");
    assert!(most <= at_most, "one statement has read {most} rows");
    // The recovery repeats those rows of the blocked key that come before the bad row. The bad row and the
    // ten rows after it stay in quarantine.
    let waiting = "SELECT outbox.event_uuid('public.numbered', id::text, inserted_xid)::text \
                   FROM public.numbered WHERE aggregateid = 'a-1' ORDER BY id DESC LIMIT 11";
    let waiting = world.database.client.query(waiting, &[]).await.unwrap();
    let waiting: Vec<String> = waiting.iter().map(|row| row.get(0)).collect();
    assert!(waiting.contains(&bad));
    world.note().await;
    for events in world.expected.values_mut() {
        events.retain(|id| !waiting.contains(id));
    }
    let report = world.report();
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    assert_eq!(world.database.number(blocked).await, 11);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_with_a_blocked_key_reads_page_by_page_along_the_ids() {
    a_recovery_with_a_blocked_key_is_bounded("SELECT 1", PAGE_ROWS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_with_a_blocked_key_reads_page_by_page_without_an_index_on_the_ids() {
    let prepare = "ALTER TABLE public.numbered DROP CONSTRAINT numbered_pkey, ADD seq bigserial; \
                   CREATE UNIQUE INDEX ON public.numbered (seq)";
    a_recovery_with_a_blocked_key_is_bounded(prepare, PAGE_ROWS).await;
}

/// Without any index, the recovery reads the table by ranges of blocks.
#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_with_a_blocked_key_reads_ranges_of_blocks_without_any_index() {
    let prepare = "ALTER TABLE public.numbered DROP CONSTRAINT numbered_pkey, \
                   ADD filler text DEFAULT repeat('x', 950)";
    a_recovery_with_a_blocked_key_is_bounded(prepare, RANGE_ROWS).await;
}
