//! Incidents in which Pub/Sub or the mapping refuses some events. Only the keys of these events wait.

use pubsub_emulator::{Action, Fault};

use super::desk::Desk;
use super::sight::Expected;

const BAD: &str = "00000000-0000-4000-8000-00000000bad0";

/// The expected views while some events are in quarantine and the relay delivers all others. The
/// commands exit with 1, and the relay's log reports the quarantine.
const OTHERS_GO_ON: Expected = Expected {
    status: ("streaming", 1),
    slot: ("streaming", 1),
    log: &["set aside in quarantine"],
    ..Expected::HEALTHY
};

fn insert(id: &str, key: &str, more: (&str, &str)) -> String {
    let (column, value) = more;
    format!(
        "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, {column}) \
         VALUES ('{id}', 'order', '{key}', 'E', {value});"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_refuses_an_event() {
    let desk = Desk::new().await;
    let event_id = BAD.to_owned();
    desk.emulator
        .faults()
        .inject(Fault::new(Action::Poison { event_id }));
    let bad = insert(BAD, "bad-key", ("payload", "'1'"));
    desk.database.execute(&bad).await;
    let behind = "00000000-0000-4000-8000-000000000002";
    let behind = insert(behind, "bad-key", ("payload", "'2'"));
    desk.database.execute(&behind).await;
    desk.write_events().await;
    let says: &[&str] = &[
        "except those in quarantine",
        "key \"bad-key\": 2 events",
        BAD,
        "quarantine list",
    ];
    desk.sees(OTHERS_GO_ON.says(says).quarantined(2)).await;
    desk.emulator.faults().lift_all();
    let released = desk.run(&["quarantine", "release", "--key", "bad-key"]);
    assert!(released.status.success(), "{released:?}");
    desk.sees(Expected::HEALTHY).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn some_events_can_never_be_published() {
    let desk = Desk::new().await;
    let bad = [
        ("payload", "to_jsonb(repeat('x', 11000000))"),
        ("headers", "jsonb_build_object('x', repeat('y', 1100))"),
        (
            "headers",
            "(SELECT jsonb_object_agg('h' || i, 'v') FROM generate_series(1, 101) i)",
        ),
        ("headers", "'{\"google_x\": \"v\"}'"),
        ("headers", "'[1, 2]'"),
    ];
    for (n, more) in bad.into_iter().enumerate() {
        let id = format!("00000000-0000-4000-8000-00000000000{n}");
        let key = format!("bad-{n}");
        desk.database.execute(&insert(&id, &key, more)).await;
    }
    let fine = ("payload", "'1'");
    let id = |n: u32| format!("00000000-0000-4000-8000-00000000001{n}");
    let no_topic = insert(&id(0), "bad-topic", fine).replace("'order'", "'no/topic'");
    desk.database.execute(&no_topic).await;
    let long_key = insert(&id(1), &"k".repeat(1_025), fine);
    desk.database.execute(&long_key).await;
    desk.write_events().await;
    desk.sees(
        OTHERS_GO_ON
            .says(&[
                "7 events; `postrider quarantine list`",
                "except those in quarantine",
            ])
            .quarantined(7),
    )
    .await;
    let listed = desk.run(&["quarantine", "list"]);
    let listed = String::from_utf8(listed.stdout).unwrap();
    for reason in [
        "1100 bytes",
        "101 attributes",
        "begins with \"goog\"",
        "11000042 bytes",
        "headers",
        "no/topic",
        "1025 bytes",
    ] {
        assert!(listed.contains(reason), "{reason} in\n{listed}");
    }
    let discarded = desk.run(&["quarantine", "discard", "--all", "--yes"]);
    assert!(discarded.status.success(), "{discarded:?}");
    desk.sees(Expected::HEALTHY).await;
}
