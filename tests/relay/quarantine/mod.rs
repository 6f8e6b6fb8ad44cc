//! Tests of bad events. The relay quarantines a bad event together with the later events of its key.
//! Released events are published in order, and discarded events are not published.

mod long_ids;
mod release;
mod seen;
mod set_aside;

use crate::harness::{self, Database, Relay, eventually, insert_orders, postrider};
use crate::http::free_addr;
use pubsub_emulator::checks::{self, Expected, Report, Stream};
use pubsub_emulator::{Action, Fault, FaultId, RunningEmulator};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const BAD: &str = "00000000-0000-4000-8000-00000000bad0";

const BAD_TOO: &str = "00000000-0000-4000-8000-00000000bad1";

const TOPIC: &str = "projects/demo/topics/order.events";

/// Inserts an event with the id `id` and the ordering key `key`. [`poison`] makes it a bad event.
async fn insert_bad(database: &Database, id: &str, key: &str) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, version, \
                 payload, occurred_at) \
             VALUES ('{id}', 'order', '{key}', 'Bad', 0, '{{\"bad\": true}}', clock_timestamp())"
        ))
        .await;
}

/// Makes the emulator refuse the event `id`.
fn poison(emulator: &RunningEmulator, id: &str) -> FaultId {
    let event_id = id.to_owned();
    emulator
        .faults()
        .inject(Fault::new(Action::Poison { event_id }))
}

/// The number of dispatch rows in `state`.
async fn in_state(database: &Database, state: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM outbox.dispatch WHERE state = '{state}'");
    database.number(&sql).await
}

async fn wait_for_state(database: &Database, state: &str, count: i64) {
    eventually(&format!("{count} rows are {state}"), || async {
        (in_state(database, state).await == count).then_some(())
    })
    .await;
}

/// The ids of all published events per topic and key, in commit order.
async fn expected_published(database: &Database) -> Expected {
    let rows = database
        .client
        .query(
            "SELECT d.topic, coalesce(d.ordering_key, ''), d.event_id::text \
             FROM outbox.dispatch d WHERE d.state = 'published' \
             ORDER BY d.commit_lsn, d.ordinal",
            &[],
        )
        .await
        .unwrap();
    let mut expected = BTreeMap::new();
    for row in rows {
        let (topic, key, id): (String, String, String) = (row.get(0), row.get(1), row.get(2));
        let events: &mut Vec<String> = expected.entry(Stream::new(topic, key)).or_default();
        events.push(id);
    }
    expected
}

/// Compares the journal with the events that are `published` in `outbox.dispatch`, in commit order.
async fn check_published(database: &Database, emulator: &RunningEmulator) -> Report {
    let expected = expected_published(database).await;
    checks::check(&emulator.journal().attempts(), &expected)
}

/// Runs a command of `postrider quarantine`, and returns its standard output.
fn quarantine(database: &Database, arguments: &[&str]) -> String {
    let arguments: Vec<&str> = ["quarantine"].iter().chain(arguments).copied().collect();
    let ran = postrider(&arguments, &[("DATABASE_URL", &database.url)])
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&ran.stdout).into_owned(),
        String::from_utf8_lossy(&ran.stderr).into_owned(),
    );
    assert!(ran.status.success(), "{arguments:?}: {out}{err}");
    out
}

/// Prepares a database for a relay with default settings. The key `o-1` has five good events, then a
/// bad event, then `events / 2` events that wait behind it. The key `o-0` has good events only.
async fn with_a_blocked_key(events: u32) -> (Database, RunningEmulator, FaultId) {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let fault = poison(&emulator, BAD);
    insert_orders(&database, 10, 2).await;
    insert_bad(&database, BAD, "o-1").await;
    insert_orders(&database, events, 2).await;
    (database, emulator, fault)
}
