//! Tests the metrics and `/status` while events are in quarantine. Also tests the limit of the
//! quarantine.

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
    let shown = postrider(&["status"], &[("DATABASE_URL", &database.url)]).output();
    let shown = String::from_utf8(shown.unwrap().stdout).unwrap();
    assert!(
        shown.contains("order.events, key \"o-1\": 11 events, the oldest"),
        "{shown}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_in_quarantine_that_blocks_no_key_is_shown_within_seconds() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator, BAD);
    let (http, addr) = (free_addr(), emulator.addr().to_string());
    let environment = [
        ("POSTRIDER_HTTP_ADDR", http.as_str()),
        ("POSTRIDER_ON_BAD_EVENT", "quarantine_event"),
    ];
    let _relay = Relay::start_with(&database, &addr, &environment);
    let shown = || metric(&http, "postrider_events_in_quarantine");
    eventually("the quarantine is counted", || async {
        (shown().await? == 0.0).then_some(())
    })
    .await;
    insert_bad(&database, BAD, "o-1").await;
    wait_for_state(&database, "quarantined", 1).await;
    let began = Instant::now();
    eventually("the event is shown", || async {
        (shown().await? == 1.0).then_some(())
    })
    .await;
    // As long as the relay knows of no event in quarantine, it counts the quarantined events only every 30 seconds.
    // The bad event must make the relay count sooner.
    let took = began.elapsed();
    assert!(took < Duration::from_secs(15), "{took:?}");
    assert_eq!(metric(&http, "postrider_blocked_keys").await, Some(0.0));
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
    // PostgreSQL streams the event again, and the next relay stops with the same error. Once the
    // event is no longer bad, a relay publishes it.
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_error("quarantine-full").await;
    assert_eq!(relay.wait().await.code(), Some(5));
    emulator.faults().lift(poisoned);
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    assert_eq!(emulator.journal().counts().stored_messages, 21);
    relay.stop().await;
    // A relay that starts with more quarantined events than the limit stops with the same error. The
    // remedy on the page of this error, to discard events, must work.
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
