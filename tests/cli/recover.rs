//! Tests of `postrider recover`: which rows a recovery would publish, and how to request a
//! recovery.

use serde_json::{Value, json};

use crate::support::{Database, assert_contains};

/// A database whose relay was stopped cleanly at the end of the WAL. Three events were inserted
/// after that.
async fn served() -> Database {
    let database = Database::initialised().await;
    let name = &database.name;
    let served = format!(
        "insert into outbox.relay \
             (slot, system_identifier, timeline, confirmed_lsn, confirmed_is_final, instance) \
         select '{name}', system_identifier::text, 1, pg_current_wal_lsn(), true, 'test' \
         from pg_control_system()"
    );
    database.execute(&served).await;
    database.emit(3).await;
    database
}

async fn dry_run(database: &Database) -> Value {
    let ran = database
        .run_with(
            &["recover", "--dry-run", "--json"],
            &[("PUBSUB_PROJECT_ID", "demo")],
        )
        .await;
    ran.assert_status(0);
    serde_json::from_str(&ran.stdout).unwrap()
}

async fn recovering(database: &Database) -> Option<String> {
    let statement = "select recovering from outbox.relay";
    let row = database.client.query_opt(statement, &[]).await.unwrap();
    row.and_then(|row| row.get(0))
}

#[tokio::test]
async fn a_dry_run_counts_by_table_and_topic_and_changes_nothing() {
    let database = served().await;
    let preview = dry_run(&database).await;
    assert_eq!(preview["needed"], json!(false), "{preview}");
    database
        .execute(&format!(
            "select pg_drop_replication_slot('{}')",
            database.name
        ))
        .await;
    let preview = dry_run(&database).await;
    assert_eq!(
        (&preview["needed"], &preview["why"]),
        (&json!(true), &json!("slot-missing"))
    );
    let table = &preview["tables"][0];
    assert_eq!(
        (&table["table"], &table["rows"]),
        (&json!("outbox.events"), &json!(3))
    );
    let topic = &table["topics"]["projects/demo/topics/order.events"];
    assert_eq!(topic["rows"], json!(3), "{preview}");
    assert_eq!(topic["first_event_ids"].as_array().unwrap().len(), 3);
    assert!(topic["bytes"].as_u64().unwrap() > 100, "{preview}");
    assert!(topic["oldest"].as_str() <= topic["newest"].as_str());
    assert_eq!(recovering(&database).await, None);
}

#[tokio::test]
async fn a_dry_run_as_text_counts_the_rows_that_cannot_become_messages() {
    let database = served().await;
    database
        .execute(
            "insert into outbox.events (aggregatetype, aggregateid, event_type, headers) \
             values ('order', 'x', 'OrderPlaced', '[]')",
        )
        .await;
    let ran = database
        .run_with(&["recover", "--dry-run"], &[("PUBSUB_PROJECT_ID", "demo")])
        .await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "recovery is not needed");
    assert_contains(
        &ran.stdout,
        "-> projects/demo/topics/order.events: 3 messages",
    );
    assert_contains(&ran.stdout, "1 row cannot become a message");
    assert_contains(&ran.stdout, "Nothing was changed.");
}

#[tokio::test]
async fn no_recovery_is_requested_without_yes() {
    let database = served().await;
    let ran = database.run(&["recover"]).await;
    ran.assert_error("confirmation-missing", 2);
    assert_contains(&ran.stderr, "--yes");
    assert_eq!(recovering(&database).await, None);
    database.run(&["recover", "--yes"]).await.assert_status(0);
    assert_eq!(recovering(&database).await.as_deref(), Some("requested"));
}

#[tokio::test]
async fn another_cluster_has_to_be_adopted_explicitly() {
    let database = served().await;
    let refused = database.run(&["recover", "--adopt", "--yes"]).await;
    refused.assert_error("setting-invalid", 2);
    database
        .execute("update outbox.relay set system_identifier = '42'")
        .await;
    let refused = database.run(&["recover", "--yes"]).await;
    refused.assert_error("foreign-cluster", 3);
    assert_contains(&refused.stderr, "--adopt");
    let preview = dry_run(&database).await;
    assert_eq!(preview["why"], json!("foreign-cluster"));
    let adopted = database
        .run(&["recover", "--adopt", "--yes", "--json"])
        .await;
    adopted.assert_status(0);
    let adopted: Value = serde_json::from_str(&adopted.stdout).unwrap();
    assert_eq!(adopted["marked"], json!("adopted"));
    assert_eq!(recovering(&database).await.as_deref(), Some("adopted"));
    let statement = "select system_identifier <> '42' from outbox.relay";
    let row = database.client.query_one(statement, &[]).await.unwrap();
    assert!(row.get::<_, bool>(0));
}

#[tokio::test]
async fn adopted_records_move_below_new_positions_and_keep_their_contents() {
    let database = served().await;
    database
        .execute(
            "insert into outbox.dispatch \
                 (commit_lsn, ordinal, event_id, state, attempts, committed_at) \
             select pg_current_wal_lsn() + (n * 1000000000::numeric), 1, gen_random_uuid(), 'published', 1, now() \
             from generate_series(1, 20) n; \
             update outbox.relay set system_identifier = '42'",
        )
        .await;
    database
        .run(&["recover", "--adopt", "--yes"])
        .await
        .assert_status(0);
    // Check that all 20 records are now at one LSN, the highest in the table. The LSN must be below the end of
    // the WAL, so that new events get higher positions. It must not be a multiple of 8, so that no commit
    // record can have it.
    let row = database
        .client
        .query_one(
            "select count(*), min(ordinal), max(ordinal) from outbox.dispatch \
             where mod(commit_lsn - '0/0'::pg_lsn, 8) = 7 and commit_lsn < pg_current_wal_lsn() \
               and commit_lsn >= all (select d.commit_lsn from outbox.dispatch d)",
            &[],
        )
        .await
        .unwrap();
    let found: (i64, i32, i32) = (row.get(0), row.get(1), row.get(2));
    assert_eq!(found, (20, 1, 20));
}

#[tokio::test]
async fn slot_show_recognises_a_recreated_slot() {
    let database = served().await;
    let name = &database.name;
    database
        .execute(&format!("select pg_drop_replication_slot('{name}')"))
        .await;
    database.emit(3).await;
    let create = format!("select pg_create_logical_replication_slot('{name}', 'pgoutput')");
    database.execute(&create).await;
    let shown = database.run(&["slot", "show"]).await;
    shown.assert_status(2);
    assert_contains(&shown.stdout, "RECREATED");
    assert_contains(&shown.stdout, "recover --dry-run");
}

#[tokio::test]
async fn records_of_another_cluster_belong_to_tables_by_name_not_by_oid() {
    let database = served().await;
    // Make the database look as it is after a dump was restored: the capture records contain the OIDs of
    // the old cluster, which belong to other tables here.
    database
        .execute(
            "create table public.other (id int); create table public.gone (id int); \
             insert into outbox.capture (identity, schema_name, table_name, table_oid, slot, \
                 has_inserted_xid, instance) \
             select 'a.other', 'public', 'other', table_oid, 'another', false, 'test' from outbox.capture; \
             insert into outbox.capture (identity, schema_name, table_name, table_oid, slot, \
                 has_inserted_xid, instance) \
             select 'a.gone', 'public', 'gone', 'public.other'::regclass, slot, false, 'test' \
             from outbox.capture where identity = 'outbox.events'; \
             update outbox.capture set table_oid = 'public.gone'::regclass \
             where identity = 'outbox.events'; \
             drop table public.gone; \
             update outbox.relay set system_identifier = '42'",
        )
        .await;
    database
        .run(&["recover", "--adopt", "--yes"])
        .await
        .assert_status(0);
    for (identity, oid) in [
        ("a.other", "'public.other'::regclass"),
        ("a.gone", "0"),
        ("outbox.events", "'outbox.events'::regclass"),
    ] {
        let sql = format!(
            "select count(*) from outbox.capture where identity = '{identity}' and table_oid = {oid}"
        );
        assert_eq!(database.number(&sql).await, 1, "{identity}");
    }
    let owner = "select slot from outbox.capture where identity = 'a.other'";
    assert_eq!(database.text(owner).await, "another");
}

#[tokio::test]
async fn a_cluster_is_adopted_even_if_a_row_has_no_transaction() {
    let database = served().await;
    database
        .execute(
            "alter table outbox.events alter column inserted_xid drop not null; \
             insert into outbox.events (aggregatetype, event_type, inserted_xid) \
             values ('order', 'OrderPlaced', null); \
             update outbox.relay set system_identifier = '42'",
        )
        .await;
    database
        .run(&["recover", "--adopt", "--yes"])
        .await
        .assert_status(0);
}
