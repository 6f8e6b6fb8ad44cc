//! Tests how the metrics and `/status` show the quarantine, and its limit.

use super::*;
use crate::http::{get, metric};

#[tokio::test(flavor = "multi_thread")]
async fn metrics_and_status_show_the_quarantine_without_the_names_of_keys() {
    let (database, emulator, _fault) = with_a_blocked_key(20).await;
    let http = free_addr();
    let addr = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_HTTP_ADDR", &http)]);
    wait_for_state(&database, "quarantined", 11).await;
    eventually("the gauge shows one key", || async {
        let keys = metric(&http, "postrider_blocked_keys").await?;
        (keys == 1.0).then_some(())
    })
    .await;
    for (label, count) in [("\"event-refused\"", 1.0), ("\"waits\"", 10.0)] {
        let name = format!("postrider_events_quarantined_total kind={label}");
        assert_eq!(metric(&http, &name).await, Some(count), "{label}");
    }
    eventually("nothing is left in memory", || async {
        let bytes = metric(&http, "postrider_in_flight_bytes").await?;
        (bytes == 0.0).then_some(())
    })
    .await;
    let (_, metrics) = get(&http, "/metrics").await.unwrap();
    let (_, status) = get(&http, "/status").await.unwrap();
    assert!(status.contains("\"blocked_keys\":1"), "{status}");
    assert!(
        !status.contains("o-1") && !metrics.contains("o-1"),
        "{}",
        relay.log()
    );
}

/// Puts one row for each of `keys` keys into quarantine, as if each key had a bad event.
async fn fill_quarantine(database: &Database, keys: u32) {
    database
        .execute(&format!(
            "INSERT INTO outbox.dispatch (commit_lsn, ordinal, event_id, topic, ordering_key, \
                 state, attempts, committed_at, error) \
             SELECT '0/8', n, gen_random_uuid(), '{TOPIC}', 'full-' || n, 'quarantined', 1, \
                    now(), 'event-refused: made by a test' \
             FROM generate_series(1, {keys}) n; \
             ANALYZE outbox.dispatch"
        ))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_key_too_many_stops_the_relay_before_its_event_is_confirmed() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let poisoned = poison(&emulator, BAD);
    fill_quarantine(&database, 100_000).await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    insert_bad(&database, BAD, "o-1").await;
    relay.wait_for_error("quarantine-full").await;
    let log = relay.log();
    assert!(log.contains("postrider quarantine list"), "{log}");
    assert_eq!(relay.wait().await.code(), Some(5), "{log}");
    let of_it = format!("SELECT count(*) FROM outbox.dispatch WHERE event_id = '{BAD}'");
    assert_eq!(database.number(&of_it).await, 0);
    // The stream sends the event again, and the next relay stops with the same error. Once the event is
    // no longer bad, a relay publishes it.
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_error("quarantine-full").await;
    assert_eq!(relay.wait().await.code(), Some(5));
    emulator.faults().lift(poisoned);
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    assert_eq!(emulator.journal().counts().stored_messages, 21);
    relay.stop().await;
    // A relay that starts with more quarantined events than the limit stops with the same error. The
    // remedy on the error's page helps.
    fill_one_more(&database).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_error("quarantine-full").await;
    assert_eq!(relay.wait().await.code(), Some(5));
    quarantine(&database, &["discard", "--all", "--yes"]);
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "discarded").await, 100_001);
    relay.stop().await;
}

async fn fill_one_more(database: &Database) {
    database
        .execute(
            "INSERT INTO outbox.dispatch (commit_lsn, ordinal, event_id, topic, ordering_key, \
                 state, attempts, committed_at, error) \
             SELECT commit_lsn, 200000, gen_random_uuid(), topic, 'full-0', state, attempts, \
                    committed_at, error FROM outbox.dispatch WHERE state = 'quarantined' LIMIT 1",
        )
        .await;
}
