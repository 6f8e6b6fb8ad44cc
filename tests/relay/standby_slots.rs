//! Tests a walsender that waits for a standby server of `synchronized_standby_slots` (PostgreSQL 17 and newer). Every
//! view must say that nothing is delivered, and which slot is behind.

use scratch_postgres::ScratchPostgres;

use crate::condition::{command, json, status, wait_for_command, wait_for_state};
use crate::harness::{self, Database, Relay, insert_orders};
use crate::http::{free_addr, get, metric};

const CODE: &str = "synchronized-standby-slots-stalled";

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_standby_slot_is_shown_by_every_view_until_delivery_continues() {
    let server = ScratchPostgres::builder()
        .setting("synchronized_standby_slots", "")
        .start();
    // A server before PostgreSQL 17 does not start, because it does not know the setting.
    let Some(server) = server.ok().filter(|s| s.major_version().unwrap() >= 17) else {
        eprintln!("SKIPPED: synchronized_standby_slots exists from PostgreSQL 17 on");
        return;
    };
    let mut database = Database::on_with(server, &[("POSTRIDER_SLOT_FAILOVER", "true")]).await;
    database
        .execute("SELECT pg_create_physical_replication_slot('phys', true)")
        .await;
    let emulator = harness::emulator().await;
    let (addr, host) = (free_addr(), emulator.addr().to_string());
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &addr)]);
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;

    let server = database.server();
    server.set("synchronized_standby_slots", "phys").unwrap();
    server.reload().unwrap();
    insert_orders(&database, 10, 5).await;
    let blocked = wait_for_state(&addr, "blocked-on-database").await;
    assert_eq!(blocked["code"], CODE, "{blocked}");
    let hint = blocked["hint"].as_str().unwrap();
    assert!(hint.contains("start the standby servers"), "{blocked}");
    let (ready, body) = get(&addr, "/readyz").await.unwrap();
    assert!(ready == 503 && body.contains(CODE), "{ready} {body}");
    let blocked_metric = "postrider_condition kind=\"blocked-on-database\"";
    assert_eq!(metric(&addr, blocked_metric).await, Some(1.0));
    relay.wait_for_log("nobody reads slot phys").await;
    let told = json(&wait_for_command(&database, "blocked-on-database").await);
    assert_eq!(told["condition"]["code"], CODE, "{told}");
    for view in [&["status"][..], &["slot", "show"]] {
        let shown = command(&database, view);
        let shown = String::from_utf8(shown.stdout).unwrap();
        let parts = ["BLOCKED ON DATABASE", CODE, "nobody reads slot phys"];
        for part in parts {
            assert!(shown.contains(part), "{part} in\n{shown}");
        }
        assert!(!shown.contains("STREAMING"), "{shown}");
    }
    let checked = command(&database, &["check"]);
    let checked = String::from_utf8(checked.stdout).unwrap();
    assert!(checked.contains(CODE), "{checked}");

    let server = database.server();
    server.set("synchronized_standby_slots", "").unwrap();
    server.reload().unwrap();
    database.wait_until_recorded().await;
    let streaming = wait_for_state(&addr, "streaming").await;
    assert!(streaming["code"].is_null(), "{streaming}");
    assert_eq!(status(&addr).await.unwrap()["severity"], "ok");
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
}
