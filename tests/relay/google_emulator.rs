//! Tests the delivery guarantees against Google's own emulator instead of ours. Google's emulator is an
//! independent referee: the tests check the messages that a subscriber receives from it. The tests are
//! skipped if the emulator's jar is not installed.

use std::time::Duration;

use fault_proxy::{Cut, Flow};
use scratch_postgres::StopMode;

use crate::harness::{Database, eventually, insert_orders, postrider};
use crate::load::{Load, wait_for_more};
use crate::referee::Referee;

/// Makes the relay give up a publish attempt that gets no answer within one second.
const SHORT_ATTEMPTS: [(&str, &str); 1] = [("POSTRIDER_PUBLISH_TIMEOUT_S", "1")];

/// Starts Google's emulator and a database with an empty outbox. Returns `None` if the emulator is not
/// installed.
async fn stage() -> Option<(Referee, Database)> {
    let referee = Referee::start().await?;
    Some((referee, Database::start().await))
}

/// Waits for 30 more records, ends the load, and waits until every event is recorded and confirmed.
async fn all_is_recorded(database: &Database, load: Load) {
    wait_for_more(database, 30).await;
    load.stop().await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
}

async fn in_state(database: &Database, state: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM outbox.dispatch WHERE state = '{state}'");
    database.number(&sql).await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_event_comes_once_and_in_order_whether_written_before_or_after_the_start() {
    let Some((mut referee, database)) = stage().await else {
        return;
    };
    insert_orders(&database, 250, 5).await;
    let relay = referee.relay(&database, &[]);
    insert_orders(&database, 250, 5).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    referee
        .assert_all_came_once_in_order(&database, &relay)
        .await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_has_the_payload_key_and_attributes_of_its_row() {
    let Some((mut referee, database)) = stage().await else {
        return;
    };
    let relay = referee.relay(&database, &[]);
    database
        .execute(
            "SET outbox.traceparent = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'; \
             SELECT outbox.emit('order', 'o-ä', 'OrderPlaced', '{\"total\": 12.50, \"to\": \"Zoë\"}', \
                                '{\"tenant\": \"acme\"}', 7)",
        )
        .await;
    database.wait_until_recorded().await;
    referee
        .assert_all_came_once_in_order(&database, &relay)
        .await;
    let [message] = referee.messages("o-ä") else {
        panic!("one message");
    };
    // The message contains the payload as PostgreSQL prints `jsonb`, so compare it with the text of the
    // column.
    assert_eq!(
        String::from_utf8_lossy(&message.data),
        database
            .text("SELECT payload::text FROM outbox.events")
            .await
    );
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    for (name, value) in [
        ("event_type", "OrderPlaced"),
        ("aggregate_type", "order"),
        ("aggregate_id", "o-ä"),
        ("version", "7"),
        ("schema_version", "1"),
        ("tenant", "acme"),
        ("traceparent", parent),
        ("googclient_traceparent", parent),
    ] {
        assert_eq!(message.attributes[name], value, "{name}");
    }
    let recorded = database
        .text("SELECT message_id FROM outbox.dispatch")
        .await;
    assert_eq!(message.message_id, recorded);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_is_delivered_whole_or_not_at_all() {
    let Some((mut referee, database)) = stage().await else {
        return;
    };
    let relay = referee.relay(&database, &[]);
    database
        .execute(
            "BEGIN; INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
             VALUES ('order', 'o-0', 'Never'); ROLLBACK; \
             BEGIN; SAVEPOINT s; INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
             VALUES ('order', 'o-0', 'Never'); ROLLBACK TO s; COMMIT; \
             INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             SELECT 'order', 'o-' || (i % 50), 'OrderPlaced', i, jsonb_build_object('n', i), now() \
             FROM generate_series(1, 10000) i",
        )
        .await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    assert_eq!(in_state(&database, "published").await, 10_000);
    referee
        .assert_all_came_once_in_order(&database, &relay)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cut_connections_and_kill_9_under_load_lose_and_swap_nothing() {
    let Some((mut referee, database)) = stage().await else {
        return;
    };
    insert_orders(&database, 500, 10).await;
    let mut relay = referee.relay(&database, &[]);
    let load = Load::start(&database);
    for how in [Cut::Reset, Cut::Finish, Cut::Reset] {
        for _ in 0..3 {
            wait_for_more(&database, 30).await;
            referee.proxy.cut(how);
        }
        wait_for_more(&database, 30).await;
        relay.kill_9();
        relay = referee.relay(&database, &[]);
    }
    all_is_recorded(&database, load).await;
    referee.assert_all_came_in_order(&database, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_connections_a_black_hole_and_late_requests_lose_and_swap_nothing() {
    let Some((mut referee, database)) = stage().await else {
        return;
    };
    let relay = referee.relay(&database, &SHORT_ATTEMPTS);
    let load = Load::start(&database);
    wait_for_more(&database, 50).await;
    referee.proxy.refuse();
    referee.proxy.cut(Cut::Reset);
    relay.wait_for_log("pubsub-unreachable").await;
    load.wait_for_rows(200).await;
    referee.proxy.heal();
    for flow in [Flow::Swallowed, Flow::Stalled] {
        wait_for_more(&database, 50).await;
        referee.proxy.set_flow(flow);
        // Wait for longer than a publish attempt may take (1 s).
        tokio::time::sleep(Duration::from_secs(3)).await;
        referee.proxy.heal();
    }
    all_is_recorded(&database, load).await;
    referee.assert_all_came_in_order(&database, &relay).await;
    let log = relay.log();
    assert_eq!(log.matches("streaming").count(), 1, "one session:\n{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn clean_stops_and_a_standby_that_takes_over_under_load_repeat_nothing() {
    let Some((mut referee, database)) = stage().await else {
        return;
    };
    let mut relay = referee.relay(&database, &[]);
    let load = Load::start(&database);
    for _ in 0..3 {
        wait_for_more(&database, 50).await;
        let standby = referee.relay(&database, &[]);
        standby.wait_for_log("standby").await;
        relay.stop().await;
        relay = standby;
        wait_for_more(&database, 50).await;
        relay.stop().await;
        relay = referee.relay(&database, &[]);
    }
    all_is_recorded(&database, load).await;
    referee
        .assert_all_came_once_in_order(&database, &relay)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_and_crashes_of_postgresql_under_load_lose_and_swap_nothing() {
    let Some(mut referee) = Referee::start().await else {
        return;
    };
    let mut database = Database::private().await;
    let relay = referee.relay(&database, &[]);
    let load = Load::start(&database);
    for mode in [StopMode::Fast, StopMode::Immediate] {
        wait_for_more(&database, 50).await;
        database.server().restart(mode).unwrap();
        database.reconnect().await;
    }
    all_is_recorded(&database, load).await;
    referee.assert_all_came_in_order(&database, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_slot_loses_nothing() {
    let Some((mut referee, database)) = stage().await else {
        return;
    };
    let relay = referee.relay(&database, &[]);
    insert_orders(&database, 200, 7).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    database.drop_slot().await;
    database
        .execute(
            "INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             SELECT 'order', 'o-' || (i % 7), 'OrderPlaced', 1000 + i, '{}', clock_timestamp() \
             FROM generate_series(1, 300) i",
        )
        .await;
    let relay = referee.relay(&database, &[]);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    referee
        .assert_all_came_once_in_order(&database, &relay)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_deleted_and_restored_gets_the_events_that_waited_for_it() {
    let Some((mut referee, database)) = stage().await else {
        return;
    };
    let relay = referee.relay(&database, &[]);
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    referee
        .assert_all_came_once_in_order(&database, &relay)
        .await;
    referee.delete_topic("order.events").await;
    insert_orders(&database, 50, 5).await;
    relay.wait_for_log("topic-missing").await;
    // Keep the relay from publishing to the new topic before the topic has a subscription.
    referee.proxy.refuse();
    referee.proxy.cut(Cut::Reset);
    referee.create_topic("order.events").await;
    referee.subscribe("order.events").await;
    referee.proxy.heal();
    database.wait_until_recorded().await;
    referee
        .assert_all_came_once_in_order(&database, &relay)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_topics_are_waited_for_or_created_if_allowed() {
    let Some((mut referee, database)) = stage().await else {
        return;
    };
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
             VALUES ('invoice', 'i-1', 'Sent'), ('order', 'o-1', 'Placed')",
        )
        .await;
    let relay = referee.relay(&database, &[]);
    relay.wait_for_log("topic-missing").await;
    eventually("the existing topic is served", || async {
        (in_state(&database, "published").await == 1).then_some(())
    })
    .await;
    referee
        .assert_all_came_once_in_order(&database, &relay)
        .await;
    relay.stop().await;
    let relay = referee.relay(&database, &[("POSTRIDER_CREATE_TOPICS", "true")]);
    database.wait_until_recorded().await;
    relay.stop().await;
    referee.subscribe("invoice.events").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_over_a_limit_stops_only_its_key() {
    let Some((mut referee, database)) = stage().await else {
        return;
    };
    let relay = referee.relay(&database, &[]);
    insert_orders(&database, 50, 5).await;
    // Insert an event with an attribute value of more than 1,024 bytes, the limit of Pub/Sub.
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, headers, occurred_at) \
             VALUES ('order', 'o-3', 'Bad', jsonb_build_object('h', repeat('x', 1025)), \
                 clock_timestamp())",
        )
        .await;
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    // Expect the bad event and the ten later events of its key in quarantine.
    assert_eq!(
        in_state(&database, "quarantined").await,
        11,
        "{}",
        relay.log()
    );
    referee
        .assert_all_came_once_in_order(&database, &relay)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_blocked_by_a_schema_is_released_in_order_once_the_schema_is_gone() {
    let Some((mut referee, database)) = stage().await else {
        return;
    };
    referee.require_a_number(true).await;
    let relay = referee.relay(&database, &[]);
    insert_orders(&database, 50, 5).await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, occurred_at) \
             VALUES ('order', 'o-3', 'Bad', '{\"x\": 1}', clock_timestamp())",
        )
        .await;
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    let log = relay.log();
    assert_eq!(in_state(&database, "quarantined").await, 11, "{log}");
    referee
        .assert_all_came_once_in_order(&database, &relay)
        .await;
    referee.require_a_number(false).await;
    let release = ["quarantine", "release", "--all"];
    let url = [("DATABASE_URL", database.url.as_str())];
    assert!(postrider(&release, &url).output().unwrap().status.success());
    insert_orders(&database, 50, 5).await;
    eventually("everything is published", || async {
        (in_state(&database, "published").await == 151).then_some(())
    })
    .await;
    referee
        .assert_all_came_once_in_order(&database, &relay)
        .await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_publication_gap_come_once_and_in_order() {
    let Some((mut referee, database)) = stage().await else {
        return;
    };
    let relay = referee.relay(&database, &[]);
    insert_orders(&database, 100, 5).await;
    database.wait_until_audited().await;
    database
        .execute(
            "ALTER PUBLICATION postrider DROP TABLE outbox.events; \
             INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             SELECT 'order', 'gap-' || n % 3, 'OrderPlaced', n, '{}', clock_timestamp() \
             FROM generate_series(1, 50) n; \
             ALTER PUBLICATION postrider ADD TABLE outbox.events",
        )
        .await;
    insert_orders(&database, 100, 5).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.wait_for_log("publication-gap").await;
    referee
        .assert_all_came_once_in_order(&database, &relay)
        .await;
    relay.stop().await;
}
