//! Tests of `dispatch = exceptions`, where published events get no dispatch row. No event is lost. If the
//! relay repeats an event, it also repeats the later events of the key, in order. The relay *vouches* for
//! events by raising the floor of their table above them.

mod blocked;
mod edges;
mod interrupted;
mod kept_slot;
mod lost_slot;
mod modes;
mod no_rows;
mod publication;

use std::collections::HashSet;

use pubsub_emulator::checks::{self, Report};
use pubsub_emulator::{Action, Fault, RunningEmulator};

use crate::harness::{self, Database, Relay, eventually, postrider};

const EXCEPTIONS: [(&str, &str); 1] = [("POSTRIDER_DISPATCH", "exceptions")];
pub(crate) const BAD: &str = "00000000-0000-4000-8000-00000000bad0";

pub(crate) fn start(database: &Database, emulator: &RunningEmulator) -> Relay {
    start_with(database, emulator, &[])
}

pub(crate) fn start_with(
    database: &Database,
    emulator: &RunningEmulator,
    more: &[(&str, &str)],
) -> Relay {
    let settings: Vec<_> = EXCEPTIONS.iter().chain(more).copied().collect();
    Relay::start_with(database, &emulator.addr().to_string(), &settings)
}

/// SQL that inserts events with the versions `first..first + count`, one transaction per event, over
/// 5 keys that begin with `key`.
fn insert_sql(key: &str, first: u32, count: u32) -> String {
    format!(
        "DO $$ BEGIN FOR i IN {first}..{last} LOOP \
         INSERT INTO outbox.events \
             (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
         VALUES ('order', '{key}-' || (i % 5), 'OrderPlaced', i, '{{}}', clock_timestamp()); \
         COMMIT; END LOOP; END $$",
        last = first + count - 1
    )
}

pub(crate) async fn insert(database: &Database, first: u32, count: u32) {
    database.execute(&insert_sql("o", first, count)).await;
}

pub(crate) async fn insert_bad(database: &Database, version: u32) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, version, \
                 payload, occurred_at) \
             VALUES ('{BAD}', 'order', 'o-1', 'Bad', {version}, '{{}}', clock_timestamp())"
        ))
        .await;
}

/// Makes the emulator refuse the event [`BAD`].
pub(crate) fn poison(emulator: &RunningEmulator) {
    let event_id = BAD.to_owned();
    let fault = Fault::new(Action::Poison { event_id });
    emulator.faults().inject(fault);
}

/// The ids of the events that the emulator has stored.
pub(crate) fn stored(emulator: &RunningEmulator) -> HashSet<String> {
    let attempts = emulator.journal().attempts();
    let stored = attempts.iter().filter(|attempt| attempt.is_stored());
    let ids = stored.flat_map(|attempt| attempt.event_ids.iter().flatten());
    ids.map(|id| id.to_string()).collect()
}

/// Waits until every event is stored or has a dispatch row, no recovery is open, and the slot has
/// confirmed everything.
pub(crate) async fn wait_until_delivered(
    database: &Database,
    emulator: &RunningEmulator,
    relay: &Relay,
) {
    let sql = "SELECT e.id::text FROM outbox.events e WHERE NOT EXISTS \
               (SELECT FROM outbox.dispatch d WHERE d.event_id = e.id)";
    eventually("every event is delivered", || async {
        let stored = stored(emulator);
        let rows = database.client.query(sql, &[]).await.unwrap();
        let is_missing = |row: &tokio_postgres::Row| !stored.contains(row.get::<_, &str>(0));
        let missing = rows.iter().any(is_missing);
        assert!(!relay.log().contains("error["), "{}", relay.log());
        (!missing).then_some(())
    })
    .await;
    wait_until_recovered(database).await;
    database.wait_until_confirmed().await;
}

async fn wait_until_recovered(database: &Database) {
    eventually("the recovery mark is gone", || async {
        let marked = "SELECT count(*) FROM outbox.relay WHERE recovering IS NOT NULL";
        (database.number(marked).await == 0).then_some(())
    })
    .await;
}

/// Waits until the relay has vouched for all events: the floor of their table is above the transactions that
/// inserted them.
pub(crate) async fn wait_until_vouched(database: &Database) {
    let sql = "SELECT count(*) FROM outbox.capture c WHERE NOT EXISTS \
               (SELECT FROM outbox.events e WHERE e.inserted_xid >= c.floor)";
    eventually("the relay has vouched", || async {
        (database.number(sql).await == 1).then_some(())
    })
    .await;
}

/// The number of dispatch rows in `state`.
pub(crate) async fn rows(database: &Database, state: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM outbox.dispatch WHERE state = '{state}'");
    database.number(&sql).await
}

/// Compares the emulator's journal with the table. The relay must have published every event, except the events
/// that are set aside: their dispatch row has a state other than `published`. The order within each key must be
/// right. If the relay repeated an event, it must also have repeated the later events of the key.
pub(crate) async fn check(database: &Database, emulator: &RunningEmulator) -> Report {
    let mut expected = database.expected().await;
    let aside = "SELECT event_id::text FROM outbox.dispatch WHERE state <> 'published'";
    let aside = database.client.query(aside, &[]).await.unwrap();
    let aside: HashSet<String> = aside.iter().map(|row| row.get(0)).collect();
    for events in expected.values_mut() {
        events.retain(|id| !aside.contains(id));
    }
    checks::check(&emulator.journal().attempts(), &expected)
}

pub(crate) async fn assert_whole_and_in_order(
    database: &Database,
    emulator: &RunningEmulator,
    relay: &Relay,
) {
    let report = check(database, emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
}

/// Like `assert_whole_and_in_order`, and also checks that no event was repeated. Allows repeats if the
/// relay lost its lease, because requests may have been in flight.
pub(crate) async fn assert_once_and_in_order(
    database: &Database,
    emulator: &RunningEmulator,
    relay: &Relay,
) {
    let report = check(database, emulator).await;
    let once = report.duplicates.is_empty() || relay.has_lost_its_slot();
    assert!(report.is_clean() && once, "{report}\n{}", relay.log());
}

/// Starts a relay and waits until it has delivered `count` events.
async fn after_some_events(count: u32) -> (Database, RunningEmulator, Relay) {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator);
    insert(&database, 1, count).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    (database, emulator, relay)
}

async fn make_slot(database: &Database) {
    let slot = database.slot();
    let sql = format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')");
    database.execute(&sql).await;
}

/// Waits until the relay has completed a switch to `dispatch = full`. The relay writes `full` to `outbox.relay` only
/// when an audit or a recovery has raised the floors above all events that were published without a record.
pub(crate) async fn wait_until_compared(database: &Database) {
    let sql = "SELECT count(*) FROM outbox.relay WHERE dispatch = 'full'";
    eventually("the tables are compared", || async {
        (database.number(sql).await == 1).then_some(())
    })
    .await;
}

pub(crate) fn release(database: &Database) {
    let url = [("DATABASE_URL", database.url.as_str())];
    let ran = postrider(&["quarantine", "release", "--all"], &url).output();
    assert!(ran.unwrap().status.success());
}
