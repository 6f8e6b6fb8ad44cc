//! Google's own Python, Node and Rust clients publish and receive in order through the emulator.
//!
//! The Python and Node clients are installed once from their registries, into a folder below the
//! cargo target directory. If the installation fails (offline, no interpreter), the test is skipped
//! and prints the reason to standard error.

mod install;
mod rust_client;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use pubsub_emulator::checks::{self, Expected, Stream};
use pubsub_emulator::{Emulator, RunningEmulator};
use serde_json::Value;
use tokio::process::Command;

const PROJECT: &str = "clients";
const KEYS: usize = 5;
const PER_KEY: u64 = 40;
/// How long a script may run. The script's own deadline is shorter, so the script normally reports
/// a timeout itself.
const SCRIPT_LIMIT: Duration = Duration::from_secs(240);

#[tokio::test]
async fn googles_python_client_publishes_and_receives_in_order() {
    let Some(python) = install::python_client() else {
        return;
    };
    let emulator = Emulator::builder().start().await.expect("a free port");
    let mut script = Command::new(python);
    script.arg(script_path("ordered.py"));
    let summary = run(script, emulator.addr()).await;
    assert_received_in_order(&summary);
    assert_eq!(summary["left"], 0, "everything was acknowledged");
    assert_published_in_order(&emulator, "python-orders");
    emulator.shutdown().await;
}

#[tokio::test]
async fn googles_node_client_publishes_and_receives_in_order() {
    let Some(modules) = install::node_client() else {
        return;
    };
    let emulator = Emulator::builder().start().await.expect("a free port");
    let mut script = Command::new("node");
    script
        .arg(script_path("ordered.cjs"))
        .env("NODE_PATH", modules);
    let summary = run(script, emulator.addr()).await;
    assert_received_in_order(&summary);
    assert_published_in_order(&emulator, "node-orders");
    emulator.shutdown().await;
}

fn script_path(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/google_clients")
        .join(name)
}

/// Runs a script against the emulator and reads the summary that the script prints.
async fn run(mut script: Command, emulator: SocketAddr) -> Value {
    script
        .args([PROJECT, &KEYS.to_string(), &PER_KEY.to_string()])
        .env("PUBSUB_EMULATOR_HOST", emulator.to_string())
        // Without these variables the clients look for a metadata server, which does not exist
        // here.
        .env("METADATA_SERVER_DETECTION", "none")
        .env("NO_GCE_CHECK", "true")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(SCRIPT_LIMIT, script.output()).await;
    let output = output
        .expect("the script ends in time")
        .expect("the script runs");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"))
}

/// Checks that the first copies of each key arrive in order, and that the emulator redelivers every
/// message of the nacked key (`key-0`), in order.
fn assert_received_in_order(summary: &Value) {
    assert_eq!(summary["finished"], true, "{summary}");
    assert_eq!(summary["message_ids"], KEYS as u64 * PER_KEY);
    let received: BTreeMap<String, Vec<u64>> =
        serde_json::from_value(summary["received"].clone()).expect("numbers per key");
    assert_eq!(received.len(), KEYS);
    let expected: Vec<u64> = (0..PER_KEY).collect();
    for (key, numbers) in received {
        let mut first_copies = Vec::new();
        for number in &numbers {
            if !first_copies.contains(number) {
                first_copies.push(*number);
            }
        }
        assert_eq!(first_copies, expected, "{key}: {numbers:?}");
        let again = numbers
            .iter()
            .rposition(|number| *number == 0)
            .expect("received");
        assert_eq!(numbers[again..], expected, "{key}: {numbers:?}");
        assert_eq!(
            again > 0,
            key == "key-0",
            "only the nacked key is redelivered: {key}"
        );
    }
}

/// Checks that the journal has the messages that the script published, in order and without
/// duplicates.
fn assert_published_in_order(emulator: &RunningEmulator, topic: &str) {
    let topic = format!("projects/{PROJECT}/topics/{topic}");
    let expected: Expected = (0..KEYS)
        .map(|key| {
            let key = format!("key-{key}");
            let events = (0..PER_KEY).map(|n| format!("{key}/{n}")).collect();
            (Stream::new(topic.clone(), key), events)
        })
        .collect();
    let report = checks::check(&emulator.journal().attempts(), &expected);
    assert!(report.is_clean(), "{report}");
    assert_eq!(report.duplicates, []);
}
