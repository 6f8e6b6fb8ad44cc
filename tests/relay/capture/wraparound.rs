//! Tests of the wraparound of transaction ids. PostgreSQL stores only the lower 32 bits of a transaction
//! id in the WAL and in rows. The relay must distinguish rows by all 64 bits, even after the lower 32
//! bits have wrapped around.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use scratch_postgres::{ScratchPostgres, StopMode};

use super::World;
use super::table::Kind;
use crate::harness;

const EPOCH: u64 = 1 << 32;
/// Number of transaction ids that are left before the wraparound when a test begins.
const BEFORE: u64 = 700;
/// Number of transactions that one file of `pg_xact` covers.
const XIDS_PER_FILE: u64 = 1 << 20;
/// Size of a file of `pg_xact`, in bytes.
const FILE_BYTES: usize = 1 << 18;

/// Starts a server whose next transaction id is `BEFORE` ids before the wraparound. Returns `None`
/// if PostgreSQL was installed without `pg_resetwal`. Advances the next id in steps of less than
/// 2^31, because no row may be older than 2^31 transactions.
pub(super) async fn near_the_wraparound() -> Option<ScratchPostgres> {
    let builder = ScratchPostgres::builder().setting("wal_level", "logical");
    let builder = builder.setting("autovacuum", "off");
    let mut server = builder
        .setting("max_prepared_transactions", "10")
        .start()
        .unwrap();
    if !has_resetwal(&server) {
        return None;
    }
    for next in [2_000_000_000, 4_000_000_000, EPOCH - BEFORE] {
        freeze(&server).await;
        let programs = programs(&server);
        server
            .stop(StopMode::Fast, Duration::from_secs(30))
            .unwrap();
        reset(&programs, server.data_dir(), next);
        server.start_again().unwrap();
    }
    freeze(&server).await;
    Some(server)
}

/// Whether `pg_resetwal` is installed. Some builds of PostgreSQL have only the programs that start
/// a server.
fn has_resetwal(server: &ScratchPostgres) -> bool {
    let has_it = programs(server).join("pg_resetwal").exists();
    if !has_it {
        eprintln!("SKIPPED: this PostgreSQL has no pg_resetwal");
    }
    has_it
}

/// The folder with the server's programs.
fn programs(server: &ScratchPostgres) -> PathBuf {
    let program = fs::read_link(format!("/proc/{}/exe", server.pid().unwrap())).unwrap();
    program.parent().unwrap().to_owned()
}

async fn freeze(server: &ScratchPostgres) {
    let client = harness::connect(&server.socket_url("postgres")).await;
    let allow = "ALTER DATABASE template0 ALLOW_CONNECTIONS true";
    client.batch_execute(allow).await.unwrap();
    for database in ["template0", "template1", "postgres"] {
        let client = harness::connect(&server.socket_url(database)).await;
        client.batch_execute("VACUUM FREEZE").await.unwrap();
    }
}

fn reset(programs: &Path, data: &Path, next: u64) {
    let owner = fs::metadata(data).unwrap();
    let outcomes = data.join(format!("pg_xact/{:04X}", next / XIDS_PER_FILE));
    fs::write(&outcomes, vec![0; FILE_BYTES]).unwrap();
    chown(&outcomes, Some(owner.uid()), Some(owner.gid())).unwrap();
    let done = Command::new(programs.join("pg_resetwal"))
        .arg("-x")
        .arg(next.to_string())
        .arg(data)
        .uid(owner.uid())
        .gid(owner.gid())
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
}

async fn next_xid(world: &World) -> i64 {
    let sql = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint";
    world.database.number(sql).await
}

/// Uses up some transaction ids.
pub(super) async fn use_up(world: &World, ids: u32) {
    let use_up = format!(
        "DO $$ BEGIN FOR i IN 1..{ids} LOOP \
         PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"
    );
    world.execute(&use_up).await;
}

/// Uses up transaction ids until the lower 32 bits have wrapped around.
pub(super) async fn pass_it(world: &World) {
    while next_xid(world).await < EPOCH as i64 + 10 {
        use_up(world, 50).await;
    }
}

async fn rows_before_and_after_the_wraparound(kind: Kind, dispatch: &str) {
    let Some(server) = near_the_wraparound().await else {
        return;
    };
    let mut world = World::on(server, kind, 500, harness::emulator().await).await;
    if dispatch != "full" {
        world.more.push(("POSTRIDER_DISPATCH", dispatch.to_owned()));
    }
    let (mut world, relay) = world.serve(50).await;
    world.insert("before", 50).await;
    let slow = harness::connect(&world.database.url).await;
    let row = world.row_sql("slow");
    slow.batch_execute(&format!("BEGIN; {row}")).await.unwrap();
    assert!(
        next_xid(&world).await < EPOCH as i64,
        "the test began after the wraparound"
    );
    pass_it(&world).await;
    world.insert("after", 50).await;
    assert!(!relay.log().contains("recovering"), "{}", relay.log());
    world.execute("CREATE TABLE public.another (id int); ALTER PUBLICATION postrider ADD TABLE public.another").await;
    world
        .execute("ALTER PUBLICATION postrider DROP TABLE TABLE_NAME")
        .await;
    relay.wait_for_log("publication-drift").await;
    world.insert("gap", 30).await;
    slow.batch_execute("COMMIT").await.unwrap();
    world
        .execute("ALTER PUBLICATION postrider ADD TABLE TABLE_NAME")
        .await;
    world.note().await;
    world.wait_until_published(&relay).await;
    relay.stop().await;
    world.insert("lost", 30).await;
    world.database.drop_slot().await;
    let relay = world.relay();
    relay.wait_for_log("recovered").await;
    if dispatch == "full" {
        world.assert_published_once(relay).await;
        return;
    }
    world.assert_published(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wraparound_of_transaction_ids_changes_nothing_for_events() {
    rows_before_and_after_the_wraparound(Kind::Events, "full").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wraparound_of_transaction_ids_changes_nothing_without_records() {
    rows_before_and_after_the_wraparound(Kind::Numbered, "exceptions").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wraparound_of_transaction_ids_changes_nothing_for_numbered_rows() {
    rows_before_and_after_the_wraparound(Kind::Numbered, "full").await;
}

/// The slot is lost before the wraparound, and the recovery runs after the wraparound.
#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_across_the_wraparound_publishes_each_row_once() {
    let Some(server) = near_the_wraparound().await else {
        return;
    };
    let world = World::on(server, Kind::Numbered, 500, harness::emulator().await).await;
    let (mut world, relay) = world.serve(50).await;
    relay.stop().await;
    world.insert("before", 50).await;
    world.database.drop_slot().await;
    assert!(
        next_xid(&world).await < EPOCH as i64,
        "the test began after the wraparound"
    );
    pass_it(&world).await;
    world.insert("after", 50).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_remedy_for_too_low_transaction_ids_lets_the_relay_adopt_and_publish() {
    let mut world = World::new(Kind::Events, 5).await;
    if !has_resetwal(world.database.server()) {
        return;
    }
    let slot = world.database.slot().to_owned();
    world
        .execute(&format!(
            "INSERT INTO outbox.relay (slot, system_identifier, timeline, confirmed_lsn, instance) \
             VALUES ('{slot}', '42', 1, '0/1', 'test'); \
             UPDATE outbox.capture SET since = '30000000000:30000000000:'"
        ))
        .await;
    // This restored row is not delivered yet. Its `xmin` is the id of the restoring transaction, which is lower than
    // `since`. Only its `inserted_xid` shows that the row is newer than `since`.
    world
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, inserted_xid) \
             VALUES ('order', 'restored', 'New', '{\"n\": 0}', '30000000500')",
        )
        .await;
    // `recover --dry-run` is refused too, because its list would lack the waiting rows.
    let project = ("PUBSUB_PROJECT_ID", "demo");
    let listed = world.run(&["recover", "--dry-run"], &[project]);
    assert_eq!(listed.status.code(), Some(3), "{listed:?}");
    let refused = world.run(&["recover", "--adopt", "--yes"], &[]);
    let said = String::from_utf8(refused.stderr)
        .unwrap()
        .replace('\n', " ");
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    let after = |word: &str| {
        let (_, rest) = said.split_once(word).unwrap_or_else(|| panic!("{said}"));
        rest.split([' ', '`']).next().unwrap().to_owned()
    };
    let (file, epoch, xid) = (after("DATADIR/"), after(" -e "), after(" -x "));
    let server = world.database.server();
    let (programs, data) = (programs(server), server.data_dir().to_owned());
    server
        .stop(StopMode::Fast, Duration::from_secs(30))
        .unwrap();
    let owner = fs::metadata(&data).unwrap();
    let outcomes = data.join(file);
    assert!(!outcomes.exists(), "{outcomes:?}");
    fs::write(&outcomes, vec![0; FILE_BYTES]).unwrap();
    chown(&outcomes, Some(owner.uid()), Some(owner.gid())).unwrap();
    let done = Command::new(programs.join("pg_resetwal"))
        .args(["-e", &epoch, "-x", &xid])
        .arg(&data)
        .uid(owner.uid())
        .gid(owner.gid())
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    world.database.server().start_again().unwrap();
    world.database.reconnect().await;
    let adopted = world.run(&["recover", "--adopt", "--yes"], &[]);
    assert!(adopted.status.success(), "{adopted:?}");
    world.insert("after", 5).await;
    let relay = world.relay();
    world.assert_published(relay).await;
}
