//! Tests the queries about sessions: which sessions are busy, which slots they read, and which locks they hold.

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
        activity::busy_sessions(&client, &writer, "public.written")
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
    // The transaction is open, but its server process only waits for the client.
    assert!(!activity::is_at_work(&client, &process).await.expect("look"));
    let own = activity::own_process(&client).await.expect("process");
    assert!(activity::is_at_work(&client, &own).await.expect("look"));
    let stranger = activity::session_of_a_stranger(&client, &writer, "public.written").await;
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

/// Our role sees neither the state nor the statement of another role's session, so the locks have to show whether
/// the session is busy.
#[tokio::test]
async fn a_session_of_another_role_is_busy_while_it_may_be_writing_the_table() {
    let (name, client) = new_database().await;
    let writer = format!("writer of {name}");
    let [ours, writes, reads] = ["ours", "writer", "reader"].map(|kind| format!("{kind}_{name}"));
    let roles = format!(
        "create table public.written (id int); \
         create role {ours} login; create role {writes} login; create role {reads} login; \
         grant select, update on public.written to {writes}; \
         grant select on public.written to {reads}"
    );
    run(&client, &roles).await;
    let url = shared_server().url(&name);
    let connect_as =
        async |role: &str| connect(&url.replace("postgres@", &format!("{role}@"))).await;
    let begin = format!("set application_name = '{writer}'; begin; select from public.written");
    let (may_write, may_read) = (connect_as(&writes).await, connect_as(&reads).await);
    run(&may_write, &begin).await;
    run(&may_read, &begin).await;
    let looks = connect_as(&ours).await;
    let busy = async || {
        let table = "public.written";
        let busy = activity::busy_sessions(&looks, &writer, table).await;
        let stranger = activity::session_of_a_stranger(&looks, &writer, table).await;
        let stranger = stranger.expect("look").and_then(|session| session.role);
        (busy.expect("count"), stranger)
    };
    assert_eq!(busy().await, (1, Some(reads.clone())));
    run(&may_write, "commit").await;
    assert_eq!(busy().await, (0, Some(reads.clone())));
    run(&may_read, "commit").await;
    run(&client, "drop table public.written").await;
    run(&client, &format!("drop role {ours}, {writes}, {reads}")).await;
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
