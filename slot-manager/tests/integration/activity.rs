//! Tests of sessions, the slots that they read, and locks.

use slot_manager::activity::{self, LastReply};
use slot_manager::slots::{self, CreateOptions};

use crate::support::{
    PATIENCE, Reader, connect, eventually, new_database, run, shared_server, slot_name,
};

#[tokio::test]
async fn a_slots_position_is_known_only_through_its_reader() {
    let (name, client) = new_database().await;
    let slot = slot_name(&name);
    let created = slots::create(&client, &slot, CreateOptions::default(), PATIENCE)
        .await
        .expect("create");
    assert!(!slots::end_reader(&client, &slot).await.expect("end"));

    let reader = Reader::start(shared_server(), &name, &name);
    let found = slots::find(&client, &slot)
        .await
        .expect("find")
        .expect("a slot");
    let pid = found.active_pid.expect("a reader");
    let confirmed = slots::confirmed_by_reader(&client, &slot, pid)
        .await
        .expect("confirmed");
    assert!(confirmed == found.confirmed_flush_lsn && confirmed >= Some(created));
    let by_another = slots::confirmed_by_reader(&client, &slot, pid + 1).await;
    assert_eq!(by_another.expect("confirmed"), None);
    assert_ne!(
        activity::last_reply(&client, pid).await.expect("reply"),
        LastReply::NoSlot
    );
    let by_another = activity::last_reply(&client, pid + 1).await;
    assert_eq!(by_another.expect("reply"), LastReply::NoSlot);

    assert!(slots::end_reader(&client, &slot).await.expect("end"));
    eventually("the reader has ended", async || {
        let reply = activity::last_reply(&client, pid).await.expect("reply");
        (reply == LastReply::NoSlot).then_some(())
    })
    .await;
    drop(reader);
}

#[tokio::test]
async fn only_sessions_with_an_open_transaction_are_busy_and_ended() {
    let (name, client) = new_database().await;
    let writer = format!("writer of {name}");
    let url = shared_server().url(&name);
    let other = connect(&url).await;
    run(&other, &format!("set application_name = '{writer}'")).await;
    let process = activity::own_process(&other).await.expect("process");
    let busy = async || {
        activity::busy_sessions(&client, &writer)
            .await
            .expect("count")
    };
    eventually("the session is idle", async || {
        (busy().await == 0).then_some(())
    })
    .await;

    run(&other, "begin; select 1").await;
    eventually("the session is busy", async || {
        (busy().await == 1).then_some(())
    })
    .await;
    // The transaction is open, but the process waits for its client.
    assert!(!activity::is_at_work(&client, &process).await.expect("look"));
    let own = activity::own_process(&client).await.expect("process");
    assert!(activity::is_at_work(&client, &own).await.expect("look"));
    let stranger = activity::session_of_another_role(&client, &writer).await;
    assert_eq!(stranger.expect("look"), None);

    activity::end_busy_sessions(&client, &writer)
        .await
        .expect("end");
    eventually("the session has ended", async || {
        (busy().await == 0).then_some(())
    })
    .await;
    assert!(other.batch_execute("select 1").await.is_err());
}

#[tokio::test]
async fn the_holder_of_a_lock_is_named() {
    let (name, client) = new_database().await;
    run(&client, "create table held (id int)").await;
    let table = "public.held";
    assert_eq!(
        activity::table_lock_holder(&client, table)
            .await
            .expect("look"),
        None
    );
    assert_eq!(
        activity::advisory_lock_holder(&client, -7)
            .await
            .expect("look"),
        None
    );

    let other = connect(&shared_server().url(&name)).await;
    run(
        &other,
        "begin; lock table held; select pg_advisory_xact_lock(-7)",
    )
    .await;
    let of_table = activity::table_lock_holder(&client, table)
        .await
        .expect("look");
    let of_key = activity::advisory_lock_holder(&client, -7)
        .await
        .expect("look");
    assert!(of_table.is_some() && of_table == of_key);
    let text = of_table
        .map(|holder| holder.to_string())
        .unwrap_or_default();
    assert!(
        text.starts_with("process ") && text.ends_with(", role postgres"),
        "{text}"
    );

    run(
        &other,
        "rollback; begin; lock table held; prepare transaction 'held'",
    )
    .await;
    let prepared = activity::table_lock_holder(&client, table)
        .await
        .expect("look");
    let prepared = prepared.map(|holder| holder.to_string());
    assert_eq!(prepared.as_deref(), Some("a prepared transaction"));
    run(&other, "rollback prepared 'held'").await;
}
