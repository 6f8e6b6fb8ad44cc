//! Tests that the views name the ordering keys that wait: for a failing topic, or in quarantine.

use pubsub_emulator::{Action, Fault};
use tonic::Code;

use crate::harness::{self, Database, Relay, eventually, insert_orders, postrider};
use crate::http::{free_addr, get};

const TOPIC: &str = "projects/demo/topics/order.events";

/// What `postrider status` prints.
fn status(database: &Database, more: &[&str]) -> String {
    let arguments: Vec<&str> = ["status"].iter().chain(more).copied().collect();
    let ran = postrider(&arguments, &[("DATABASE_URL", &database.url)]).output();
    String::from_utf8(ran.unwrap().stdout).unwrap()
}

fn status_json(database: &Database) -> serde_json::Value {
    serde_json::from_str(&status(database, &["--json"])).unwrap()
}

/// Waits until `status` names `count` keys of the failing topic, and returns them.
async fn keys_of_topic(database: &Database, count: usize) -> Vec<serde_json::Value> {
    eventually(&format!("{count} keys are named"), || async {
        let shown = status_json(database);
        let keys = shown["condition"]["topics"][0]["keys"].as_array()?;
        (keys.len() == count).then(|| keys.clone())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_keys_that_wait_for_a_failing_topic_are_named_oldest_first() {
    // With the second fault, Pub/Sub never answers. The requests are then in flight nearly all the time, and do not
    // wait in a queue. `status` must name the keys of these requests too.
    for action in [Action::Fail(Code::NotFound), Action::NeverAnswer] {
        let database = Database::start().await;
        let emulator = harness::emulator().await;
        let fault = Fault::new(action).on_topic("order.events");
        emulator.faults().inject(fault);
        let addr = free_addr();
        let environment = [
            ("POSTRIDER_HTTP_ADDR", addr.as_str()),
            ("POSTRIDER_PUBLISH_TIMEOUT_S", "3"),
        ];
        let relay = Relay::start_with(&database, &emulator.addr().to_string(), &environment);
        insert_orders(&database, 80, 8).await;
        let keys = keys_of_topic(&database, 5).await;
        let names: Vec<&str> = keys
            .iter()
            .map(|key| key["ordering_key"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["o-1", "o-2", "o-3", "o-4", "o-5"], "{keys:#?}");
        for key in &keys {
            assert_eq!(key["waiting_events"], 10, "{keys:#?}");
            assert!(key["oldest_seconds"].as_f64().unwrap() > 0.0, "{keys:#?}");
        }
        let shown = status(&database, &[]);
        assert!(
            shown.contains("key \"o-1\": 10 events, the oldest"),
            "{shown}"
        );
        let (_, public) = get(&addr, "/status").await.unwrap();
        assert!(
            public.contains("order.events") && !public.contains("o-1"),
            "keys may be personal data: {public}"
        );
        relay.kill_9();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn status_names_the_five_keys_in_quarantine_that_wait_longest() {
    let database = Database::start().await;
    database
        .execute(&format!(
            "INSERT INTO outbox.dispatch (commit_lsn, ordinal, event_id, topic, ordering_key, \
                 state, attempts, committed_at, error) \
             SELECT '0/8', n, gen_random_uuid(), '{TOPIC}', \
                    E'k\\x1b[31m-' || lpad((n / 1500)::text, 3, '0'), \
                    'quarantined', 0, now() - n * interval '1 second', 'event-refused: made by a test' \
             FROM generate_series(1, 15000) n"
        ))
        .await;
    let shown = status_json(&database);
    let keys = shown["quarantine"]["keys"].as_array().unwrap();
    let names: Vec<&str> = keys
        .iter()
        .map(|key| key["ordering_key"].as_str().unwrap())
        .map(|key| key.rsplit('-').next().unwrap())
        .collect();
    assert_eq!(names, ["010", "009", "008", "007", "006"], "{shown:#}");
    let counted = (&keys[0]["events"], &keys[1]["events"]);
    assert_eq!(counted, (&1.into(), &1_000.into()));
    let shown = status(&database, &[]);
    assert!(!shown.contains('\u{1b}'), "{shown:?}");
    assert!(shown.contains("-009\": at least 1000 events"), "{shown}");
}
