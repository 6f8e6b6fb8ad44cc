//! Tests in which quarantined events are released in order, discarded, or returned to quarantine with a
//! reason.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_released_key_is_published_in_commit_order_while_services_keep_writing_to_it() {
    let (database, emulator, fault) = with_a_blocked_key(1_000).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 501).await;
    emulator.faults().lift(fault);
    let (writer, connection) = tokio_postgres::connect(&database.url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    let writing = tokio::spawn(async move {
        for _ in 0..60 {
            writer
                .batch_execute(&harness::insert_orders_sql(50, 2))
                .await
                .unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    // Release the first event of its key, which also releases the later events of the key.
    let said = quarantine(&database, &["release", BAD]);
    assert!(said.contains("first of key o-1"), "{said}");
    relay.wait_for_log("are released from quarantine").await;
    writing.await.unwrap();
    database.wait_until_recorded().await;
    wait_for_state(&database, "quarantined", 0).await;
    wait_for_state(&database, "released", 0).await;
    database.wait_until_confirmed().await;
    let report = harness::check(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
    assert_eq!(report.stored_messages, 4_011);
    let cleared = "SELECT count(*) FROM outbox.dispatch WHERE error IS NOT NULL";
    assert_eq!(database.number(cleared).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_during_a_release_resumes_it_at_the_next_start() {
    let (database, emulator, fault) = with_a_blocked_key(2_000).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 1_001).await;
    relay.kill_9();
    // Release the key while no relay runs. The next relay publishes the released events.
    emulator.faults().lift(fault);
    quarantine(&database, &["release", "--key", "o-1"]);
    let slow = Fault::new(Action::Delay(Duration::from_millis(50)));
    let slow = emulator.faults().inject(slow);
    for left in [900, 600, 300] {
        let relay = Relay::start(&database, &emulator);
        insert_orders(&database, 20, 2).await;
        eventually("some released events are sent", || async {
            (in_state(&database, "released").await < left).then_some(())
        })
        .await;
        relay.kill_9();
    }
    emulator.faults().lift(slow);
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    wait_for_state(&database, "released", 0).await;
    wait_for_state(&database, "quarantined", 0).await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    // The key is no longer blocked, so its new events are published.
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "quarantined").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_fails_again_returns_to_quarantine_and_its_key_stays_blocked() {
    let (database, emulator, _fault) = with_a_blocked_key(600).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 301).await;
    let attempts = || {
        let all = emulator.journal().attempts();
        let of_bad = all
            .iter()
            .filter(|attempt| attempt.event_ids.iter().flatten().any(|id| **id == *BAD));
        of_bad.count()
    };
    let before = attempts();
    quarantine(&database, &["release", "--all"]);
    eventually("the event was tried again", || async {
        (attempts() > before).then_some(())
    })
    .await;
    wait_for_state(&database, "quarantined", 301).await;
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    assert_eq!(
        in_state(&database, "quarantined").await,
        311,
        "{}",
        relay.log()
    );
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn discarding_the_bad_event_and_releasing_its_key_leaves_out_nothing_else() {
    let (database, emulator, _fault) = with_a_blocked_key(400).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 201).await;
    quarantine(&database, &["discard", BAD, "--yes"]);
    quarantine(
        &database,
        &["release", "--key", "o-1", "--topic", "order.events"],
    );
    wait_for_state(&database, "quarantined", 0).await;
    wait_for_state(&database, "released", 0).await;
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "discarded").await, 1);
    assert_eq!(
        in_state(&database, "quarantined").await,
        0,
        "{}",
        relay.log()
    );
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    assert_eq!(report.stored_messages, 430);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_whose_events_are_all_discarded_is_unblocked() {
    let (database, emulator, _fault) = with_a_blocked_key(40).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 21).await;
    quarantine(&database, &["discard", "--key", "o-1", "--yes"]);
    relay
        .wait_for_log("the quarantine of this key is empty")
        .await;
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "quarantined").await, 0);
    assert_eq!(in_state(&database, "discarded").await, 21);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pruned_row_stays_in_quarantine_with_the_reason() {
    let (database, emulator, fault) = with_a_blocked_key(40).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 21).await;
    emulator.faults().lift(fault);
    database
        .execute(&format!("DELETE FROM outbox.events WHERE id = '{BAD}'"))
        .await;
    quarantine(&database, &["release", "--all"]);
    relay
        .wait_for_log("cannot release an event from quarantine")
        .await;
    wait_for_state(&database, "quarantined", 21).await;
    let shown = quarantine(&database, &["show", BAD]);
    assert!(shown.contains("is no longer in its table"), "{shown}");
    quarantine(&database, &["discard", BAD, "--yes"]);
    quarantine(&database, &["release", "--all"]);
    wait_for_state(&database, "published", 50).await;
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unmappable_row_is_released_after_the_settings_are_corrected() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let long = "repeat('k', 1025)";
    for kind in ["First", "Second"] {
        database
            .execute(&format!(
                "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
                 VALUES ('order', {long}, '{kind}', '{{}}')"
            ))
            .await;
    }
    // The aggregate id is too long for an ordering key and for an attribute. With the corrected settings,
    // the relay uses the aggregate id for neither.
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 2).await;
    relay.stop().await;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let settings = "[[tables]]\ntable = 'outbox.events'\nordering = 'none'\n\
        topic = 'order.events'\ncolumns = { aggregateid = '', aggregatetype = '' }\n";
    std::io::Write::write_all(&mut file, settings.as_bytes()).unwrap();
    let path = file.path().display().to_string();
    quarantine(&database, &["release", "--all"]);
    let addr = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_CONFIG", &path)]);
    wait_for_state(&database, "published", 2).await;
    assert_eq!(
        emulator.journal().counts().stored_messages,
        2,
        "{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn under_quarantine_event_events_are_released_one_by_one() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let first = poison(&emulator, BAD);
    poison(&emulator, BAD_TOO);
    insert_bad(&database, BAD, "o-1").await;
    insert_bad(&database, BAD_TOO, "").await;
    insert_orders(&database, 20, 2).await;
    let policy = [("POSTRIDER_ON_BAD_EVENT", "quarantine_event")];
    let addr = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &addr, &policy);
    wait_for_state(&database, "quarantined", 2).await;
    emulator.faults().lift(first);
    quarantine(&database, &["release", "--all"]);
    eventually("one event is sent, the other fails again", || async {
        let left = in_state(&database, "quarantined").await;
        let released = in_state(&database, "released").await;
        ((left, released) == (1, 0)).then_some(())
    })
    .await;
    assert_eq!(
        in_state(&database, "published").await,
        21,
        "{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_event_that_arrives_during_a_release_gets_a_dead_letter_and_its_turn() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let dead = "projects/demo/topics/dead";
    emulator.create_topic(dead).await.unwrap();
    let event_id = BAD.to_owned();
    let fault = Fault::new(Action::Poison { event_id }).on_topic("order.events");
    let fault = emulator.faults().inject(fault);
    insert_bad(&database, BAD, "o-1").await;
    insert_orders(&database, 1_000, 2).await;
    let addr = emulator.addr().to_string();
    let settings = [("POSTRIDER_DEAD_LETTER_TOPIC", "dead")];
    let relay = Relay::start_with(&database, &addr, &settings);
    wait_for_state(&database, "quarantined", 501).await;
    emulator.faults().lift(fault);
    let slow = Fault::new(Action::Delay(Duration::from_millis(1_500)));
    let slow = emulator.faults().inject(slow);
    quarantine(&database, &["release", "--all"]);
    eventually("the release is under way", || async {
        let released = in_state(&database, "released").await;
        (released > 0 && in_state(&database, "quarantined").await == 0).then_some(())
    })
    .await;
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, headers) \
             VALUES ('{BAD_TOO}', 'order', 'o-1', 'Headers', '[1]')"
        ))
        .await;
    insert_orders(&database, 20, 2).await;
    let is_released = format!(
        "SELECT count(*) FROM outbox.dispatch WHERE event_id = '{BAD_TOO}' AND state = 'released'"
    );
    eventually("the bad event waits behind the released events", || async {
        (database.number(&is_released).await == 1).then_some(())
    })
    .await;
    emulator.faults().lift(slow);
    // The relay sends the events before the new bad event. The bad event and the events behind it return
    // to quarantine.
    wait_for_state(&database, "quarantined", 11).await;
    wait_for_state(&database, "released", 0).await;
    let attempts = emulator.journal().attempts();
    let letters = attempts
        .iter()
        .filter(|a| &*a.topic == dead && a.is_stored());
    let letters: Vec<&str> = letters
        .flat_map(|attempt| attempt.event_ids.iter().flatten())
        .map(|id| &**id)
        .collect();
    assert_eq!(letters, [BAD, BAD_TOO], "{}", relay.log());
    database.wait_until_recorded().await;
    let to_orders = emulator.journal().attempts();
    let to_orders: Vec<_> = to_orders
        .into_iter()
        .filter(|a| &*a.topic == TOPIC)
        .collect();
    let report = checks::check(&to_orders, &expected_published(&database).await);
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    assert_eq!(report.stored_messages, 1_011);
    database.wait_until_confirmed().await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hundreds_of_released_keys_of_a_missing_topic_hold_up_no_other_key() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let poisoned = poison(&emulator, BAD);
    let relay = Relay::start(&database, &emulator);
    // The relay releases keys in the order of their topics. The missing topic sorts before the topic
    // of the orders.
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, headers) \
             SELECT 'absent', 'a-' || n, 'Headers', '[1]' FROM generate_series(1, 600) n",
        )
        .await;
    insert_bad(&database, BAD, "o-1").await;
    wait_for_state(&database, "quarantined", 601).await;
    database
        .execute(
            "ALTER TABLE outbox.events DISABLE TRIGGER ALL; \
             UPDATE outbox.events SET headers = NULL; \
             ALTER TABLE outbox.events ENABLE TRIGGER ALL",
        )
        .await;
    emulator.faults().lift(poisoned);
    quarantine(&database, &["release", "--all"]);
    wait_for_state(&database, "published", 1).await;
    assert_eq!(
        in_state(&database, "released").await,
        600,
        "{}",
        relay.log()
    );
    emulator
        .create_topic("projects/demo/topics/absent.events")
        .await
        .unwrap();
    wait_for_state(&database, "published", 601).await;
    // The relay releases 600 keys, but logs at most 100 lines of this text in ten seconds. The release may take up to
    // 30 seconds, so allow 300 lines.
    let log = relay.log();
    let told = log.matches("all events of this key are released").count();
    assert!((1..=300).contains(&told), "{told} lines: {log}");
    // The relay tells how many lines it has left out when it logs another line after the ten seconds. End its
    // session, so that it logs another line.
    let end_session = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
                       WHERE active AND database = current_database()";
    eventually("the log tells how many lines it left out", || async {
        database.execute(end_session).await;
        let log = relay.log();
        let line = log
            .lines()
            .find(|line| line.contains("left out similar log lines"))?;
        line.contains("all events of this key are released")
            .then_some(())
    })
    .await;
    relay.stop().await;
}

/// The relay cannot release the event, and returns it to quarantine. The recorded error text must stay the same. For
/// example, the relay must not add the event's id to the text, because `postrider quarantine list` already shows the
/// id beside the error.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_fails_again_has_the_same_error_as_before() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let insert = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
                  VALUES ('order', repeat('k', 1600), 'E')";
    database.execute(insert).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 1).await;
    let error = "SELECT error FROM outbox.dispatch";
    let before: String = database.client.query_one(error, &[]).await.unwrap().get(0);
    quarantine(&database, &["release", "--all"]);
    relay
        .wait_for_log("cannot release an event from quarantine")
        .await;
    wait_for_state(&database, "quarantined", 1).await;
    let after: String = database.client.query_one(error, &[]).await.unwrap().get(0);
    assert_eq!(before, after);
    assert!(after.contains("1600 bytes"), "{after}");
}
