//! Tests a failover to a physical standby server with synchronised slots (PostgreSQL 17 and newer).

use fault_proxy::{Cut, FaultProxy, Target};
use scratch_postgres::{ScratchPostgres, StopMode};

use crate::harness::{self, Database, Relay, eventually};
use crate::load::{Load, wait_for_more};

/// A primary server, its standby server, and a proxy to the server that is currently the primary.
struct Pair {
    database: Database,
    standby: ScratchPostgres,
    proxy: FaultProxy,
    url: String,
}

/// Starts both servers and the proxy. Returns `None` if the server is older than PostgreSQL 17.
async fn pair() -> Option<Pair> {
    let primary = ScratchPostgres::builder()
        .setting("synchronized_standby_slots", "")
        .start();
    // Older servers do not even start, because they do not know the setting `synchronized_standby_slots`.
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
    // Enable the synchronisation of slots only now. Without a running primary, the slot sync worker of the
    // standby server would fail, and it is slow to restart after a failure.
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
        eprintln!("SKIPPED: slots are synchronised to standby servers from PostgreSQL 17 on");
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
    eventually("the slot is on the standby server", || async {
        let synced = "SELECT count(*) FROM pg_replication_slots \
                      WHERE slot_name = 'postrider' AND synced AND NOT temporary";
        let row = on_standby.query_one(synced, &[]).await.ok()?;
        (row.get::<_, i64>(0) == 1).then_some(())
    })
    .await;
    wait_for_more(&pair.database, 200).await;
    // Wait until the standby server has received all dispatch rows. Otherwise its slot could have confirmed
    // events whose dispatch rows are lost with the primary.
    let written = pair.database.current_wal().await;
    eventually("the standby server has all WAL", || async {
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
    // With `synchronized_standby_slots`, the primary streams an event only after the standby server
    // has received it. Otherwise the relay could publish an event that is lost with the primary, and
    // this check would report it.
    let report = harness::check_streamed(&pair.database, &emulator).await;
    let log = relay.log();
    assert!(report.is_clean(), "{report}\n{log}");
    assert!(report.duplicates.len() < 300, "{report}");
    assert!(!log.contains("recovering"), "the slot continues:\n{log}");
    let stalled = "synchronized-standby-slots-stalled";
    assert!(
        !log.contains(stalled),
        "the standby server only lags:\n{log}"
    );
}
