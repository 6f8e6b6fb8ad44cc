//! Tests a topic with many keys that accepts requests but never answers them. Other topics must continue.

use pubsub_emulator::{Action, Fault};

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::http::{free_addr, metric};

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_never_answers_does_not_hold_up_other_topics() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    emulator
        .create_topic("projects/demo/topics/hanging.events")
        .await
        .unwrap();
    let fault = Fault::new(Action::NeverAnswer).on_topic("hanging.events");
    let fault = emulator.faults().inject(fault);
    let port = free_addr();
    let settings = [
        ("POSTRIDER_HTTP_ADDR", port.as_str()),
        ("POSTRIDER_PUBLISH_TIMEOUT_S", "1"),
    ];
    let relay = Relay::start_with(&database, &emulator.addr().to_string(), &settings);
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             SELECT 'hanging', 'h-' || i, 'Made', i, '{}' FROM generate_series(1, 40) i",
        )
        .await;
    // Wait until all forty requests and two retries have timed out. Each failure halves the limit on
    // requests in flight, so the relay now sends only one request at a time, over all topics together.
    eventually("the topic has failed often", || async {
        let failures = metric(&port, "postrider_publish_failures_total").await?;
        (failures >= 42.0).then_some(())
    })
    .await;
    insert_orders(&database, 20, 5).await;
    let delivered = "SELECT count(*) FROM outbox.dispatch WHERE topic LIKE '%order%'";
    eventually("the events of the other topic are delivered", || async {
        (database.number(delivered).await == 20).then_some(())
    })
    .await;
    let all = "SELECT count(*) FROM outbox.dispatch";
    assert_eq!(database.number(all).await, 20, "{}", relay.log());
    emulator.faults().lift(fault);
    database.wait_until_recorded().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    relay.stop().await;
}
