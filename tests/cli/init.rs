//! Tests of `postrider init --apply`.

mod columns;
mod days;

use scratch_postgres::ScratchPostgres;

use crate::support::{Database, assert_contains, connect, execute, postrider};

/// The number of files in `migrations/`.
const MIGRATIONS: i64 = 23;

#[tokio::test]
async fn a_second_init_changes_nothing_and_says_so() {
    let database = Database::new().await;
    let first = database.run(&["init", "--apply"]).await;
    first.assert_status(0);
    assert_contains(&first.stdout, "0001 events: applied");
    assert_contains(
        &first.stdout,
        &format!("slot {} created at ", database.name),
    );
    database.emit(3).await;
    let second = database.run(&["init", "--apply"]).await;
    second.assert_status(0);
    assert!(!second.stdout.contains("applied"), "{second}");
    assert_contains(&second.stdout, "already done");
    assert_eq!(
        database.number("select count(*) from outbox.events").await,
        3
    );
    assert_eq!(
        database
            .number("select count(*) from outbox.migrations")
            .await,
        MIGRATIONS
    );
}

#[tokio::test]
async fn concurrent_inits_all_succeed() {
    let init = ["init", "--apply", "--no-slot"];
    for _ in 0..5 {
        let database = Database::new().await;
        let run = || database.run(&init);
        let (a, b, c) = tokio::join!(run(), run(), run());
        for ran in [a, b, c] {
            ran.assert_status(0);
        }
        assert_eq!(
            database
                .number("select count(*) from outbox.migrations")
                .await,
            MIGRATIONS
        );
    }
}

#[tokio::test]
async fn the_printed_script_does_the_same_as_apply() {
    let database = Database::new().await;
    let printed = database.run(&["init", "--no-slot"]).await;
    database.execute(&printed.stdout).await;
    let applied = database.run(&["init", "--apply"]).await;
    applied.assert_status(0);
    assert_contains(&applied.stdout, "0002 dispatch: already done");
}

#[tokio::test]
async fn a_bytea_payload_is_chosen_at_the_first_init_only() {
    let database = Database::new().await;
    database
        .run(&["init", "--apply", "--payload", "bytea"])
        .await
        .assert_status(0);
    let of_type = "select count(*) from pg_attribute where attrelid = 'outbox.events'::regclass \
                   and attname = 'payload' and atttypid = 'bytea'::regtype";
    assert_eq!(database.number(of_type).await, 1);
    database
        .execute("select outbox.emit('order', '1', 'Placed', '\\x00ff'::bytea)")
        .await;
    let again = database
        .run(&["init", "--apply", "--json", "--payload", "jsonb"])
        .await;
    again.assert_status(1);
    assert_eq!(again.finding("payload-type")["severity"], "warning");
}

#[tokio::test]
async fn a_relay_user_gets_its_rights_and_a_note_of_those_it_still_needs() {
    let database = Database::new().await;
    let role = format!("{}_relay", database.name);
    let missing = database
        .run(&["init", "--apply", "--relay-user", &role])
        .await;
    missing.assert_error("setting-invalid", 2);
    assert_contains(
        &missing.stderr,
        &format!("create role {role} login replication"),
    );

    database.execute(&format!("create role {role} login")).await;
    let init = ["init", "--apply", "--json", "--relay-user", &role];
    let ran = database.run(&init).await;
    ran.assert_status(1);
    let remedy = ran.finding("replication-right")["remedy"].to_string();
    assert_contains(&remedy, &format!("alter role {role} with replication"));

    database
        .execute(&format!("alter role {role} with replication"))
        .await;
    database.run(&init).await.assert_status(0);
    let relay = connect(&database.url_as(&role)).await;
    execute(
        &relay,
        "select * from outbox.events; update outbox.relay set timeline = 1",
    )
    .await;
}

/// The remedy depends on the server's version, so the test executes the statement that `init` proposes.
#[tokio::test]
async fn a_relay_user_that_does_not_inherit_is_reported_with_the_statement_that_helps() {
    let database = Database::new().await;
    let role = format!("{}_relay", database.name);
    database
        .execute(&format!("create role {role} login replication noinherit"))
        .await;
    let init = ["init", "--apply", "--json", "--relay-user", &role];
    let ran = database.run(&init).await;
    ran.assert_status(1);
    let remedy = ran.finding("role-without-inherit")["remedy"].clone();
    let relay = connect(&database.url_as(&role)).await;
    let reads = relay.batch_execute("select * from outbox.events").await;
    assert!(reads.is_err(), "the role inherits");

    let by_setting = format!("alter role {role} set role = postrider_relay");
    database.execute(&by_setting).await;
    database.run(&init).await.assert_status(0);
    database
        .execute(&format!("alter role {role} reset role"))
        .await;
    database.execute(remedy.as_str().unwrap()).await;
    database.run(&init).await.assert_status(0);
    execute(&relay, "select * from outbox.events").await;
}

#[tokio::test]
async fn other_tables_and_publications_come_from_the_settings() {
    let database = Database::new().await;
    database
        .execute("create schema sales; create table sales.outbox (like pg_class); create table sales.more (id int)")
        .await;
    let env = [
        ("POSTRIDER_PUBLICATION", "Sales"),
        ("POSTRIDER_TABLE", "sales.outbox"),
    ];
    database
        .run_with(&["init", "--apply", "--no-slot"], &env)
        .await
        .assert_status(2); // the table does not have the columns of an outbox
    let published = |table: &str| {
        format!(
            "select count(*) from pg_publication_tables \
             where pubname = 'Sales' and schemaname = 'sales' and tablename = '{table}'"
        )
    };
    assert_eq!(database.number(&published("outbox")).await, 1);
    // A table that was added to the settings is also added to the publication.
    let env = [
        ("POSTRIDER_PUBLICATION", "Sales"),
        ("POSTRIDER_TABLE", "sales.more"),
    ];
    database
        .run_with(&["init", "--apply", "--no-slot"], &env)
        .await
        .assert_status(2); // the table does not have the columns of an outbox
    assert_eq!(database.number(&published("more")).await, 1);
    let env = [
        ("POSTRIDER_PUBLICATION", "Sales"),
        ("POSTRIDER_TABLE", "sales.none"),
    ];
    let ran = database
        .run_with(&["init", "--apply", "--no-slot"], &env)
        .await;
    ran.assert_error("schema-missing", 3);
}

#[tokio::test]
async fn a_view_and_a_partition_captured_with_its_root_are_refused_before_any_change() {
    let database = Database::new().await;
    let columns = "id uuid, aggregatetype text, aggregateid text, event_type text, payload text";
    database
        .execute(&format!(
            "create table parts ({columns}) partition by hash (id); \
             create table part partition of parts for values with (modulus 1, remainder 0); \
             create view seen as select * from parts"
        ))
        .await;
    for (tables, said) in [
        (
            &["public.parts", "public.part"][..],
            "is a partition of public.parts",
        ),
        (&["public.seen"], "public.seen is a view"),
    ] {
        let toml = tables
            .iter()
            .map(|t| format!("[[tables]]\ntable = '{t}'\n"));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), toml.collect::<String>()).unwrap();
        let config = file.path().display().to_string();
        let env = [("POSTRIDER_CONFIG", config.as_str())];
        let ran = database
            .run_with(&["init", "--apply", "--no-slot"], &env)
            .await;
        ran.assert_error("publication-drift", 3);
        assert!(ran.stderr.contains(said), "{}", ran.stderr);
        let ran = database.run_with(&["check"], &env).await;
        assert!(ran.stdout.contains(said), "{}", ran.stdout);
        let created = "select count(*) from pg_namespace where nspname = 'outbox'";
        assert_eq!(database.number(created).await, 0);
    }
}

#[tokio::test]
async fn without_logical_wal_everything_except_the_slot_is_created() {
    let server = ScratchPostgres::builder()
        .setting("wal_level", "replica")
        .start()
        .unwrap();
    let url = server.url("postgres");
    let ran = postrider(&["init", "--apply", "--json"], &[("DATABASE_URL", &url)]).await;
    ran.assert_status(1);
    let remedy = ran.finding("wal-level")["remedy"].to_string();
    assert_contains(&remedy, "alter system set wal_level = 'logical'");
    let client = connect(&url).await;
    execute(
        &client,
        "select * from outbox.events, outbox.dispatch, outbox.relay",
    )
    .await;

    let env = [
        ("DATABASE_URL", url.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    let run = [&env[..], &crate::bad_input::FAST].concat();
    postrider(&["run"], &run).await.assert_error("wal-level", 3);
}

#[tokio::test]
async fn an_owner_without_replication_gets_everything_except_the_slot() {
    let database = Database::new().await;
    let (name, owner) = (&database.name, format!("{}_owner", database.name));
    let sql = format!("create role {owner} login; alter database {name} owner to {owner}");
    database.execute(&sql).await;
    let url = database.url_as(&owner);
    let ran = database
        .run_with(&["init", "--apply", "--json"], &[("DATABASE_URL", &url)])
        .await;
    ran.assert_status(1);
    ran.finding("replication-right");
    assert_eq!(
        database
            .number("select count(*) from outbox.migrations")
            .await,
        MIGRATIONS
    );
}

#[tokio::test]
async fn a_role_without_create_is_referred_to_the_owner() {
    let database = Database::new().await;
    let guest = format!("{}_guest", database.name);
    database
        .execute(&format!("create role {guest} login"))
        .await;
    let url = database.url_as(&guest);
    let ran = database
        .run_with(&["init", "--apply"], &[("DATABASE_URL", &url)])
        .await;
    ran.assert_error("privilege-missing", 3);
    assert_contains(&ran.stderr, "owner of the database");
}

#[tokio::test]
async fn init_does_not_silently_recreate_a_slot_that_was_in_use() {
    let database = Database::initialised().await;
    let name = &database.name;
    let served = format!(
        "insert into outbox.relay (slot, system_identifier, timeline, confirmed_lsn, instance) \
         select '{name}', system_identifier::text, 1, '0/1', 'test' from pg_control_system(); \
         select pg_drop_replication_slot('{name}')"
    );
    database.execute(&served).await;
    let ran = database.run(&["init", "--apply", "--json"]).await;
    ran.assert_status(1);
    assert_contains(&ran.finding("slot-missing")["what"].to_string(), "0/1");
    database
        .run(&["slot", "create"])
        .await
        .assert_error("slot-missing", 3);
    database
        .run(&["slot", "create", "--yes"])
        .await
        .assert_status(0);
}

/// A database with a table that the test creates itself, and a settings file that names this table.
struct Own {
    database: Database,
    settings: tempfile::NamedTempFile,
}

impl Own {
    async fn new(columns: &str, settings: &str) -> Self {
        Self::named("public.own", columns, settings).await
    }

    async fn named(table: &str, columns: &str, settings: &str) -> Self {
        let database = Database::new().await;
        let (schema, _) = table.split_once('.').unwrap();
        let create = format!(
            "create schema if not exists {schema}; create table {table} (id uuid primary key default gen_random_uuid(), aggregatetype text, \
             aggregateid text, event_type text, payload jsonb {columns})"
        );
        database.execute(&create).await;
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = format!("[[tables]]\ntable = \"{table}\"\n{settings}");
        std::fs::write(file.path(), text).unwrap();
        Self {
            database,
            settings: file,
        }
    }

    async fn run(&self, args: &[&str]) -> crate::support::Ran {
        let path = self.settings.path().display().to_string();
        self.database
            .run_with(args, &[("POSTRIDER_CONFIG", &path)])
            .await
    }

    /// Follows the first step of the finding's remedy, which is an SQL statement.
    async fn follow(&self, finding: &serde_json::Value) {
        let remedy = finding["remedy"].as_str().unwrap();
        let (statement, rest) = remedy.split_once("; then ").unwrap();
        assert_contains(rest, "postrider init --apply");
        let statement = statement.split(", because").next().unwrap();
        self.database.execute(statement).await;
    }
}

const INIT: [&str; 4] = ["init", "--apply", "--no-slot", "--json"];

#[tokio::test]
async fn a_second_init_leaves_the_schemas_alone_so_that_no_relay_compares_its_tables() {
    let own = Own::named("sales.own", "", "").await;
    own.run(&INIT).await.assert_status(0);
    let versions = "select string_agg(xmin::text, ' ' order by nspname) from pg_namespace \
                    where nspname in ('outbox', 'sales')";
    let before = own.database.text(versions).await;
    own.run(&INIT).await.assert_status(0);
    assert_eq!(own.database.text(versions).await, before);
}

#[tokio::test]
async fn the_printed_script_makes_no_second_record_of_a_renamed_table() {
    let own = Own::new("", "").await;
    own.run(&["init", "--apply"]).await.assert_status(0);
    own.database
        .execute("alter table public.own rename to renamed")
        .await;
    std::fs::write(
        own.settings.path(),
        "[[tables]]\ntable = \"public.renamed\"\n",
    )
    .unwrap();
    let printed = own.run(&["init"]).await.stdout;
    let (_, records) = printed
        .split_once("-- Run directly after the slot")
        .unwrap();
    own.database.execute(&format!("--{records}")).await;
    let records = "select count(*) from outbox.capture";
    assert_eq!(own.database.number(records).await, 1);
}
