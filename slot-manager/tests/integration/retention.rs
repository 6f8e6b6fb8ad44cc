//! Tests the list of transactions and slots that keep WAL.

use std::time::Duration;

use slot_manager::SlotName;
use slot_manager::retention::{self, WalHolder, WalHolderKind};
use slot_manager::slots::{self, CreateOptions};

use tokio_postgres::Client;

use crate::support::{PATIENCE, builder, run, slot_name, superuser};

async fn pid(client: &Client) -> i32 {
    let row = client.query_one("select pg_backend_pid()", &[]).await;
    row.expect("pid").get(0)
}

async fn holders(client: &Client, slot: &SlotName, older_than: Duration) -> Vec<WalHolder> {
    let holders = retention::holders(client, slot, older_than).await;
    holders.expect("holders")
}

#[tokio::test]
async fn every_kind_of_wal_holder_is_listed_with_a_remedy() {
    let server = builder().start().expect("start");
    let client = superuser(&server).await;
    run(&client, "create table t (x int)").await;
    for name in ["older", "ours"] {
        let name = slot_name(name);
        slots::create(&client, &name, CreateOptions::default(), PATIENCE)
            .await
            .expect("create");
        run(&client, "insert into t values (0); checkpoint").await;
    }
    let idle = superuser(&server).await;
    let reading = superuser(&server).await;
    let busy = superuser(&server).await;
    run(&idle, "begin; insert into t values (1)").await;
    run(&reading, "begin; select * from t").await;
    run(
        &client,
        "begin; insert into t values (2); prepare transaction 'it''s half'",
    )
    .await;
    let (idle_pid, reading_pid, busy_pid) =
        (pid(&idle).await, pid(&reading).await, pid(&busy).await);
    let sleeping = tokio::spawn(async move {
        let _ = busy
            .batch_execute("do $$ begin insert into t values (3); perform pg_sleep(600); end $$")
            .await;
    });

    let ours = slot_name("ours");
    let listed = crate::support::eventually("the busy transaction is listed", async || {
        let found = holders(&client, &ours, Duration::ZERO).await;
        let has_busy = found.iter().any(|h| h.pid == Some(busy_pid));
        has_busy.then_some(found)
    })
    .await;
    let of = |kind| listed.iter().find(|h| h.kind == kind).expect("listed");
    assert_eq!(of(WalHolderKind::IdleInTransaction).pid, Some(idle_pid));
    assert_eq!(of(WalHolderKind::Transaction).pid, Some(busy_pid));
    assert_eq!(of(WalHolderKind::OtherSlot).name.as_deref(), Some("older"));
    let prepared = of(WalHolderKind::PreparedTransaction);
    assert_eq!(prepared.name.as_deref(), Some("it's half"));
    assert!(
        !listed.iter().any(|h| h.pid == Some(reading_pid)),
        "a transaction that only reads keeps no WAL"
    );
    assert!(of(WalHolderKind::IdleInTransaction).age.is_some());

    let old = holders(&client, &ours, Duration::from_secs(3600)).await;
    assert!(
        old.iter().all(|h| h.kind == WalHolderKind::OtherSlot),
        "{old:?}"
    );

    let remedy = prepared.remedy();
    assert!(
        remedy.contains("in postgres: ") && remedy.contains("rollback prepared 'it''s half'"),
        "{remedy}"
    );
    run(&client, "rollback prepared 'it''s half'").await;
    run(&client, &format!("select pg_terminate_backend({idle_pid})")).await;
    run(&client, &format!("select pg_cancel_backend({busy_pid})")).await;
    sleeping.await.expect("cancelled");
    crate::support::eventually("only the slot is left", async || {
        let found = holders(&client, &ours, Duration::ZERO).await;
        let is_alone = found.iter().all(|h| h.kind == WalHolderKind::OtherSlot);
        is_alone.then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_slot_of_another_database_is_named_with_its_database_and_a_command_that_works() {
    let server = builder().start().expect("start");
    let client = superuser(&server).await;
    run(&client, "create database other_shop").await;
    let theirs = crate::support::connect(&server.url("other_shop")).await;
    for (session, name) in [(&theirs, "older"), (&client, "ours")] {
        let name = slot_name(name);
        slots::create(session, &name, CreateOptions::default(), PATIENCE)
            .await
            .expect("create");
        run(&client, "create table if not exists t (x int); checkpoint").await;
    }
    let ours = slot_name("ours");
    let listed = holders(&client, &ours, Duration::ZERO).await;
    let is_other = |h: &&WalHolder| h.kind == WalHolderKind::OtherSlot;
    let other = listed.iter().find(is_other).expect("listed");
    let expected = "replication slot \"older\" of database other_shop, which keeps even older WAL, without a reader";
    assert_eq!(other.to_string(), expected);
    let remedy = other.remedy();
    assert!(
        remedy.contains("the users of database other_shop"),
        "{remedy}"
    );
    // The command works in the database of our slot, although the other slot belongs to another database.
    let command = remedy.split('`').nth(1).expect("a command");
    run(&client, command).await;
    let left = holders(&client, &ours, Duration::ZERO).await;
    assert!(!left.iter().any(|h| is_other(&h)), "{left:?}");
}
