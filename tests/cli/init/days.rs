//! Tests of `init --partition daily`.

use crate::support::{Database, assert_contains, connect};

const DAILY: [&str; 4] = ["init", "--apply", "--partition", "daily"];

/// Counts the partitions that contain one day each. The default partition has no `day`, so it does
/// not count.
const DAYS: &str = "select count(day) from outbox.days()";

#[tokio::test]
async fn a_new_table_is_partitioned_by_day_and_a_second_init_changes_nothing() {
    let database = Database::new().await;
    let first = database.run(&DAILY).await;
    first.assert_status(0);
    assert_contains(&first.stdout, "outbox.events has new daily partitions");
    assert_eq!(database.number(DAYS).await, 8);
    database.emit(3).await;
    database.run(&DAILY).await.assert_status(0);
    database.run(&["init", "--apply"]).await.assert_status(0);
    assert_eq!(database.number(DAYS).await, 8);
    // The rows are in the partition of today (or of yesterday, if the test ran at midnight), not in
    // the default partition.
    let events =
        "select count(*) from outbox.events where tableoid <> 'outbox.events_default'::regclass";
    assert_eq!(database.number(events).await, 3);
    let indexed = "select count(*) from pg_indexes where schemaname = 'outbox' and tablename like 'events\\_2%'";
    assert_eq!(database.number(indexed).await, 16, "key and seq");
    let refused = database
        .client
        .batch_execute("truncate outbox.events_default")
        .await;
    assert!(refused.is_err());
}

/// PostgreSQL refuses to create a partitioned table or index if the setting names the database's own tablespace.
const OWN_TABLESPACE: &str = "do $$ begin execute format('alter database %I set default_tablespace = pg_default', \
                              current_database()); end $$";

#[tokio::test]
async fn a_default_tablespace_that_is_the_database_s_own_is_no_obstacle() {
    let database = Database::new().await;
    database.execute(OWN_TABLESPACE).await;
    database.run(&DAILY).await.assert_status(0);
    assert_eq!(database.number(DAYS).await, 8);
    let printed = database.run(&["init", "--partition", "daily"]).await;
    let other = Database::new().await;
    other.execute(OWN_TABLESPACE).await;
    let client = connect(&other.url).await;
    client.batch_execute(&printed.stdout).await.unwrap();
    assert_eq!(other.number(DAYS).await, 8);
}

#[tokio::test]
async fn the_printed_script_partitions_the_table_too() {
    let database = Database::new().await;
    let printed = database
        .run(&[
            "init",
            "--partition",
            "daily",
            "--payload",
            "bytea",
            "--no-slot",
        ])
        .await;
    database.execute(&printed.stdout).await;
    assert_eq!(database.number(DAYS).await, 8);
    database.execute(&printed.stdout).await;
    database.run(&DAILY).await.assert_status(0);
    database
        .execute("select outbox.emit('order', '1', 'Placed', '\\x00ff'::bytea)")
        .await;
}

#[tokio::test]
async fn a_table_that_exists_is_not_converted_but_can_be_replaced() {
    let database = Database::new().await;
    database.run(&["init", "--apply"]).await.assert_status(0);
    database.emit(1).await;
    let ran = database.run(&[&DAILY[..], &["--json"]].concat()).await;
    ran.assert_status(1);
    let remedy = ran.finding("not-partitioned")["remedy"].to_string();
    assert_contains(&remedy, "docs/how-to/operations.md");
    let kind = "select relkind::text from pg_class where oid = 'outbox.events'::regclass";
    assert_eq!(database.text(kind).await, "r");

    database.execute(guide_sql(0)).await;
    database.run(&DAILY).await.assert_status(0);
    assert_eq!(database.text(kind).await, "p");
    database.emit(2).await;
    let oid = "select count(*) from outbox.capture \
               where identity = 'outbox.events' and table_oid = 'outbox.events'::regclass";
    assert_eq!(database.number(oid).await, 1, "the record is kept");
    let published = "select count(*) from pg_publication_tables where schemaname = 'outbox'";
    assert_eq!(database.number(published).await, 1);
}

/// The SQL of the guide: the statements that replace the table (`nth` is 0), or that repeat its grants (`nth` is 1).
fn guide_sql(nth: usize) -> &'static str {
    let guide = include_str!("../../../docs/how-to/operations.md");
    let mut sections = guide.split("never converts an existing table");
    let section = sections.nth(1).unwrap();
    let sql = section.split("```sql\n").nth(1 + nth).unwrap();
    sql.split("```").next().unwrap()
}

#[tokio::test]
async fn a_replaced_table_gets_the_payload_and_the_grants_of_the_old_one() {
    const BYTEA: [&str; 2] = ["--payload", "bytea"];
    const EMIT: &str = "select outbox.emit('order', '1', 'Placed', '\\x00ff'::bytea)";
    let database = Database::new().await;
    let init = [&["init", "--apply"][..], &BYTEA].concat();
    database.run(&init).await.assert_status(0);
    let service = format!("service_of_{}", database.name);
    database
        .execute(&format!(
            "create role {service}; grant usage on schema outbox to {service}; \
             grant insert on outbox.events to {service}; grant select (id) on outbox.events to {service}; \
             grant execute on function outbox.emit to {service}"
        ))
        .await;
    database.execute(guide_sql(0)).await;

    // A second function `outbox.emit`, with another type of payload, would make each call
    // ambiguous. So `init` refuses.
    let refused = database.run(&DAILY).await;
    refused.assert_status(3);
    assert_contains(&refused.stderr, "--payload bytea");
    let tables = "select count(to_regclass('outbox.events'))";
    assert_eq!(database.number(tables).await, 0);

    let daily = [&DAILY[..], &BYTEA].concat();
    database.run(&daily).await.assert_status(0);
    let emit = format!("set role {service}; {EMIT}; reset role");
    let refused = database.client.batch_execute(&emit).await;
    assert!(refused.is_err(), "grants are not repeated by init");
    database.execute("reset role").await;
    let grants = guide_sql(1).replace("\\gexec", "");
    for grant in database.client.query(&grants, &[]).await.unwrap() {
        database.execute(grant.get(0)).await;
    }
    database.execute(&emit).await;
    let selects = format!("set role {service}; select id from outbox.events; reset role");
    database.execute(&selects).await;
    database.run(&daily).await.assert_status(0);
}
