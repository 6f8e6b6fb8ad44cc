//! Tests that the relay finds a bad event and treats it as each policy (`on_bad_event`) requires.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn one_poison_event_among_thousands_is_quarantined_and_only_its_key_waits() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator, BAD);
    insert_orders(&database, 2_000, 20).await;
    insert_bad(&database, BAD, "o-7").await;
    insert_orders(&database, 2_000, 20).await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    assert_eq!(
        in_state(&database, "quarantined").await,
        101,
        "{}",
        relay.log()
    );
    let row = database
        .client
        .query_one(
            "SELECT error, ordering_key, topic FROM outbox.dispatch \
             WHERE event_id::text = $1",
            &[&BAD],
        )
        .await
        .unwrap();
    let error: String = row.get(0);
    assert!(
        error.starts_with("event-refused: InvalidArgument"),
        "{error}"
    );
    assert_eq!(
        (row.get::<_, &str>(1), row.get::<_, &str>(2)),
        ("o-7", TOPIC)
    );
    let waits = "SELECT count(*) FROM outbox.dispatch WHERE ordering_key = 'o-7' \
         AND state = 'quarantined' AND error LIKE 'waits for event 00000000-%bad0 in quarantine'";
    assert_eq!(database.number(waits).await, 100);
    let others = "SELECT count(*) FROM outbox.dispatch WHERE ordering_key <> 'o-7' \
         AND state <> 'published'";
    assert_eq!(database.number(others).await, 0);
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    assert_eq!(report.stored_messages, 3_900);
    assert_eq!(
        harness::sent_again(&database),
        0,
        "the bisection sent events again, but Pub/Sub had refused them"
    );
    assert!(
        relay.log().contains("set aside in quarantine"),
        "{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_names_a_topic_in_another_project_is_set_aside_and_forges_no_log_line() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let insert = |aggregate_type: &str| {
        format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
             VALUES ({aggregate_type}, md5({aggregate_type}), 'E', '1');"
        )
    };
    let names = [
        "'projects/' || repeat('p', 900000) || '/topics/abc'",
        "'projects/' || (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 900) i) \
         || '/topics/abc'",
        "E'projects/x\\n2026-01-01 ERROR forged\\x1b[31m/topics/abc'",
        "'projects/other/topics/abc'",
    ];
    for name in names {
        database.execute(&insert(name)).await;
    }
    insert_orders(&database, 100, 10).await;
    let addr = emulator.addr().to_string();
    let create = [("POSTRIDER_CREATE_TOPICS", "true")];
    let relay = Relay::start_with(&database, &addr, &create);
    database.wait_until_recorded().await;
    let log = relay.log();
    assert_eq!(in_state(&database, "quarantined").await, 4, "{log}");
    assert_eq!(in_state(&database, "published").await, 100, "{log}");
    let forged = |line: &str| line.starts_with("2026-01-01") || line.contains('\u{1b}');
    assert!(!log.lines().any(forged), "{log}");
    assert!(log.len() < 20_000, "{} bytes", log.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn under_quarantine_event_only_the_bad_event_is_quarantined() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator, BAD);
    insert_orders(&database, 300, 3).await;
    insert_bad(&database, BAD, "o-1").await;
    insert_orders(&database, 300, 3).await;
    let policy = [("POSTRIDER_ON_BAD_EVENT", "quarantine_event")];
    let addr = emulator.addr().to_string();
    let _relay = Relay::start_with(&database, &addr, &policy);
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "quarantined").await, 1);
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    assert_eq!(report.stored_messages, 600);
}

#[tokio::test(flavor = "multi_thread")]
async fn under_halt_the_relay_stops_at_the_bad_event_with_a_remedy() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator, BAD);
    insert_orders(&database, 30, 1).await;
    insert_bad(&database, BAD, "o-0").await;
    insert_orders(&database, 30, 1).await;
    let addr = emulator.addr().to_string();
    let policy = [("POSTRIDER_ON_BAD_EVENT", "halt")];
    let relay = Relay::start_with(&database, &addr, &policy);
    relay.wait_for_error("event-refused").await;
    let log = relay.log();
    assert_eq!(relay.wait().await.code(), Some(5), "{log}");
    assert!(log.contains(BAD) && log.contains("on_bad_event"), "{log}");
    assert_eq!(in_state(&database, "quarantined").await, 0);
    assert_eq!(
        in_state(&database, "published").await,
        30,
        "all events before the bad event"
    );
    // PostgreSQL streams the event again. The next relay has the default policy and quarantines the
    // event.
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "quarantined").await, 31);
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    drop(relay);
}

#[tokio::test(flavor = "multi_thread")]
async fn unmappable_rows_are_quarantined_with_their_key_if_it_is_known() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    insert_orders(&database, 20, 2).await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, headers) \
                 VALUES ('order', 'o-0', 'Headers', '[1]'); \
             INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
                 VALUES ('order', 'big', 'TooLarge', to_jsonb(repeat('x', 10000001))); \
             INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
                 VALUES ('order', repeat('k', 1025), 'LongKey'); \
             INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
                 VALUES ('', 'o-1', 'NoTopic')",
        )
        .await;
    insert_orders(&database, 20, 2).await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let rows = database
        .client
        .query(
            "SELECT e.event_type, d.error, d.topic, d.ordering_key \
             FROM outbox.dispatch d JOIN outbox.events e ON e.id = d.event_id \
             WHERE d.state = 'quarantined' AND e.event_type <> 'OrderPlaced' ORDER BY 1",
            &[],
        )
        .await
        .unwrap();
    let found: Vec<(&str, &str, Option<&str>, Option<&str>)> = rows
        .iter()
        .map(|row| {
            let error: &str = row.get(1);
            let (code, _) = error.split_once(':').unwrap();
            (row.get(0), code, row.get(2), row.get(3))
        })
        .collect();
    let topic = Some(TOPIC);
    assert_eq!(
        found,
        [
            ("Headers", "event-invalid", topic, Some("o-0")),
            ("LongKey", "event-invalid", topic, None),
            ("NoTopic", "event-invalid", None, Some("o-1")),
            ("TooLarge", "event-too-large", topic, Some("big")),
        ]
    );
    // The bad event of o-0 and all later events of this key are in quarantine. The earlier events of o-0,
    // and all events of o-1, are published.
    assert_eq!(
        in_state(&database, "published").await,
        30,
        "{}",
        relay.log()
    );
    assert_eq!(in_state(&database, "quarantined").await, 14);
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    assert!(!relay.log().contains("xxxxxxxx"), "no payload in the log");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_is_sent_for_the_bad_event_and_not_for_those_that_wait() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let dead = "projects/demo/topics/dead";
    emulator.create_topic(dead).await.unwrap();
    // Refuse the event on its own topic only. Otherwise Pub/Sub would also refuse its dead letter, which has the
    // same event id.
    let event_id = BAD.to_owned();
    let fault = Fault::new(Action::Poison { event_id }).on_topic("order.events");
    emulator.faults().inject(fault);
    insert_bad(&database, BAD, "o-1").await;
    insert_orders(&database, 20, 2).await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, headers, payload) \
             VALUES ('order', 'h', 'Headers', '[1]', '{}')",
        )
        .await;
    let addr = emulator.addr().to_string();
    let settings = [("POSTRIDER_DEAD_LETTER_TOPIC", "dead")];
    let relay = Relay::start_with(&database, &addr, &settings);
    database.wait_until_recorded().await;
    assert_eq!(
        in_state(&database, "quarantined").await,
        12,
        "{}",
        relay.log()
    );
    let attempts = emulator.journal().attempts();
    let letters = attempts
        .iter()
        .filter(|a| &*a.topic == dead && a.is_stored());
    let ids: Vec<&str> = letters
        .flat_map(|attempt| attempt.event_ids.iter().flatten())
        .map(|id| &**id)
        .collect();
    assert_eq!(ids.len(), 2, "{ids:?}");
    assert!(ids.contains(&BAD));
    // Let Pub/Sub refuse a bad event and also its dead letter. The event must still be quarantined.
    emulator.faults().lift_all();
    let second = BAD_TOO.to_owned();
    emulator
        .faults()
        .inject(Fault::new(Action::Poison { event_id: second }));
    insert_bad(&database, BAD_TOO, "o-0").await;
    database.wait_until_recorded().await;
    relay.wait_for_log("refuses the dead letter").await;
    assert_eq!(in_state(&database, "quarantined").await, 13);
    database.wait_until_confirmed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_during_the_bisection_keeps_the_key_blocked_and_loses_nothing() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator, BAD);
    insert_orders(&database, 1_000, 2).await;
    insert_bad(&database, BAD, "o-1").await;
    insert_orders(&database, 1_000, 2).await;
    let slow = Action::Delay(Duration::from_millis(30));
    let slow = emulator.faults().inject(Fault::new(slow));
    for errors in 1..5 {
        let relay = Relay::start(&database, &emulator);
        // A bad event that was alone in its request needs no bisection, and may already be in quarantine.
        eventually("the bisection has begun", || async {
            let refused = emulator.journal().counts().error_answers;
            let found = in_state(&database, "quarantined").await > 0;
            (refused >= errors * 2 || found).then_some(())
        })
        .await;
        relay.kill_9();
    }
    emulator.faults().lift(slow);
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    let before = in_state(&database, "quarantined").await;
    assert_eq!(before, 501, "{}", relay.log());
    relay.kill_9();
    let relay = Relay::start(&database, &emulator);
    relay
        .wait_for_log("events of these keys wait in quarantine")
        .await;
    insert_orders(&database, 10, 2).await;
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "quarantined").await, before + 5);
    let report = check_published(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}
