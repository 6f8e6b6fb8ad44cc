//! Follows docs/tutorial/first-events.md, with its own relay and emulator instead of the demo's.

use crate::guide::Guide;
use crate::playground::Playground;

#[tokio::test(flavor = "multi_thread")]
async fn the_tutorial_does_what_it_says() {
    let page = Guide::read("tutorial/first-events.md");
    let stage = Playground::open().await;
    stage.shell("postrider init --apply");
    let first = stage.relay("postrider run");
    first.wait_for_log("streaming").await;

    let publish = page.block("sh", "'OrderPlaced'");
    stage.shell(&publish);
    stage.wait_until_published(1).await;
    let record = stage.shell(&page.block("sh", "from outbox.dispatch"));
    assert!(
        record.contains("published") && record.contains("order.events"),
        "{record}"
    );
    stage.shell(&page.block("sh", "rollback"));
    let slot = stage.shell(&page.block("sh", "postrider slot show"));
    assert!(slot.contains("postrider"), "{slot}");

    let second = stage.relay(page.block("sh", "postrider run").trim());
    second.wait_for_log("standby").await;
    first.kill_9();
    second.wait_for_log("streaming").await;
    stage.shell(&publish);
    stage.wait_until_published(2).await;

    stage.shell(&page.block("sh", "'OrderPaid'"));
    // Check that only the event of order 8 is published, while the two events of order 7 wait.
    stage.wait_until_published(3).await;
    let query = "SELECT count(*) FROM outbox.dispatch WHERE state = 'quarantined'";
    stage.wait_for(query, 2).await;
    let list = stage.shell(&page.block("sh", "postrider quarantine list"));
    let id = list
        .split_whitespace()
        .find(|word| word.len() == 36 && word.matches('-').count() == 4);
    let discard = page.block("sh", "postrider quarantine discard");
    stage.shell(&discard.replace("ID", id.expect("the list shows an id")));
    stage.wait_until_published(4).await;

    // Check that the rolled-back event was never sent, and that no event was sent twice.
    assert_eq!(stage.stored(), 4);
    second.stop();
}
