//! Tests an event whose id PostgreSQL cannot send.

use super::*;
use crate::harness::postrider;

/// The relay cannot find the row of the quarantined event, because PostgreSQL cannot send the row's id. So nobody can
/// release the event. The log and `postrider event` advise to insert the event again.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_whose_id_cannot_be_read_must_be_inserted_again() {
    let database = in_encoding("SQL_ASCII").await;
    let emulator = harness::emulator().await;
    database
        .execute(
            "ALTER TABLE outbox.events ALTER id DROP DEFAULT, ALTER id TYPE text, \
             ALTER id SET DEFAULT gen_random_uuid()::text",
        )
        .await;
    let relay = Relay::start(&database, &emulator);
    database
        .execute(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type) \
             VALUES (convert_from('\\xff', 'SQL_ASCII'), 'order', 'bad id', 'OrderPlaced')",
        )
        .await;
    relay.wait_for_log("insert the event again").await;
    let log = relay.log();
    assert!(!log.contains("release the event"), "{log}");
    eventually("the event is in quarantine", || async {
        (states(&database).await == "quarantined 1").then_some(())
    })
    .await;
    relay.stop().await;
    let id = database
        .text("SELECT event_id::text FROM outbox.dispatch")
        .await;
    let shown = postrider(&["event", &id], &[("DATABASE_URL", database.url.as_str())]).output();
    let shown = String::from_utf8(shown.unwrap().stdout).unwrap();
    assert!(shown.contains("insert it again as a new event"), "{shown}");
}
