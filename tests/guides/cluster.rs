//! Follows docs/how-to/move-to-another-cluster.md. The new server has lower transaction ids than
//! the old one.

use crate::guide::Guide;
use crate::playground::{Playground, connect, server};

const EVENT: &str = "SELECT outbox.emit('order', '7', 'OrderPlaced', '{}')";

/// Returns the number in the hint: the transaction id that the new cluster must reach.
fn id_in(hint: &str) -> &str {
    let (_, after) = hint
        .split_once("pg_current_xact_id() < '")
        .expect("the hint has a statement");
    after.split('\'').next().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_dump_and_restore_only_the_waiting_events_are_published() {
    let page = Guide::read("how-to/move-to-another-cluster.md");
    let mut stage = Playground::open().await;
    if !stage.server.programs().join("pg_dump").is_file() {
        println!("SKIPPED: this PostgreSQL comes without pg_dump");
        return;
    }
    let use_ids =
        "DO $$ BEGIN FOR i IN 1..500 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$";
    stage
        .client
        .batch_execute(use_ids)
        .await
        .expect("transactions");
    stage.shell("postrider init --apply");
    let relay = stage.relay("postrider run");
    stage.client.batch_execute(EVENT).await.expect("an event");
    stage.wait_until_published(1).await;
    relay.stop();
    stage
        .client
        .batch_execute(EVENT)
        .await
        .expect("an event that waits");

    // Follow steps 1 and 3 of the how-to page: copy the roles, then dump and restore the database.
    let new = server();
    let urls = [
        ("OLD_SUPERUSER_URL", stage.server.url("postgres")),
        ("NEW_SUPERUSER_URL", new.url("postgres")),
    ];
    let environment = urls.each_ref().map(|(name, url)| (*name, &**url));
    let roles =
        "pg_dumpall --roles-only --dbname \"$OLD_SUPERUSER_URL\" | grep -v 'ROLE postgres' |
                 psql \"$NEW_SUPERUSER_URL\" --set ON_ERROR_STOP=1";
    for script in [roles, &page.block("sh", "pg_dump")] {
        let done = stage.try_shell(script, &environment);
        assert!(done.status.success(), "{script}: {done:#?}");
    }
    stage.client = connect(&new).await;
    let old = std::mem::replace(&mut stage.server, new);

    // Follow steps 4 to 6: see which rows wait, adopt the new database, and start the relay.
    let dry_run = page.block("sh", "postrider recover --dry-run");
    let adopt = page.block("sh", "postrider recover --adopt");
    let [_, refused] = [&adopt, &dry_run].map(|command| {
        let refused = stage.try_shell(command, &[]);
        let succeeded = refused.status.success();
        assert!(!succeeded, "the new cluster has lower ids: {refused:#?}");
        refused
    });
    let hint = String::from_utf8_lossy(&refused.stderr);
    let raise = page
        .block("sql", "pg_current_xact_id()")
        .replace("69000", id_in(&hint));
    stage
        .client
        .batch_execute(&raise)
        .await
        .expect("the ids can be raised");
    let waiting = stage.try_shell(&dry_run, &[]);
    let shown = String::from_utf8_lossy(&waiting.stdout);
    assert!(shown.contains("outbox.events: 1 row"), "{waiting:#?}");
    stage.shell(&adopt);
    let relay = stage.relay("postrider run");
    stage.wait_until_published(2).await;
    assert_eq!(stage.stored(), 2);
    relay.stop();
    drop(old);
}
