//! A failover to a physical standby with synchronised slots (PostgreSQL 17 and newer).

use fault_proxy::{Cut, FaultProxy, Target};
use scratch_postgres::{ScratchPostgres, StopMode};

use crate::harness::{self, Database, Relay, eventually};
use crate::load::{Load, wait_for_more};

/// A primary, its standby, and a proxy that leads to the one that serves.
struct Pair {
    database: Database,
    standby: ScratchPostgres,
    proxy: FaultProxy,
    url: String,
}

/// `None` before PostgreSQL 17.
async fn pair() -> Option<Pair> {
    let primary = ScratchPostgres::builder()
        .setting("synchronized_standby_slots", "")
        .start();
    // Older servers do not know the setting.
    let primary = primary.ok().filter(|s| s.major_version().unwrap() >= 17)?;
    let mut database = Database::on_with(primary, &[("POSTRIDER_SLOT_FAILOVER", "true")]).await;
    database
        .execute("SELECT pg_create_physical_replication_slot('standby', true)")
        .await;
    let server = database.server();
    server.stop(StopMode::Fast, harness::PATIENCE).unwrap();
    let standby = ScratchPostgres::builder()
        .standby_of(server)
        .setting("primary_slot_name", "standby")
        .setting("hot_standby_feedback", "on");
    let standby = standby.start().unwrap();
    server.set("synchronized_standby_slots", "standby").unwrap();
    server.start_again().unwrap();
    // Enabled while the primary runs, because the slot sync worker is slow to restart after a
    // failure.
    standby.set("sync_replication_slots", "on").unwrap();
    standby.reload().unwrap();
    database.reconnect().await;
    let address = database.url.split('@').nth(1).unwrap();
    let (address, _) = address.split_once('/').unwrap();
    let proxy = FaultProxy::start(Target::tcp(address)).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres", proxy.addr());
    Some(Pair {
        database,
        standby,
        proxy,
        url,
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failover_to_a_standby_with_synchronised_slots_loses_nothing_and_repeats_little() {
    let Some(mut pair) = pair().await else {
        eprintln!("SKIPPED: slots are synchronised to standbys from PostgreSQL 17 on");
        return;
    };
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&pair.database, &host, &[("DATABASE_URL", &pair.url)]);
    relay.wait_for_log("streaming").await;
    let load = Load::at(pair.url.clone());
    wait_for_more(&pair.database, 100).await;
    let standby_url = pair.standby.socket_url("postgres");
    let on_standby = harness::connect(&standby_url).await;
    eventually("the slot is on the standby", || async {
        let synced = "SELECT count(*) FROM pg_replication_slots \
                      WHERE slot_name = 'postrider' AND synced AND NOT temporary";
        let row = on_standby.query_one(synced, &[]).await.ok()?;
        (row.get::<_, i64>(0) == 1).then_some(())
    })
    .await;
    wait_for_more(&pair.database, 200).await;
    // Without this wait, the standby's slot could have confirmed events whose records are lost with
    // the primary.
    let written = pair.database.current_wal().await;
    eventually("the standby has all WAL", || async {
        let received = "SELECT (pg_last_wal_receive_lsn() - '0/0')::bigint";
        let row = on_standby.query_one(received, &[]).await.ok()?;
        (row.get::<_, i64>(0) >= written).then_some(())
    })
    .await;
    pair.database.server().kill_9().unwrap();
    pair.proxy.cut(Cut::Reset);
    on_standby
        .execute("SELECT pg_promote(true, 30)", &[])
        .await
        .unwrap();
    pair.proxy
        .retarget(Target::tcp(format!("127.0.0.1:{}", pair.standby.port())));
    pair.database.client = on_standby;
    wait_for_more(&pair.database, 200).await;
    load.stop().await;
    pair.database.wait_until_recorded().await;
    pair.database.wait_until_confirmed().await;
    // An event that the primary had streamed but not yet sent to the standby would be missing from
    // the database although the journal has it, and the check would name it.
    // `synchronized_standby_slots` prevents that.
    let report = harness::check_streamed(&pair.database, &emulator).await;
    let log = relay.log();
    assert!(report.is_clean(), "{report}\n{log}");
    assert!(report.duplicates.len() < 300, "{report}");
    assert!(!log.contains("recovering"), "the slot continues:\n{log}");
}
