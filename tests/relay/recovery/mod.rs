//! Tests in which the slot is lost or recreated, or never existed, but no event is lost. The relay
//! publishes unrecorded rows from the tables, in order per key, and then continues with the stream.

mod blocked;
mod copies;
mod forecast;
mod from_table;
mod interrupted;
mod later_state;
pub(crate) mod lost_slot;
mod other_server;
mod table_added;
mod upgrade;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use pubsub_emulator::{Action, Fault, RunningEmulator};
use scratch_postgres::{ScratchPostgres, StopMode};
use std::os::unix::fs::FileExt;
use std::time::Duration;
use tonic::Code;

/// Inserts events with the versions `first..first + count` over 7 keys, one transaction per event.
/// A test must not use a version twice.
async fn insert(database: &Database, first: u32, count: u32) {
    database.execute(&insert_sql("o", first, count)).await;
}

fn insert_sql(key: &str, first: u32, count: u32) -> String {
    format!(
        "DO $$ BEGIN FOR i IN {first}..{last} LOOP \
         INSERT INTO outbox.events \
             (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
         VALUES ('order', '{key}-' || (i % 7), 'OrderPlaced', i, \
                 jsonb_build_object('n', i), clock_timestamp()); \
         COMMIT; END LOOP; END $$",
        last = first + count - 1
    )
}

/// Creates a new slot under the name of the relay's lost slot, so that the relay may take it for the old slot. The
/// new slot begins at the end of the WAL.
async fn create_slot(database: &Database) {
    let slot = database.slot();
    database
        .execute(&format!(
            "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
        ))
        .await;
}

/// Delivers 200 events with a relay, and then stops the relay cleanly.
async fn served_and_stopped() -> (Database, RunningEmulator) {
    served_by(Database::start().await).await
}

/// Like [`served_and_stopped`], but with the given database.
async fn served_by(database: Database) -> (Database, RunningEmulator) {
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 1, 200).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    (database, emulator)
}

async fn recorded(database: &Database) -> i64 {
    database
        .number("SELECT count(*) FROM outbox.dispatch")
        .await
}

async fn wait_until_recovered(database: &Database) {
    eventually("the recovery mark is gone", || async {
        let marked = "SELECT count(*) FROM outbox.relay WHERE recovering IS NOT NULL";
        (database.number(marked).await == 0).then_some(())
    })
    .await;
}

/// Waits until the recovery is over and everything is recorded and confirmed. Checks that every event
/// was published once and in order. Allows repeats if the relay lost its lease, because requests may
/// have been in flight.
async fn assert_nothing_is_lost_or_repeated(
    database: &Database,
    emulator: &RunningEmulator,
    relay: &Relay,
) {
    database.wait_until_recorded().await;
    wait_until_recovered(database).await;
    database.wait_until_confirmed().await;
    let report = harness::check(database, emulator).await;
    let once = report.duplicates.is_empty() || relay.has_lost_its_slot();
    assert!(report.is_clean() && once, "{report}\n{}", relay.log());
}
