//! Follows docs/how-to/replay.md, docs/how-to/recover.md and docs/how-to/quarantine.md.

use pubsub_emulator::{Action, Fault};
use tonic::Code;

use crate::guide::Guide;
use crate::playground::Playground;

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_a_replay_publish_the_events_again() {
    let page = Guide::read("how-to/replay.md");
    let stage = Playground::open().await;
    stage.shell("postrider init --apply");
    let relay = stage.relay("postrider run");
    let insert = "SELECT outbox.emit('order', '7', 'OrderPlaced', '{}')";
    stage.client.batch_execute(insert).await.expect("an event");
    stage.wait_until_published(1).await;
    stage.shell(&page.block("sh", "--dry-run"));
    assert_eq!(stage.stored(), 1);
    stage.shell(&page.block("sh", "--yes"));
    stage.wait_until_published(1).await;
    assert_eq!(stage.stored(), 2);
    relay.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_with_the_record_of_the_page_is_not_recovered() {
    let page = Guide::read("how-to/recover.md");
    let stage = Playground::open().await;
    stage.shell("postrider init --apply");
    let insert =
        "SELECT outbox.emit('order', n::text, 'OrderPlaced', '{}') FROM generate_series(1, 3) n";
    stage.client.batch_execute(insert).await.expect("events");
    let id = "SELECT id::text FROM outbox.events WHERE aggregateid = '2'";
    let id: String = stage.client.query_one(id, &[]).await.expect("a row").get(0);
    let record = page.block("sql", "INSERT INTO outbox.dispatch");
    let record = record.replace("00000000-0000-0000-0000-000000000000", &id);
    stage.client.batch_execute(&record).await.expect("a record");

    stage.shell(&page.block("sh", "--dry-run"));
    stage.shell(&page.block("sh", "postrider recover --yes"));
    let relay = stage.relay("postrider run");
    stage.wait_until_published(2).await;
    assert_eq!(stage.stored(), 2);
    relay.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_the_quarantine_release_and_discard_events() {
    let page = Guide::read("how-to/quarantine.md");
    let stage = Playground::open().await;
    stage.shell("postrider init --apply");
    let relay = stage.relay("postrider run");
    // The topic refuses the first event of each key, and one event waits behind each.
    let refusal = Fault::new(Action::Fail(Code::InvalidArgument));
    let refusal = stage.emulator.faults().inject(refusal);
    let insert = "
        INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, payload)
        SELECT ('00000000-0000-4000-8000-0000000000' || key || n)::uuid, 'order', 'k' || key, 'E', '{}'
        FROM generate_series(1, 4) key, generate_series(1, 2) n ORDER BY key, n";
    stage.client.batch_execute(insert).await.expect("events");
    let waiting = "SELECT count(*) FROM outbox.dispatch WHERE state = 'quarantined'";
    stage.wait_for(waiting, 8).await;
    let id = |key: u8| format!("00000000-0000-4000-8000-0000000000{key}1");
    let list = stage.shell(&page.block("sh", "postrider quarantine list"));
    assert!(list.contains(&id(4)) && list.contains("k4"), "{list}");

    // The cause is fixed. But the event of the fourth key is wrong, so discard it and release the event behind it.
    stage.emulator.faults().lift(refusal);
    let discard = page.block("sh", "postrider quarantine discard");
    let said = stage.shell(&discard.replace("ID", &id(4)).replace("KEY", "k4"));
    assert!(said.contains("Discarded 1 event"), "{said}");
    assert!(said.contains("Released 1 event"), "{said}");

    // Release one key by the id of its event, another key by its name, and then all remaining keys.
    let release = page.block("sh", "postrider quarantine release --all");
    let release = release.replace("ID", &id(1)).replace("KEY", "k2");
    let said = stage.shell(&release);
    assert_eq!(said.matches("Released ").count(), 3, "{said}");
    assert!(said.matches("Released 2 events").count() >= 2, "{said}");
    stage.wait_until_published(7).await;
    stage.wait_for(waiting, 0).await;
    assert_eq!(stage.stored(), 7);
    relay.stop();
}
