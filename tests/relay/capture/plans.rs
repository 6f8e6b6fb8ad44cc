//! Checks the plans of the statements that read a captured table: a first start, an audit and a recovery must
//! read a table of 100,000,000 rows only by its indexes. The test table has fewer rows, but fake statistics that
//! say 100,000,000.

use std::collections::HashSet;

use scratch_postgres::ScratchPostgres;
use serde_json::Value;

use super::World;
use super::table::Kind;
use crate::harness::{self, eventually};

/// Number of rows in the table before the first start.
const OLD: u32 = 20_000;
/// Number of rows according to the fake statistics, for the table and each of its partitions and indexes.
const BELIEVED: &str = "100000000";
const NEW: u32 = 100;
/// Maximum number of rows that one node of a plan may read: enough for the new rows and a few others, but
/// less than a page of old rows.
const READ_AT_MOST: f64 = 1_000.0;
/// Number of rows that the recovery publishes: more than a page.
const UNRECORDED: u32 = 6_000;
/// Maximum number of rows that one node of a plan of the recovery may read: a page of 5,000 rows and a few others.
const PAGE: f64 = 5_100.0;

/// Starts a server that logs the plan of each statement.
fn explaining_server() -> ScratchPostgres {
    let settings = [
        ("wal_level", "logical"),
        ("max_prepared_transactions", "10"),
        // Switch autovacuum off, because it would overwrite the fake statistics.
        ("autovacuum", "off"),
        ("log_line_prefix", "[%a] "),
        ("session_preload_libraries", "auto_explain"),
        ("auto_explain.log_min_duration", "0"),
        ("auto_explain.log_format", "json"),
        ("auto_explain.log_analyze", "on"),
        ("auto_explain.log_timing", "off"),
        ("auto_explain.log_nested_statements", "on"),
    ];
    let builder = settings
        .into_iter()
        .fold(ScratchPostgres::builder(), |builder, (name, value)| {
            builder.setting(name, value)
        });
    builder.start().unwrap()
}

/// Returns the plans of the relay's statements from the server log.
fn plans(log: &str) -> Vec<Value> {
    let mut plans = Vec::new();
    for entry in log
        .split("\n[")
        .filter(|entry| entry.starts_with("postrider"))
    {
        let Some((_, plan)) = entry.split_once("plan:\n") else {
            continue;
        };
        let lines: Vec<&str> = plan
            .lines()
            .take_while(|line| line.starts_with('\t'))
            .collect();
        plans.push(serde_json::from_str(&lines.join("\n")).unwrap());
    }
    plans
}

/// Calls `visit` for `node` and each node below it, except for nodes that were not executed. For example,
/// the scans in a statement with LIMIT 0, which only checks the relay's rights, are not executed.
fn walk<'p>(node: &'p Value, visit: &mut impl FnMut(&'p Value)) {
    if node["Actual Loops"].as_f64() == Some(0.0) {
        return;
    }
    visit(node);
    for child in node["Plans"].as_array().into_iter().flatten() {
        walk(child, visit);
    }
}

/// Returns the number of rows that a node has read in all its executions.
fn rows_read(node: &Value) -> f64 {
    let of = |name: &str| node[name].as_f64().unwrap_or(0.0);
    let removed = of("Rows Removed by Filter") + of("Rows Removed by Index Recheck");
    (of("Actual Rows") + removed) * of("Actual Loops")
}

/// Makes the planner believe that the table of `world` and its indexes have [`BELIEVED`] rows. Returns a
/// query for the OIDs of the table and its partitions.
async fn fake_statistics(world: &World) -> String {
    let tables = format!(
        "SELECT '{table}'::regclass::oid UNION \
         SELECT inhrelid FROM pg_inherits WHERE inhparent = '{table}'::regclass",
        table = world.table
    );
    world.execute("ANALYZE").await;
    world
        .execute(&format!(
            "UPDATE pg_class SET reltuples = {BELIEVED} WHERE relkind IN ('r', 'i') AND (oid IN ({tables}) \
                 OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid IN ({tables})))"
        ))
        .await;
    let explain = format!("EXPLAIN (FORMAT JSON) SELECT * FROM {}", world.table);
    let explained: Value = world
        .database
        .client
        .query_one(&explain, &[])
        .await
        .unwrap()
        .get(0);
    let believed = explained[0]["Plan"]["Plan Rows"].as_f64().unwrap();
    assert!(believed >= 1e8, "{explained}");
    tables
}

async fn a_first_start_reads_a_huge_table_by_index(kind: Kind, dispatch: &str) {
    let emulator = harness::emulator().await;
    let world = World::on(explaining_server(), kind, OLD, emulator).await;
    let mut world = world.without_slot().await;
    world.more.push(("POSTRIDER_DISPATCH", dispatch.to_owned()));
    let tables = fake_statistics(&world).await;
    let relay = world.streaming().await;
    world.insert("new", NEW).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    // Restart the relay: its first audit runs soon after the start and compares the new rows.
    relay.stop().await;
    let floor = "SELECT floor::text::bigint FROM outbox.capture";
    let before = world.database.number(floor).await;
    let relay = world.streaming().await;
    eventually("the new rows are compared", || async {
        (world.database.number(floor).await > before).then_some(())
    })
    .await;
    relay.stop().await;
    let first = every_plan_is_bounded(&mut world, kind, &tables, 0, READ_AT_MOST).await;
    if dispatch == "full" {
        world.database.drop_slot().await;
        world.insert_at_once("late", UNRECORDED).await;
        let relay = world.relay();
        relay.wait_for_log("recovered").await;
        world.note().await;
        world.wait_until_published(&relay).await;
        relay.stop().await;
        every_plan_is_bounded(&mut world, kind, &tables, first, PAGE).await;
    }
}

/// Checks that no statement in the server log, from the byte `from` on, has scanned or sorted more than `at_most`
/// rows of the tables whose OIDs the query `tables` returns. Returns the length of the log.
async fn every_plan_is_bounded(
    world: &mut World,
    kind: Kind,
    tables: &str,
    from: usize,
    at_most: f64,
) -> usize {
    let names = format!("SELECT array_agg(relname::text) FROM pg_class WHERE oid IN ({tables})");
    let names = world.database.client.query_one(&names, &[]).await.unwrap();
    let names: HashSet<String> = names.get::<_, Vec<String>>(0).into_iter().collect();
    let log = world.database.server().log().unwrap();
    let plans = plans(&log[from..]);
    let mut scans = 0;
    for plan in &plans {
        let is_of_table = |node: &Value| {
            let name = node["Relation Name"].as_str();
            name.is_some_and(|name| names.contains(name))
        };
        let mut reads_the_table = false;
        walk(&plan["Plan"], &mut |node| {
            if is_of_table(node) {
                reads_the_table = true;
                scans += 1;
                assert_ne!(node["Node Type"], "Seq Scan", "{plan:#}");
                // A recovery also reads a range of blocks to find rows that are older than the column `seq`.
                let is_range = from > 0 && node["Node Type"] == "Tid Range Scan";
                assert!(is_range || rows_read(node) <= at_most, "{plan:#}");
            }
        });
        walk(&plan["Plan"], &mut |node| {
            let sorts = node["Node Type"].as_str().unwrap().ends_with("Sort");
            if reads_the_table && sorts {
                assert!(rows_read(node) <= at_most, "{plan:#}");
            }
        });
    }
    println!(
        "{kind:?}: {} plans, {scans} scans of the table",
        plans.len()
    );
    assert!(scans > 0, "{log}");
    log.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_start_an_audit_and_a_recovery_read_a_huge_table_only_by_index() {
    for kind in [Kind::Events, Kind::Numbered, Kind::Uuid, Kind::Partitioned] {
        a_first_start_reads_a_huge_table_by_index(kind, "full").await;
    }
    a_first_start_reads_a_huge_table_by_index(Kind::Events, "exceptions").await;
}
