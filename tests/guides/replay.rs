//! Follows docs/how-to/replay.md and docs/how-to/recover.md.

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
