//! Tests of ids that name their table, `schema.table:uuid`: each command takes only events of this table.

use crate::support::{Database, Ran, assert_contains, connect, execute};

const ORDER: &str = "00000000-0000-4000-8000-000000000001";
const BILL: &str = "00000000-0000-4000-8000-000000000002";
const BOTH: &str = "00000000-0000-4000-8000-000000000003";
const GONE: &str = "00000000-0000-4000-8000-000000000004";
const NUMBERED: &str = "00000000-0000-4000-8000-000000000005";
const RENAMED: &str = "00000000-0000-4000-8000-000000000006";
const WITHOUT_ID: &str = "00000000-0000-4000-8000-000000000007";

/// A database with captured tables, and with one quarantined event for each of the seven ids. The name of an id
/// says what is special about its event. `GONE` is the id of an event whose row is gone.
async fn filled() -> (Database, tempfile::NamedTempFile) {
    let database = Database::initialised().await;
    database
        .execute("create table public.bills (like outbox.events including all)")
        .await;
    // In `public.notes` the column `id` has the type text. For such a table, Postrider computes the event id as a hash.
    // So the row of `public.notes` whose id is the text `GONE` has another event id than the uuid `GONE`. This row does
    // not belong to the quarantined event.
    database
        .execute(
            "create table public.notes (like outbox.events including all); \
             alter table public.notes alter id drop default, alter id type text",
        )
        .await;
    for (table, id) in [
        ("public.notes", GONE),
        ("outbox.events", ORDER),
        ("public.bills", BILL),
        ("outbox.events", BOTH),
        ("public.bills", BOTH),
    ] {
        let insert = format!(
            "insert into {table} (id, aggregatetype, aggregateid, event_type, payload) \
             values ('{id}', 'order', 'o-1', 'Placed', '{{}}')"
        );
        database.execute(&insert).await;
    }
    let ids = [ORDER, BILL, BOTH, GONE, NUMBERED, RENAMED, WITHOUT_ID];
    for (n, id) in ids.into_iter().enumerate() {
        let source_id = match id {
            NUMBERED => "'public.legacy:7'",
            RENAMED => "'public.orders:7'",
            WITHOUT_ID => "'outbox.events@0/40/1'",
            _ => "null",
        };
        let insert = format!(
            "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, state, topic, \
                 ordering_key, source_id, error) \
             values ('0/{n}0', now(), 1, 1, '{id}', 'quarantined', 'projects/demo/topics/order.events', 'k-{n}', \
                 {source_id}, 'event-refused')"
        );
        database.execute(&insert).await;
    }
    // The capture record keeps the name that `outbox.events` had when its capture began: `public.orders`.
    let record = "insert into outbox.capture (identity, schema_name, table_name, table_oid, slot, floor, \
                      has_inserted_xid, instance) \
                  values ('public.orders', 'outbox', 'events', 'outbox.events'::regclass, current_database(), '3', \
                      true, 'test') \
                  on conflict do nothing";
    database.execute("delete from outbox.capture").await;
    database.execute(record).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    let settings = "[[tables]]\ntable = 'outbox.events'\n[[tables]]\ntable = 'public.bills'\n\
                    [[tables]]\ntable = 'public.notes'\n";
    std::fs::write(file.path(), settings).unwrap();
    (database, file)
}

async fn run(database: &Database, file: &tempfile::NamedTempFile, arguments: &[&str]) -> Ran {
    let config = [("POSTRIDER_CONFIG", file.path().to_str().unwrap())];
    database.run_with(arguments, &config).await
}

#[tokio::test]
async fn an_id_with_the_wrong_table_is_refused_by_every_command_and_changes_nothing() {
    let (database, file) = filled().await;
    let wrong = format!("public.bills:{ORDER}");
    let unknown = format!("public.invoices:{ORDER}");
    let of_another = format!("outbox.events:{NUMBERED}");
    for command in [
        &["quarantine", "release"][..],
        &["quarantine", "discard", "--yes"],
        &["quarantine", "show"],
        &["event"],
        &["replay", "--yes"],
        &["replay", "--dry-run"],
    ] {
        let ran = run(&database, &file, &[command, &[&wrong]].concat()).await;
        ran.assert_error("setting-invalid", 2);
        assert_contains(
            &ran.stderr,
            "is an event of outbox.events, not of public.bills",
        );
        assert_contains(&ran.stderr, &format!("outbox.events:{ORDER}"));
        let ran = run(&database, &file, &[command, &[&unknown]].concat()).await;
        ran.assert_error("setting-invalid", 2);
        assert_contains(
            &ran.stderr,
            "captured tables are outbox.events, public.bills, public.notes",
        );
        let ran = run(&database, &file, &[command, &[&of_another]].concat()).await;
        ran.assert_error("setting-invalid", 2);
        assert_contains(&ran.stderr, "is an event of public.legacy");
        assert_contains(&ran.stderr, "give public.legacy:7");
    }
    let changed = "select count(*) from outbox.dispatch where state <> 'quarantined'";
    assert_eq!(database.number(changed).await, 0);
}

#[tokio::test]
async fn an_id_with_its_table_is_accepted_also_if_the_row_is_gone_or_another_table_has_the_id() {
    let (database, file) = filled().await;
    for id in [
        format!("outbox.events:{ORDER}"),
        format!("public.bills:{BILL}"),
        format!("public.bills:{BOTH}"),
        format!("outbox.events:{GONE}"),
        format!("outbox.events:{RENAMED}"),
        format!("outbox.events:{WITHOUT_ID}"),
    ] {
        let ran = run(&database, &file, &["event", &id, "--json"]).await;
        ran.assert_status(0);
        let events = ran.json()["events"].clone();
        assert_eq!(events.as_array().unwrap().len(), 1, "{id}: {events}");
        let (table, uuid) = id.split_once(':').unwrap();
        assert_eq!(events[0]["event_id"], uuid);
        if [ORDER, BILL, BOTH].contains(&uuid) {
            assert_eq!(events[0]["row"]["table"], table);
        }
        let ran = run(&database, &file, &["quarantine", "release", &id]).await;
        ran.assert_status(0);
    }
    let released = "select count(*) from outbox.dispatch where state = 'released'";
    assert_eq!(database.number(released).await, 6);
    // If the id does not name a table, `event` shows the events of both tables that have a row with this id.
    let ran = run(&database, &file, &["event", BOTH, "--json"]).await;
    assert_eq!(ran.json()["events"].as_array().unwrap().len(), 2, "{ran}");
}

#[tokio::test]
async fn an_id_with_its_table_is_found_without_access_to_other_tables() {
    let (database, file) = filled().await;
    let role = format!("clerk_{}", database.name);
    let rights = format!(
        "create role {role} login; grant postrider_relay to {role}; grant select on public.bills to {role}"
    );
    database.execute(&rights).await;
    let url = database.url_as(&role);
    let config = file.path().to_str().unwrap();
    let without_right = [("POSTRIDER_CONFIG", config), ("DATABASE_URL", url.as_str())];
    let migration = connect(&database.url).await;
    let lock = "begin; lock table public.notes in access exclusive mode";
    execute(&migration, lock).await;

    let bill = format!("public.bills:{BILL}");
    for command in [
        &["event"][..],
        &["quarantine", "show"],
        &["quarantine", "release"],
    ] {
        let arguments = [command, &[&bill]].concat();
        let ran = database.run_with(&arguments, &without_right).await;
        ran.assert_status(0);
    }
    // The event is not published, so there is nothing to replay.
    let ran = run(&database, &file, &["replay", "--dry-run", &bill]).await;
    ran.assert_status(1);
    assert_eq!(ran.stderr, "", "{ran}");
    // If the named table has no row with this id, a command looks in the other tables, and skips `public.notes`, which
    // is locked. No other table has a row with the id `GONE`, so the release succeeds. The discard is refused, because
    // the row with the id `ORDER` is in `outbox.events`.
    let gone = format!("outbox.events:{GONE}");
    let ran = run(&database, &file, &["quarantine", "release", &gone]).await;
    ran.assert_status(0);
    let wrong = format!("public.bills:{ORDER}");
    let ran = run(
        &database,
        &file,
        &["quarantine", "discard", "--yes", &wrong],
    )
    .await;
    ran.assert_error("setting-invalid", 2);
}
