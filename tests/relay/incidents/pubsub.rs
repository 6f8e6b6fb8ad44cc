//! Incidents in which Pub/Sub is unreachable, or refuses the events of some topics.

use fault_proxy::{Cut, FaultProxy};
use pubsub_emulator::{Action, Fault};
use tonic::Code;

use super::desk::Desk;
use super::sight::Expected;
use crate::harness::{self, Database};

const BLOCKED: Expected = Expected {
    status: ("blocked-on-pubsub", 1),
    slot: ("blocked-on-pubsub", 1),
    port: Some("blocked-on-pubsub"),
    ready: Some(503),
    code: None,
    says: &[],
    log: &[],
    quarantined: None,
};

/// For each topic: its name, the gRPC code with which Pub/Sub refuses its events (`None` if the
/// topic is deleted instead), and the error code and the hint that the views must show.
const REFUSED: [(&str, Option<Code>, &str, &str); 4] = [
    ("missing", None, "topic-missing", "create the topic"),
    (
        "forbidden",
        Some(Code::PermissionDenied),
        "pubsub-permission",
        "grant roles/pubsub.publisher",
    ),
    (
        "throttled",
        Some(Code::ResourceExhausted),
        "pubsub-throttled",
        "raise the Pub/Sub quota",
    ),
    (
        "expired",
        Some(Code::Unauthenticated),
        "pubsub-unauthenticated",
        "check the credentials",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn pubsub_is_unreachable() {
    let emulator = harness::emulator().await;
    let proxy = FaultProxy::start(emulator.addr()).await.unwrap();
    let pubsub = proxy.addr().to_string();
    let mut desk = Desk::prepared(Database::start().await, emulator, pubsub);
    desk.begin().await;
    proxy.refuse();
    proxy.cut(Cut::Reset);
    desk.write_events().await;
    let away = Expected {
        code: Some("pubsub-unreachable"),
        ..BLOCKED
    };
    desk.sees(away.says(&[
        "BLOCKED ON PUBSUB for ",
        "topic order.events",
        "no action needed",
        "40 events not recorded yet, the oldest",
        "40 events waiting, the oldest",
    ]))
    .await;
    proxy.heal();
    desk.sees_all_delivered_and_logs(&["works again"]).await;
}

/// Each topic fails for a different reason: it is deleted, the relay has no permission, the quota is used
/// up, or Pub/Sub refuses the credentials. The views show the error code of each topic.
#[tokio::test(flavor = "multi_thread")]
async fn pubsub_refuses_topics() {
    let desk = Desk::new().await;
    let faults = desk.emulator.faults();
    let full_name = |name: &str| format!("projects/demo/topics/{name}.events");
    for (name, refusal, _, _) in REFUSED {
        desk.emulator.create_topic(&full_name(name)).await.unwrap();
        match refusal {
            None => faults.remove_topic(full_name(name)),
            Some(code) => {
                faults.inject(Fault::new(Action::Fail(code)).on_topic(full_name(name)));
            }
        }
        let insert = format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
             SELECT '{name}', i::text, 'E', '1' FROM generate_series(1, 5) i"
        );
        desk.database.execute(&insert).await;
    }
    let refused = BLOCKED.says(&[
        "BLOCKED ON PUBSUB for ",
        "of 4 topics",
        "20 events not recorded yet, the oldest",
    ]);
    let sight = desk.sees(refused).await;
    for (name, _, code, hint) in REFUSED {
        let line = |screen: &str| {
            let mut lines = screen.lines();
            let topic = format!("{name}.events  {code} for ");
            lines.find(|line| line.contains(&topic)).map(str::to_owned)
        };
        for screen in [&sight.status.screen, &sight.slot.screen] {
            let line = line(screen).unwrap_or_else(|| panic!("{name}: {sight}"));
            assert!(line.contains("5 events waiting, the oldest"), "{line}");
        }
        let port = sight.port.as_ref().unwrap().to_string();
        let metrics = sight.metrics.as_deref().unwrap();
        for (text, part) in [
            (sight.status.screen.as_str(), hint),
            (sight.log.as_str(), code),
            (port.as_str(), format!("\"code\":\"{code}\"").as_str()),
            (metrics, format!("{name}.events").as_str()),
        ] {
            assert!(text.contains(part), "{part}: {sight}");
        }
    }
    // `lift_all` ends the refusals, and restores the deleted topic.
    faults.lift_all();
    desk.sees_all_delivered_and_logs(&[
        "works again topic=\"projects/demo/topics/missing.events\"",
        "works again topic=\"projects/demo/topics/forbidden.events\"",
        "works again topic=\"projects/demo/topics/throttled.events\"",
        "works again topic=\"projects/demo/topics/expired.events\"",
    ])
    .await;
}
