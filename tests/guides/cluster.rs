//! Follows docs/how-to/move-to-another-cluster.md: to a new server, which has lower transaction ids than the old
//! one, and to another database of the same server.

use crate::guide::Guide;
use crate::playground::{Playground, connect, connect_to, server};

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

    // Follow steps 5 to 7 of the page: see which rows wait, adopt the new database, and start the relay.
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

async fn execute(stage: &Playground, statement: &str) {
    let executed = stage.client.batch_execute(statement).await;
    executed.expect(statement);
}

/// The move to the database `shop` of the same server, by the blocks of the page.
struct SameServer {
    old: String,
    new: String,
    copy: String,
    drop_slot: String,
    dry_run: String,
    adopt: String,
}

impl SameServer {
    fn of(stage: &Playground) -> Self {
        let page = Guide::read("how-to/move-to-another-cluster.md");
        Self {
            old: stage.server.url("postgres"),
            new: stage.server.url("shop"),
            copy: page.block("sh", "pg_dump"),
            drop_slot: page.block("sh", "postrider slot drop"),
            dry_run: page.block("sh", "postrider recover --dry-run"),
            adopt: page.block("sh", "postrider recover --adopt"),
        }
    }

    /// Runs a script with the settings for the new database. Returns whether it succeeded, and what it printed.
    fn run(&self, stage: &Playground, script: &str) -> (bool, String) {
        let environment = [
            ("OLD_SUPERUSER_URL", &*self.old),
            ("OLD_DATABASE_URL", &*self.old),
            ("NEW_SUPERUSER_URL", &*self.new),
            ("DATABASE_URL", &*self.new),
        ];
        let done = stage.try_shell(script, &environment);
        let said =
            [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (done.status.success(), said.concat())
    }

    fn succeed(&self, stage: &Playground, script: &str) -> String {
        let (succeeded, said) = self.run(stage, script);
        assert!(succeeded, "{script}: {said}");
        said
    }

    /// Checks that `recover` refuses the slot, which belongs to the old database, and that the relay refuses the copied
    /// records. Each error must name the command that helps.
    fn is_refused(&self, stage: &Playground) {
        for script in [&*self.dry_run, &*self.adopt, "postrider run"] {
            let (succeeded, said) = self.run(stage, script);
            assert!(
                !succeeded && said.contains("postrider slot drop"),
                "{script}: {said}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_to_another_database_of_the_same_server_can_be_broken_off_and_then_completed() {
    let mut stage = Playground::open().await;
    if !stage.server.programs().join("pg_dump").is_file() {
        println!("SKIPPED: this PostgreSQL comes without pg_dump");
        return;
    }
    let page = SameServer::of(&stage);
    stage.shell("postrider init --apply");
    let relay = stage.relay("postrider run");
    execute(&stage, EVENT).await;
    stage.wait_until_published(1).await;
    relay.stop();
    execute(&stage, EVENT).await;
    execute(&stage, "CREATE DATABASE shop").await;
    page.succeed(&stage, &page.copy);
    page.is_refused(&stage);

    // Break the move off after step 4, and continue on the old database.
    page.succeed(&stage, &page.drop_slot);
    let relay = stage.relay("postrider run");
    stage.wait_until_published(2).await;
    let recovered = "SELECT count(*) FROM outbox.relay WHERE recovering IS NULL";
    stage.wait_for(recovered, 1).await;
    relay.stop();

    // Then move, with another event that waits.
    execute(&stage, EVENT).await;
    execute(&stage, "DROP DATABASE shop").await;
    execute(&stage, "CREATE DATABASE shop").await;
    page.succeed(&stage, &page.copy);
    page.succeed(&stage, &page.drop_slot);
    let waiting = page.succeed(&stage, &page.dry_run);
    assert!(waiting.contains("outbox.events: 1 row"), "{waiting}");
    page.succeed(&stage, &page.adopt);
    stage.client = connect_to(&page.new).await;
    let relay = stage.relay_from(&format!("DATABASE_URL='{}' exec postrider run", page.new));
    stage.wait_until_published(3).await;
    assert_eq!(stage.stored(), 3);
    relay.stop();
}
