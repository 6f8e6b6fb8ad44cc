//! Tests of the rights of each role: the writers, the relay, and an owner who may not create roles.

use super::*;

#[tokio::test]
async fn a_writer_can_insert_and_emit_and_nothing_else() {
    let client = migrated_database().await;
    client
        .batch_execute("set role postrider_writer")
        .await
        .unwrap();
    client
        .batch_execute(
            "select outbox.emit('order', '1', 'Placed', '{}');
             insert into outbox.events (aggregatetype, aggregateid, event_type, payload)
             values ('order', '1', 'Paid', '{}')",
        )
        .await
        .unwrap();
    // Object-relational mappers read the id of a new row with `returning`, so writers may read this
    // column.
    let insert = "insert into outbox.events (aggregatetype, event_type) values ('order', 'Placed') \
                  returning id::text";
    assert!(text(&client, insert).await.is_some());
    for sql in [
        "select * from outbox.events",
        "insert into outbox.events (aggregatetype, event_type) values ('a', 'b') returning payload",
        "update outbox.events set version = 1",
        "delete from outbox.events",
        "truncate outbox.events",
        "select * from outbox.dispatch",
        "delete from outbox.dispatch",
        "select * from outbox.relay",
        "create table outbox.mine ()",
        "insert into outbox.events (aggregatetype, event_type, seq) values ('a', 'b', 1)",
        "insert into outbox.events (aggregatetype, event_type, inserted_xid) values ('a', 'b', '7')",
        "insert into outbox.events (aggregatetype, event_type, seq) values ('a', 'b', default)",
    ] {
        refused_for_lack_of_rights(&client, sql).await;
    }
}

#[tokio::test]
async fn a_writers_earlier_grant_is_narrowed_but_includes_added_columns() {
    let client = migrated_database().await;
    client
        .batch_execute(
            "grant insert on outbox.events to postrider_writer;
             alter table outbox.events add column \"Tenant\" text",
        )
        .await
        .unwrap();
    migrate(&client).await;
    client
        .batch_execute("set role postrider_writer")
        .await
        .unwrap();
    client
        .batch_execute(
            "insert into outbox.events (aggregatetype, event_type, \"Tenant\") values ('a', 'b', 'c')",
        )
        .await
        .unwrap();
    for column in ["seq", "inserted_xid"] {
        let sql = format!(
            "insert into outbox.events (aggregatetype, event_type, {column}) values ('a', 'b', '7')"
        );
        refused_for_lack_of_rights(&client, &sql).await;
    }
}

#[tokio::test]
async fn other_roles_can_do_nothing() {
    let client = migrated_database().await;
    client
        .batch_execute("create role nobody_special; set role nobody_special")
        .await
        .unwrap();
    refused_for_lack_of_rights(&client, "select outbox.emit('order', '1', 'Placed', '{}')").await;
    refused_for_lack_of_rights(&client, "select from outbox.events").await;
}

#[tokio::test]
async fn the_relay_can_read_events_and_record_outcomes_but_never_write_an_event() {
    let client = migrated_database().await;
    client
        .batch_execute("select outbox.emit('order', '1', 'Placed', '{}')")
        .await
        .unwrap();
    client
        .batch_execute("set role postrider_relay")
        .await
        .unwrap();
    client
        .batch_execute(
            "select * from outbox.events;
             insert into outbox.dispatch
                 (commit_lsn, ordinal, event_id, state, attempts, committed_at)
                 select '0/1', 1, id, 'published', 1, now() from outbox.events
                 on conflict (commit_lsn, ordinal) do nothing;
             update outbox.dispatch set state = 'discarded';
             select * from outbox.dispatch;
             insert into outbox.relay (slot, system_identifier, timeline, instance)
                 values ('postrider', '18446744073709551615', 1, 'host:1')
                 on conflict (slot) do update set instance = excluded.instance;
             update outbox.relay set confirmed_lsn = '0/1', updated_at = now();
             select * from outbox.relay",
        )
        .await
        .unwrap();
    // Use a separate transaction, because a slot cannot be created in a transaction that has
    // written.
    let slot = "select pg_create_logical_replication_slot('of_the_relay', 'pgoutput', true)";
    client.batch_execute(slot).await.unwrap();
    for sql in [
        "insert into outbox.events (aggregatetype, event_type) values ('a', 'b')",
        "update outbox.events set version = 1",
        "delete from outbox.events",
        "truncate outbox.events",
        "delete from outbox.dispatch",
        "drop publication postrider",
    ] {
        refused_for_lack_of_rights(&client, sql).await;
    }
}

#[tokio::test]
async fn an_owner_who_may_not_create_roles_gets_a_notice_and_everything_else() {
    let server = tokio::task::spawn_blocking(start).await.unwrap();
    let (admin, _) = connect(&server.url("postgres")).await;
    for sql in ["create role shop", "create database shop owner shop"] {
        admin.batch_execute(sql).await.unwrap();
    }
    let (client, notices) = connect(&server.url("shop")).await;
    client.batch_execute("set role shop").await.unwrap();
    migrate(&client).await;
    assert_eq!(
        text(&client, "select pubname::text from pg_publication")
            .await
            .unwrap(),
        "postrider"
    );
    for role in ["postrider_writer", "postrider_relay"] {
        let told = notices
            .lock()
            .unwrap()
            .iter()
            .any(|notice| notice.contains(role));
        assert!(told, "{role}: {notices:?}");
    }

    // An administrator creates one of the roles, and lets the owner create the other. Then the
    // migration gives both roles their rights.
    admin
        .batch_execute("create role postrider_writer; alter role shop createrole")
        .await
        .unwrap();
    client.batch_execute(MIGRATIONS[3]).await.unwrap();
    client
        .batch_execute("reset role; set role postrider_writer")
        .await
        .unwrap();
    client
        .batch_execute("select outbox.emit('order', '1', 'Placed', '{}')")
        .await
        .unwrap();
    client
        .batch_execute("reset role; set role postrider_relay")
        .await
        .unwrap();
    client
        .batch_execute("select * from outbox.events")
        .await
        .unwrap();
    let replication = "select rolreplication::text from pg_roles where rolname = 'postrider_relay'";
    assert_eq!(
        text(&client, replication).await.as_deref(),
        Some("false"),
        "the owner cannot grant it"
    );
}
