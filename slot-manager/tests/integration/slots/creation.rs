//! Tests creating a slot while the server, the role or an open transaction prevents or delays it.

use super::*;

#[tokio::test]
async fn creation_blocked_by_transactions_names_them_and_leaves_no_slot_behind() {
    let server = builder().start().expect("start");
    let client = superuser(&server).await;
    let writer = superuser(&server).await;
    run(&writer, "create table t (x int)").await;
    run(
        &writer,
        "begin; insert into t values (1); prepare transaction 'half done'",
    )
    .await;
    run(&writer, "begin; insert into t values (2)").await;
    let pid: i32 = writer
        .query_one_scalar("select pg_backend_pid()", &[])
        .await
        .expect("pid");

    let name = slot_name("waits");
    let timeout = Duration::from_millis(300);
    let error = slots::create(&client, &name, CreateOptions::default(), timeout)
        .await
        .expect_err("must wait");
    let SlotError::CreationBlocked { blockers, .. } = &error else {
        panic!("{error}")
    };
    assert!(blockers.iter().any(|b| b.pid == Some(pid)), "{error}");
    assert!(
        blockers
            .iter()
            .any(|b| b.name.as_deref() == Some("half done")),
        "{error}"
    );
    assert!(error.to_string().contains(&pid.to_string()), "{error}");
    assert!(slots::find(&client, &name).await.expect("find").is_none());

    let after: String = client
        .query_one_scalar("show statement_timeout", &[])
        .await
        .expect("show");
    assert_eq!(after, "0", "the session's own timeout is unchanged");
    run(&writer, "commit").await;
    run(&writer, "rollback prepared 'half done'").await;
    create(&client, &name)
        .await
        .expect("no transaction is running");
}

/// While a session is creating a slot, PostgreSQL briefly shows the slot without a plugin.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_being_created_always_counts_as_ours_and_held() {
    // Use a separate server, because creating a slot waits for all transactions of the server.
    let server = builder().start().expect("start");
    let (client, maker) = (superuser(&server).await, superuser(&server).await);
    let name = slot_name("made");
    let make = format!(
        "select pg_create_logical_replication_slot('{name}', 'pgoutput'); \
         select pg_drop_replication_slot('{name}')"
    );
    let making = tokio::spawn(async move {
        for _ in 0..200 {
            run(&maker, &make).await;
        }
    });
    let mut without_plugin = 0;
    while !making.is_finished() {
        let Some(slot) = slots::find(&client, &name).await.expect("find") else {
            continue;
        };
        slot.require_ours().expect("ours");
        if slot.plugin.as_deref() == Some("") {
            without_plugin += 1;
            assert!(slot.active && slot.holder.is_some());
        }
    }
    making.await.expect("made and dropped");
    println!("the slot was seen {without_plugin} times before it had its plugin");
}

#[tokio::test]
async fn a_server_without_a_free_slot_is_reported() {
    let server = builder()
        .setting("max_replication_slots", "1")
        .start()
        .expect("start");
    let client = superuser(&server).await;
    create(&client, &slot_name("first")).await.expect("create");
    let error = create(&client, &slot_name("second"))
        .await
        .expect_err("no slot left");
    assert!(matches!(error, SlotError::NoSlotLeft { .. }), "{error}");
}

#[tokio::test]
async fn a_server_without_logical_wal_is_reported() {
    let server = builder()
        .setting("wal_level", "replica")
        .start()
        .expect("start");
    let client = superuser(&server).await;
    let error = create(&client, &slot_name("first"))
        .await
        .expect_err("wal_level");
    assert!(
        matches!(&error, SlotError::WalLevel { wal_level } if wal_level == "replica"),
        "{error}"
    );
}

#[tokio::test]
async fn a_role_that_may_not_replicate_is_reported() {
    let (database, client) = new_database().await;
    run(&client, &format!("create role {database}_plain login")).await;
    let url = shared_server()
        .url(&database)
        .replace("postgres@", &format!("{database}_plain@"));
    let plain = connect(&url).await;
    let error = create(&plain, &slot_name(&database))
        .await
        .expect_err("no right");
    assert!(
        matches!(error, SlotError::NoReplicationRight { .. }),
        "{error}"
    );
    slots::list(&plain).await.expect("listing needs no right");
}

#[tokio::test]
async fn failover_slots_are_created_from_17_on_and_refused_before() {
    let (database, client) = new_database().await;
    let name = slot_name(&database);
    let result = slots::create(&client, &name, CreateOptions { failover: true }, PATIENCE).await;
    if major(&client).await < 17 {
        let error = result.expect_err("not supported");
        assert!(matches!(error, SlotError::FailoverUnsupported), "{error}");
    } else {
        result.expect("create");
        let slot = slots::find(&client, &name)
            .await
            .expect("find")
            .expect("there");
        assert_eq!(slot.failover, Some(true));
    }
}
