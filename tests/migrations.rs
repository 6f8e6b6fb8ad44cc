//! Tests of the migrations on a real server: the objects that they create, the rights of each role,
//! and the statements that PostgreSQL must refuse.
//!
//! All tests share one server, with one database per test. A watchdog stops the server when the
//! test process ends. Roles belong to the whole server, so the test with an owner who may not
//! create roles starts its own server.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "migrations/rights.rs"]
mod rights;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use futures_util::StreamExt;
use scratch_postgres::ScratchPostgres;
use tokio_postgres::error::{DbError, SqlState};
use tokio_postgres::{AsyncMessage, Client, NoTls};

/// The first migrations, in the order in which a migration tool applies them.
const MIGRATIONS: [&str; 5] = [
    include_str!("../migrations/0001_events.sql"),
    include_str!("../migrations/0002_dispatch.sql"),
    include_str!("../migrations/0003_publication.sql"),
    include_str!("../migrations/0004_roles.sql"),
    include_str!("../migrations/0005_quarantine.sql"),
];

static SERVER: LazyLock<ScratchPostgres> = LazyLock::new(start);
static DATABASES: AtomicUsize = AtomicUsize::new(0);

fn start() -> ScratchPostgres {
    ScratchPostgres::builder()
        .setting("wal_level", "logical")
        .start()
        .unwrap()
}

/// Connects, and collects the notices that the server sends.
async fn connect(url: &str) -> (Client, Arc<Mutex<Vec<String>>>) {
    let (client, mut connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    let notices = Arc::new(Mutex::new(Vec::new()));
    let collected = Arc::clone(&notices);
    tokio::spawn(async move {
        let mut messages = futures_util::stream::poll_fn(|cx| connection.poll_message(cx));
        while let Some(Ok(message)) = messages.next().await {
            if let AsyncMessage::Notice(notice) = message {
                collected.lock().unwrap().push(notice.message().to_owned());
            }
        }
    });
    (client, notices)
}

/// Creates an empty database on the shared server.
async fn empty_database() -> Client {
    // The first call starts the server and blocks until it runs, so make the call on a thread that may
    // block.
    let admin_url = tokio::task::spawn_blocking(|| SERVER.url("postgres"))
        .await
        .unwrap();
    let name = format!("migrations_{}", DATABASES.fetch_add(1, Ordering::Relaxed));
    let (admin, _) = connect(&admin_url).await;
    admin
        .batch_execute(&format!("create database {name}"))
        .await
        .unwrap();
    connect(&SERVER.url(&name)).await.0
}

async fn migrated_database() -> Client {
    let client = empty_database().await;
    migrate(&client).await;
    client
}

async fn migrate(client: &Client) {
    for sql in MIGRATIONS {
        client.batch_execute(sql).await.unwrap();
    }
}

/// The migrations after [`MIGRATIONS`]. Some of them create `outbox.capture` and `outbox.replay`.
const OF_THE_RELAY: [&str; 18] = [
    include_str!("../migrations/0006_recovery.sql"),
    include_str!("../migrations/0007_audit.sql"),
    include_str!("../migrations/0008_exceptions.sql"),
    include_str!("../migrations/0010_one_relay.sql"),
    include_str!("../migrations/0011_capture.sql"),
    include_str!("../migrations/0012_capture_history.sql"),
    include_str!("../migrations/0013_database.sql"),
    include_str!("../migrations/0014_unfinished_recovery.sql"),
    include_str!("../migrations/0015_condition.sql"),
    include_str!("../migrations/0016_replay.sql"),
    include_str!("../migrations/0017_pruning.sql"),
    include_str!("../migrations/0018_since_lsn.sql"),
    include_str!("../migrations/0019_days.sql"),
    include_str!("../migrations/0020_table_oids.sql"),
    include_str!("../migrations/0021_earlier_messages.sql"),
    include_str!("../migrations/0022_recovery_progress.sql"),
    include_str!("../migrations/0023_uncaptured.sql"),
    include_str!("../migrations/0024_settled.sql"),
];

async fn refused(client: &Client, sql: &str) -> DbError {
    let error = client.batch_execute(sql).await.expect_err(sql);
    error
        .as_db_error()
        .cloned()
        .unwrap_or_else(|| panic!("{sql}: {error}"))
}

async fn refused_for_lack_of_rights(client: &Client, sql: &str) {
    let error = refused(client, sql).await;
    assert_eq!(
        *error.code(),
        SqlState::INSUFFICIENT_PRIVILEGE,
        "{sql}: {error}"
    );
}

async fn text(client: &Client, sql: &str) -> Option<String> {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Returns a description of everything in the schema that a second run of the migrations could have
/// changed.
async fn inventory(client: &Client) -> Option<String> {
    text(
        client,
        "select string_agg(line, e'\n' order by line) from (
             select format('%s %s %s %s', c.relname, c.relkind, c.relacl, c.reloptions)
                 from pg_class c where relnamespace = 'outbox'::regnamespace
             union all
             select format('%s.%s %s %s %s', a.attrelid::regclass, a.attname, a.attnotnull,
                           format_type(a.atttypid, a.atttypmod), a.atthasdef)
                 from pg_attribute a join pg_class c on c.oid = a.attrelid
                 where c.relnamespace = 'outbox'::regnamespace and a.attnum > 0
             union all
             select format('%s %s', p.oid::regprocedure, p.proacl)
                 from pg_proc p where pronamespace = 'outbox'::regnamespace
             union all
             select format('%s on %s', tgname, tgrelid::regclass)
                 from pg_trigger where not tgisinternal
             union all
             select format('%s %s', p.pubname, p.oid) from pg_publication p
         ) as lines(line)",
    )
    .await
}

#[tokio::test]
async fn a_second_run_changes_nothing() {
    let client = migrated_database().await;
    let first = inventory(&client).await;
    client
        .batch_execute("select outbox.emit('order', '1', 'Placed', '{}')")
        .await
        .unwrap();
    migrate(&client).await;
    assert_eq!(inventory(&client).await, first);
    assert_eq!(
        text(&client, "select count(*)::text from outbox.events")
            .await
            .unwrap(),
        "1"
    );
}

#[tokio::test]
async fn changing_an_event_is_refused_with_a_hint_even_for_the_owner() {
    let client = migrated_database().await;
    client
        .batch_execute("select outbox.emit('order', '1', 'Placed', '{}')")
        .await
        .unwrap();
    for sql in [
        "update outbox.events set payload = '{}'",
        "update outbox.events set version = 1 where false",
        "insert into outbox.events (aggregatetype, event_type) values ('a', 'b')
             on conflict (id) do update set version = 1",
    ] {
        let error = refused(&client, sql).await;
        assert_eq!(*error.code(), SqlState::RESTRICT_VIOLATION);
        assert_eq!(
            error.message(),
            "UPDATE on outbox.events refused: the outbox is insert-only"
        );
        assert!(error.hint().unwrap().contains("insert a new one"), "{sql}");
    }
    let error = refused(&client, "truncate outbox.events").await;
    assert!(
        error
            .message()
            .starts_with("TRUNCATE on outbox.events refused")
    );
    assert!(error.hint().unwrap().contains("To prune"));
    client
        .batch_execute("delete from outbox.events")
        .await
        .unwrap();
}

#[tokio::test]
async fn emit_returns_the_id_and_fills_in_the_defaults() {
    let client = migrated_database().await;
    let id = "5a246b35-2bea-4931-9cfc-3e071ccb09c0";
    let sql = format!(
        "select outbox.emit('order', null, 'Placed', '{{\"a\": 1}}', version => 7, id => '{id}')::text"
    );
    assert_eq!(text(&client, &sql).await.as_deref(), Some(id));
    let row = text(
        &client,
        "select concat_ws('|', id, aggregatetype, coalesce(aggregateid, '-'), event_type, version,
                schema_version, payload, coalesce(headers::text, '-'), occurred_at = now())
         from outbox.events, (select set_config('timezone', 'utc', false)) as utc",
    );
    let row = row.await.unwrap();
    assert_eq!(row, format!("{id}|order|-|Placed|7|1|{{\"a\": 1}}|-|f"));
    let generated = text(
        &client,
        "select outbox.emit('a', 'b', 'c', null, id => null)::text",
    )
    .await;
    assert_eq!(generated.unwrap().len(), 36);
}

#[tokio::test]
async fn emit_takes_the_trace_context_from_the_settings_of_the_transaction() {
    let client = migrated_database().await;
    client
        .batch_execute(
            "begin;
             set local outbox.traceparent = '00-ab-cd-01';
             select outbox.emit('order', '1', 'plain', '{}');
             set local outbox.tracestate = 'k=v';
             select outbox.emit('order', '1', 'own', '{}', '{\"traceparent\": \"mine\", \"x\": 1}');
             commit;
             select outbox.emit('order', '1', 'after', '{}');",
        )
        .await
        .unwrap();
    let headers = async |event_type: &str| {
        let sql =
            format!("select headers::text from outbox.events where event_type = '{event_type}'");
        text(&client, &sql).await
    };
    assert_eq!(
        headers("plain").await.as_deref(),
        Some(r#"{"traceparent": "00-ab-cd-01"}"#)
    );
    assert_eq!(
        headers("own").await.as_deref(),
        Some(r#"{"x": 1, "tracestate": "k=v", "traceparent": "mine"}"#)
    );
    assert_eq!(
        headers("after").await,
        None,
        "the settings last until their transaction ends"
    );
}

#[tokio::test]
async fn an_event_has_one_dispatch_row_per_position_and_one_of_three_states() {
    let client = migrated_database().await;
    let insert = |state: &str| {
        format!(
            "insert into outbox.dispatch (commit_lsn, ordinal, event_id, state, attempts, committed_at)
             values ('0/1', 1, gen_random_uuid(), '{state}', 1, now())"
        )
    };
    client.batch_execute(&insert("published")).await.unwrap();
    let twice = refused(&client, &insert("published")).await;
    assert_eq!(*twice.code(), SqlState::UNIQUE_VIOLATION);
    let unknown = refused(&client, &insert("lost")).await;
    assert_eq!(*unknown.code(), SqlState::CHECK_VIOLATION);
}

#[tokio::test]
async fn the_publication_contains_only_the_inserts_of_the_outbox() {
    let client = migrated_database().await;
    let found = text(
        &client,
        "select concat_ws('|', pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot,
                (select string_agg(schemaname || '.' || tablename, ',')
                 from pg_publication_tables t where t.pubname = p.pubname))
         from pg_publication p where pubname = 'postrider'",
    );
    assert_eq!(found.await.as_deref(), Some("t|f|f|f|t|outbox.events"));
}

#[tokio::test]
async fn an_existing_publication_is_not_changed() {
    let client = migrated_database().await;
    client
        .batch_execute("create table more (id int); alter publication postrider add table more")
        .await
        .unwrap();
    let oid = text(&client, "select oid::text from pg_publication").await;
    migrate(&client).await;
    assert_eq!(
        text(&client, "select oid::text from pg_publication").await,
        oid
    );
    let tables = "select count(*)::text from pg_publication_tables where pubname = 'postrider'";
    assert_eq!(text(&client, tables).await.as_deref(), Some("2"));
}

#[tokio::test]
async fn event_uuid_agrees_with_the_mapper() {
    let client = migrated_database().await;
    for migration in OF_THE_RELAY {
        client.batch_execute(migration).await.unwrap();
    }
    // The test of the mapper expects the same value, so the SQL function and the mapper agree.
    let uuid = text(&client, "select outbox.event_uuid('public.a', '7')::text").await;
    assert_eq!(
        uuid.as_deref(),
        Some("c7bc7e8d-cd25-14db-6df3-35ec723877bc")
    );
    client
        .batch_execute(
            "create table a (id bigint); create index on a (outbox.event_uuid('a', id::text))",
        )
        .await
        .expect("immutable enough for an index");
    // No function may be parallel safe. `event_uuid` calls a function that has a block with EXCEPTION, and PostgreSQL
    // cannot run such a block in a parallel query.
    let safe = "select count(*)::text from pg_proc where proparallel <> 'u' \
                and pronamespace = 'outbox'::regnamespace";
    assert_eq!(text(&client, safe).await.as_deref(), Some("0"));
}

#[tokio::test]
async fn replacing_one_line_of_the_migration_makes_the_payload_opaque() {
    let client = empty_database().await;
    for sql in MIGRATIONS {
        client
            .batch_execute(&sql.replace("payload jsonb", "payload bytea"))
            .await
            .unwrap();
    }
    client
        .batch_execute(r"select outbox.emit('order', '1', 'Placed', '\x00ff')")
        .await
        .unwrap();
    let payload = text(&client, "select encode(payload, 'hex') from outbox.events").await;
    assert_eq!(payload.as_deref(), Some("00ff"));
}

#[tokio::test]
async fn a_database_prepared_for_shards_loses_their_columns() {
    let client = migrated_database().await;
    let one_relay = include_str!("../migrations/0010_one_relay.sql");
    for sql in OF_THE_RELAY.iter().take_while(|sql| **sql != one_relay) {
        client.batch_execute(sql).await.unwrap();
    }
    client
        .batch_execute(
            "alter table outbox.relay add column places_from pg_lsn;
             comment on column outbox.relay.slot is 'The slot; that of shard i of n ends in _iofn.';
             comment on column outbox.dispatch.ordinal is 'With n shards: nth * n + i.'",
        )
        .await
        .unwrap();
    let left = "select string_agg(text, ' ') from (
            select attname::text from pg_attribute
                where attrelid = 'outbox.relay'::regclass and not attisdropped
            union all
            select description from pg_description d
                where objoid in ('outbox.relay'::regclass, 'outbox.dispatch'::regclass)
        ) found (text) where text ilike any (array['%shard%', 'places%'])";
    assert!(text(&client, left).await.is_some());
    for _ in 0..2 {
        client.batch_execute(one_relay).await.unwrap();
        assert_eq!(text(&client, left).await, None);
    }
}
