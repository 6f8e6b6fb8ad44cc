//! Tests in which one of the relay's SQL connections goes silent, but stays open. The task that waits for
//! an answer on this connection must give up and start over.

use fault_proxy::{FaultProxy, Flow};
use pubsub_emulator::{Action, Fault};

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::load::proxied;
use crate::standby::insert_much;

/// Waits until the session `name` meets the condition `where_`. Then makes the proxy swallow all data
/// of this session's connection.
async fn swallow(database: &Database, proxy: &FaultProxy, name: &str, where_: &str) {
    let port = format!(
        "SELECT coalesce(max(client_port), 0)::bigint FROM pg_stat_activity \
         WHERE application_name = '{name}' AND {where_}"
    );
    let port = eventually(&format!("{name} is connected, {where_}"), || async {
        u16::try_from(database.number(&port).await)
            .ok()
            .filter(|port| *port > 0)
    })
    .await;
    proxy.set_flow_of_one(port, Flow::Swallowed);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_audit_with_a_silent_connection_is_given_up_and_repeated() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let (proxy, url) = proxied(&database).await;
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[("DATABASE_URL", &url)]);
    insert_orders(&database, 20, 5).await;
    database.wait_until_audited().await;
    swallow(&database, &proxy, "postrider auditor", "state = 'idle'").await;
    database
        .execute(
            "ALTER PUBLICATION postrider DROP TABLE outbox.events; \
             INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version) \
             SELECT 'order', 'gap', 'OrderPlaced', n FROM generate_series(1, 30) n; \
             ALTER PUBLICATION postrider ADD TABLE outbox.events",
        )
        .await;
    relay.wait_for_log("the answer does not arrive").await;
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    assert!(report.duplicates.is_empty(), "{report}\n{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_with_a_silent_connection_is_given_up_and_restarted() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    relay.stop().await;
    database.drop_slot().await;
    insert_much(&database).await;
    let (proxy, url) = proxied(&database).await;
    let host = emulator.addr().to_string();
    let silent = emulator.faults().inject(Fault::new(Action::NeverAnswer));
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_IN_FLIGHT_MIB", "1"),
        ("POSTRIDER_PUBLISH_TIMEOUT_S", "2"),
    ];
    let relay = Relay::start_with(&database, &host, &environment);
    // By now the recovery has read some of the rows. It waits for Pub/Sub and holds no transaction
    // open.
    relay.wait_for_log("pubsub-unreachable").await;
    let name = "postrider recovery";
    swallow(
        &database,
        &proxy,
        name,
        "state = 'idle' AND xact_start IS NULL",
    )
    .await;
    emulator.faults().lift(silent);
    relay.wait_for_log("the answer does not arrive").await;
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    relay.stop().await;
}
