//! The quarantine in metrics and status, and its bound.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn the_quarantine_is_seen_in_metrics_and_status_without_the_names_of_keys() {
    let (database, emulator, _fault) = with_a_blocked_key(20).await;
    let http = free_addr();
    let addr = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_HTTP_ADDR", &http)]);
    wait_for_state(&database, "quarantined", 11).await;
    let page = |path: &'static str| {
        let http = http.clone();
        async move {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let mut stream = tokio::net::TcpStream::connect(&http).await.ok()?;
            let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.ok()?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await.ok()?;
            Some(text)
        }
    };
    let metrics = eventually("the gauge shows one key", || async {
        let text = page("/metrics").await?;
        text.contains("postrider_blocked_keys 1").then_some(text)
    })
    .await;
    assert!(
        metrics.contains("events_quarantined_total{kind=\"event-refused\"} 1"),
        "{metrics}"
    );
    assert!(
        metrics.contains("events_quarantined_total{kind=\"waits\"} 10"),
        "{metrics}"
    );
    eventually("nothing is left in memory", || async {
        let text = page("/metrics").await?;
        text.contains("postrider_in_flight_bytes 0\n").then_some(())
    })
    .await;
    let status = page("/status").await.unwrap();
    assert!(status.contains("\"blocked_keys\":1"), "{status}");
    assert!(
        !status.contains("o-1") && !metrics.contains("o-1"),
        "{}",
        relay.log()
    );
}

/// Puts rows of so many keys into quarantine, as if each had had a bad event.
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
async fn one_bad_key_too_many_stops_the_relay_and_nothing_of_it_is_confirmed() {
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
    // It is met again, and goes when there is room.
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_error("quarantine-full").await;
    assert_eq!(relay.wait().await.code(), Some(5));
    emulator.faults().lift(poisoned);
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    assert_eq!(emulator.journal().counts().stored_messages, 21);
    relay.stop().await;
    // A relay that starts with too many says so, too, and what the page says helps.
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
