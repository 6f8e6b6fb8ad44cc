//! Tests that `postrider event` shows each message of a replayed event, and that `--rate` limits a
//! replay.

use std::time::{Duration, Instant};

use super::{environment, replayed, with_published_events};
use crate::harness::{Database, postrider};

/// Runs `postrider event ID` with and without `--json`. Returns the only event of the JSON output,
/// and the text output.
fn shown(database: &Database, id: &str) -> (serde_json::Value, String) {
    let run = |arguments: &[&str]| {
        let ran = postrider(arguments, &environment(database)).output();
        ran.unwrap().stdout
    };
    let mut json: serde_json::Value =
        serde_json::from_slice(&run(&["event", id, "--json"])).unwrap();
    let text = String::from_utf8(run(&["event", id])).unwrap();
    (json["events"][0].take(), text)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_keeps_its_original_message_through_all_replays() {
    let (database, _emulator, _relay) = with_published_events(10, 1).await;
    let id = "SELECT id::text FROM outbox.events WHERE version = 7";
    let id = database.text(id).await;
    let (before, text) = shown(&database, &id);
    let original = before["message_id"].as_str().unwrap().to_owned();
    assert!(before["replay"].is_null(), "{before}");
    assert_eq!(before["earlier_messages"], serde_json::json!([]));
    assert!(!text.contains("original"), "{text}");

    for n in 1..=12 {
        let name = format!("r{n}");
        let report = replayed(&database, 0, &[&id, "--yes", "--name", &name]);
        assert_eq!(report["sent"], 1, "{report}");
    }
    let (after, text) = shown(&database, &id);
    assert_eq!(after["replay"], "r12", "{after}");
    let earlier = after["earlier_messages"].as_array().unwrap();
    assert_eq!(earlier.len(), 10, "the number of kept messages is bounded");
    assert_eq!(
        earlier[0],
        serde_json::json!({
            "message_id": original, "replay": null, "published_at": before["record"]["recorded_at"],
        })
    );
    assert_eq!(earlier[9]["replay"], "r11");
    let last = after["message_id"].as_str().unwrap();
    assert!(earlier.iter().all(|message| message["message_id"] != last));
    for part in [
        &format!("published as message {last} by replay r12 at "),
        &format!("message    {last}, replay r12\n"),
        &format!("original   message {original}, published at "),
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    // The row of the event is gone, so a replay releases the event but cannot publish it again. The
    // event keeps its last message.
    let delete = format!("DELETE FROM outbox.events WHERE id = '{id}'");
    database.execute(&delete).await;
    for name in ["gone", "gone-again"] {
        let report = replayed(&database, 1, &["--key", "o-0", "--yes", "--name", name]);
        assert_eq!(
            (&report["sent"], &report["not_sent"]),
            (&9.into(), &1.into()),
            "{report}"
        );
    }
    let (gone, _) = shown(&database, &id);
    assert_eq!(gone["message_id"], last);
    assert_eq!(gone["replay"], "r12", "{gone}");
    let original_of_all = &gone["earlier_messages"][0]["message_id"];
    assert_eq!(original_of_all, original.as_str(), "{gone}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_is_not_faster_than_its_rate() {
    let (database, _emulator, _relay) = with_published_events(40, 20).await;
    let arguments = ["--since", "1h", "--yes", "--rate", "10"];
    let began = Instant::now();
    let report = replayed(
        &database,
        0,
        &[&arguments[..], &["--name", "slow"]].concat(),
    );
    let took = began.elapsed();
    assert_eq!(report["sent"], 40, "{report}");
    // The replay releases the last key only after the 38 events of the other keys. At 10 events per second, these
    // take 3.8 s.
    assert!(took >= Duration::from_millis(3_800), "{took:?}");
}
