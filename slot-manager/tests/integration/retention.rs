//! Tests the list of transactions and slots that keep WAL.

use std::time::Duration;

use slot_manager::SlotName;
use slot_manager::retention::{self, WalHolder, WalHolderKind};
use slot_manager::slots::{self, CreateOptions};

use tokio_postgres::Client;

use slot_manager::activity;

use crate::support::{
    PATIENCE, builder, connect, eventually, new_database, run, shared_server, slot_name, superuser,
};

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

/// The names of roles and databases are visible in every database of the cluster. PostgreSQL stores such a name in
/// the encoding of the database in which the name was given, and never converts it. So a name from a LATIN1 database
/// may not be valid UTF-8 in the other databases.
#[tokio::test]
async fn names_of_another_encoding_are_shown() {
    let (name, client) = new_database().await;
    let slot = slot_name(&name);
    slots::create(&client, &slot, CreateOptions::default(), PATIENCE)
        .await
        .expect("create");
    drop(client);
    let viewer = superuser(shared_server()).await;
    let (latin, ascii) = (format!("latin_{name}"), format!("ascii_{name}"));
    for (database, encoding) in [(&latin, "LATIN1"), (&ascii, "SQL_ASCII")] {
        let create = format!(
            "create database {database} encoding '{encoding}' lc_collate 'C' lc_ctype 'C' \
             template template0"
        );
        run(&viewer, &create).await;
    }
    run(&viewer, &format!("create role {name} superuser login")).await;
    let url = shared_server().url("postgres");
    let holder = connect(&url.replace("postgres@", &format!("{name}@"))).await;
    let lock = "begin; select pg_current_xact_id(), pg_advisory_lock(-8)";
    run(&holder, lock).await;
    let renames = connect(&shared_server().url(&latin)).await;
    run(
        &renames,
        &format!("alter role {name} rename to \"{name}é\""),
    )
    .await;
    // The session that created the slot may still be connected.
    let rename = format!("alter database {name} rename to \"{name}é\"");
    eventually("the database is renamed", async || {
        renames.batch_execute(&rename).await.ok()
    })
    .await;

    let waits = superuser(shared_server()).await;
    let (process, waiting) = (pid(&holder).await, pid(&waits).await);
    let wait = tokio::spawn(async move {
        let _ = waits.batch_execute("select pg_advisory_lock(-8)").await;
    });
    let ascii = connect(&shared_server().url(&ascii)).await;
    for (viewer, e_acute) in [(&viewer, "\u{fffd}"), (&ascii, "\\351")] {
        let shown = Some(format!("{name}{e_acute}"));
        let found = slots::find(viewer, &slot).await.expect("find");
        assert_eq!(found.expect("a slot").database, shown);
        let holders = holders(viewer, &slot, Duration::ZERO).await;
        let held = holders.iter().find(|held| held.pid == Some(process));
        assert_eq!(held.expect("listed").user, shown);
        let lock_wait = eventually("the session waits", async || {
            let found = retention::lock_wait(viewer, waiting).await;
            found.expect("look")
        })
        .await;
        assert_eq!(lock_wait.blockers[0].user, shown);
    }
    let locked = activity::advisory_lock_holder(&viewer, -8).await;
    let shown = Some(format!("{name}\u{fffd}"));
    assert_eq!(locked.expect("look").expect("a holder").role, shown);
    drop(holder);
    wait.await.expect("the lock is free");
    let drop = format!("select pg_drop_replication_slot('{slot}')");
    run(&viewer, &drop).await;
}
