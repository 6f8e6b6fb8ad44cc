//! Tests of the SQL functions with which a relay adds and drops days. The functions drop nothing
//! else, no matter who calls them.

use tokio_postgres::error::SqlState;

use super::*;
use crate::privileges::login_role;

/// Runs a statement as the role in `url`. Returns the SQLSTATE of the error, or `None` if the
/// statement succeeds.
async fn refused(url: &str, sql: &str) -> Option<SqlState> {
    let client = connect(url).await;
    let error = client.batch_execute(sql).await.err()?;
    Some(
        error
            .code()
            .cloned()
            .unwrap_or(SqlState::CONNECTION_EXCEPTION),
    )
}

/// SQL that tries to drop the table `name` as the partition of the day `day`.
fn drop_sql(name: &str, day: &str) -> String {
    format!(
        "BEGIN; SELECT outbox.lock_day('{name}'::regclass, {day}); \
         SELECT outbox.drop_day('{name}'::regclass, {day}); COMMIT"
    )
}

/// SQL for the date that is `days` days from today.
fn date(days: i32) -> String {
    format!("((now() at time zone 'UTC')::date + {days})")
}

#[tokio::test(flavor = "multi_thread")]
async fn only_whole_past_days_of_the_outbox_can_be_dropped() {
    let database = daily_database().await;
    let url = login_role(&database).await;
    let today = day(&database, 0).await.0;
    let past = add_past_day(&database, -20).await;
    for day in [-1, 0, 8] {
        let add = format!("SELECT outbox.add_day({})", date(day));
        let count = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox.events'::regclass";
        let before = database.number(count).await;
        assert_eq!(refused(&url, &add).await, None);
        assert_eq!(database.number(count).await, before, "{day}");
    }

    // The name of this partition is the name of a past day, but its bounds are the bounds of a future
    // day. The functions must trust only the bounds.
    let (old_name, _) = day(&database, -30).await;
    let (_, future) = day(&database, 40).await;
    let week = format!(
        "FROM ({}) TO ({})",
        "'2020-01-06 00:00+00'", "'2020-01-13 00:00+00'"
    );
    database
        .execute(&format!(
            "CREATE TABLE {old_name} PARTITION OF outbox.events {future}; \
             CREATE TABLE outbox.week PARTITION OF outbox.events FOR VALUES {week}; \
             CREATE TABLE outbox.shifted PARTITION OF outbox.events FOR VALUES \
                 FROM ('2020-02-01 05:00+00') TO ('2020-02-02 05:00+00'); \
             CREATE TABLE outbox.parted PARTITION OF outbox.events FOR VALUES \
                 FROM ('2020-03-01 00:00+00') TO ('2020-03-02 00:00+00') PARTITION BY HASH (id); \
             CREATE TABLE outbox.ancient PARTITION OF outbox.events FOR VALUES \
                 FROM (MINVALUE) TO ('2019-01-01 00:00+00'); \
             CREATE TABLE public.precious (id int)"
        ))
        .await;
    let prerequisite = Some(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
    for (name, day) in [
        (old_name.as_str(), date(-30)),
        (&old_name, date(40)),
        (&today, date(0)),
        (&past, date(-21)),
        ("outbox.week", "date '2020-01-06'".to_owned()),
        ("outbox.shifted", "date '2020-02-01'".to_owned()),
        ("outbox.parted", "date '2020-03-01'".to_owned()),
        ("outbox.ancient", "date '2018-12-31'".to_owned()),
        ("outbox.events", date(-20)),
        ("outbox.events_default", date(-20)),
        ("outbox.dispatch", date(-20)),
        ("public.precious", date(-20)),
    ] {
        let state = refused(&url, &drop_sql(name, &day)).await;
        assert_eq!(state, prerequisite, "{name} {day}");
        assert!(exists(&database, name).await, "{name}");
    }
    let unlocked = format!("SELECT outbox.drop_day('{past}'::regclass, {})", date(-20));
    assert_eq!(refused(&url, &unlocked).await, prerequisite);
}

/// A transaction takes its snapshot before another session detaches a partition. In this snapshot, the detached table
/// still is a partition. The functions must refuse to drop it.
#[tokio::test(flavor = "multi_thread")]
async fn a_detached_partition_is_never_dropped_as_a_day_in_any_isolation_level() {
    let database = daily_database().await;
    let url = login_role(&database).await;
    let past = add_past_day(&database, -20).await;
    let hostile = connect(&url).await;
    hostile
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT outbox.days()")
        .await
        .unwrap();
    let detach = format!("ALTER TABLE outbox.events DETACH PARTITION {past}");
    database.execute(&detach).await;
    let drop = drop_sql(&past, &date(-20)).replace("BEGIN; ", "");
    let error = hostile.batch_execute(&drop).await.unwrap_err();
    assert_eq!(
        error.code(),
        Some(&SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE)
    );
    assert!(exists(&database, &past).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_code_of_the_owner_of_the_table_runs_with_the_rights_of_another_role() {
    let database = daily_database().await;
    let url = login_role(&database).await;
    database
        .execute(
            "CREATE ROLE app; GRANT ALL ON SCHEMA outbox TO app; ALTER DATABASE postgres OWNER TO app; \
             DO $$ DECLARE t text; BEGIN \
                 FOR t IN SELECT 'outbox.events' UNION SELECT name FROM outbox.days() \
                 LOOP EXECUTE format('ALTER TABLE %s OWNER TO app', t); END LOOP; END $$",
        )
        .await;
    let past = add_past_day(&database, -20).await;
    let last = day(&database, 7).await.0;
    let prepare = format!("DROP TABLE {last}; ALTER TABLE {past} OWNER TO app");
    database.execute(&prepare).await;
    for call in [
        format!("add_day({})", date(7)),
        format!("lock_day('{past}'::regclass, {})", date(-20)),
        format!("drop_day('{past}'::regclass, {})", date(-20)),
    ] {
        let state = refused(&url, &format!("SELECT outbox.{call}")).await;
        assert_eq!(state, Some(SqlState::INSUFFICIENT_PRIVILEGE), "{call}");
    }
    // A superuser who does not own the table applies the migrations. Afterwards the functions must
    // belong to the table's owner.
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("POSTRIDER_PRUNE_AFTER", "1s"),
    ];
    let init = postrider(&["init", "--apply"], &environment).output();
    let init = init.unwrap();
    assert!(init.status.success(), "{init:?}");
    let owners = "SELECT count(*) FROM pg_proc WHERE proname IN ('add_day', 'lock_day', 'drop_day') \
                  AND prosecdef AND proowner = 'app'::regrole";
    assert_eq!(database.number(owners).await, 3);
    assert!(exists(&database, &last).await);
    assert_eq!(refused(&url, &drop_sql(&past, &date(-20))).await, None);
    assert!(!exists(&database, &past).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_without_the_right_to_delete_cannot_lock_or_drop_a_day() {
    let database = daily_database().await;
    let url = login_role(&database).await;
    let past = add_past_day(&database, -20).await;
    database
        .execute("REVOKE DELETE ON outbox.events FROM postrider_relay")
        .await;
    let state = refused(&url, &drop_sql(&past, &date(-20))).await;
    assert_eq!(state, Some(SqlState::INSUFFICIENT_PRIVILEGE));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_can_drop_a_day_that_another_session_waits_to_lock() {
    let database = daily_database().await;
    let url = login_role(&database).await;
    let past = add_past_day(&database, -20).await;
    let drop = drop_sql(&past, &date(-20));
    let (lock, drop) = drop.split_once("SELECT outbox.drop_day").unwrap();
    let (first, second) = (connect(&url).await, connect(&url).await);
    first.batch_execute(lock).await.unwrap();
    let lock = lock.replace("BEGIN; ", "");
    let waiting = tokio::spawn(async move {
        let locked = second.query_one(lock.trim_end_matches("; "), &[]).await;
        locked.unwrap().get::<_, bool>(0)
    });
    let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted";
    eventually("the second one waits", || async {
        (database.number(waits).await == 1).then_some(())
    })
    .await;
    let drop = format!("SELECT outbox.drop_day{drop}");
    first.batch_execute(&drop).await.unwrap();
    assert!(!waiting.await.unwrap(), "the day is gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_day_is_added_next_to_a_default_partition_whose_size_is_unknown() {
    let database = daily_database().await;
    let last = day(&database, 7).await.0;
    database
        .execute(&format!(
            "DROP TABLE {last}, outbox.events_default; \
             CREATE TABLE outbox.events_default PARTITION OF outbox.events DEFAULT PARTITION BY HASH (id)"
        ))
        .await;
    let add = format!("SELECT outbox.add_day({})", date(7));
    assert_eq!(database.text(&add).await, "large");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_object_of_a_hostile_search_path_is_used() {
    let database = daily_database().await;
    let url = login_role(&database).await;
    let today = day(&database, 0).await.0;
    let past = add_past_day(&database, -20).await;
    database
        .execute(
            "CREATE TABLE public.precious (id int); CREATE SCHEMA evil; GRANT ALL ON SCHEMA evil TO shop_relay; \
             CREATE FUNCTION evil.format(text, VARIADIC \"any\") RETURNS text LANGUAGE internal AS 'text_format'; \
             CREATE FUNCTION evil.to_regclass(text) RETURNS regclass LANGUAGE sql \
                 AS $$ SELECT 'public.precious'::regclass $$; \
             CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE sql \
                 AS $$ SELECT timestamptz '2100-01-01' $$; \
             CREATE FUNCTION evil.isfinite(timestamptz) RETURNS boolean LANGUAGE sql AS 'SELECT true'",
        )
        .await;
    let hostile = "SET search_path = evil, pg_temp, pg_catalog; SET timezone = 'Asia/Tokyo'; \
                   SET datestyle = 'German'; CREATE TEMP TABLE pg_locks (pid int);";
    let today_again = [hostile, &drop_sql(&today, "(evil.now())::date")].concat();
    let state = refused(&url, &today_again).await;
    assert_eq!(state, Some(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE));
    assert!(exists(&database, &today).await);
    let the_past = [
        hostile,
        &drop_sql(&past, &date(-20).replace("now", "pg_catalog.now")),
    ]
    .concat();
    assert_eq!(refused(&url, &the_past).await, None);
    assert!(!exists(&database, &past).await);
    assert!(exists(&database, "public.precious").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn days_can_be_dropped_only_by_a_relay_that_prunes_and_never_if_foreign_tables() {
    let database = daily_database().await;
    let url = login_role(&database).await;
    database
        .execute(
            "REVOKE EXECUTE ON FUNCTION outbox.add_day(date), outbox.lock_day(oid, date), \
                 outbox.drop_day(oid, date) FROM postrider_relay",
        )
        .await;
    let environment = [("DATABASE_URL", database.url.as_str())];
    let init = ["init", "--apply", "--partition", "daily"];
    let again = postrider(&init, &environment).output().unwrap();
    assert!(again.status.success(), "{again:?}");
    for call in [
        "add_day(current_date)",
        "lock_day(0, current_date)",
        "drop_day(0, current_date)",
    ] {
        let state = refused(&url, &format!("SELECT outbox.{call}")).await;
        assert_eq!(state, Some(SqlState::INSUFFICIENT_PRIVILEGE), "{call}");
    }
    let has_fdw = "SELECT count(*) FROM pg_available_extensions WHERE name = 'file_fdw'";
    if database.number(has_fdw).await == 0 {
        eprintln!("skipped: file_fdw is not installed");
        return;
    }
    // PostgreSQL refuses a foreign partition of a table with a primary key, so drop the key first.
    database
        .execute(
            "ALTER TABLE outbox.events DROP CONSTRAINT events_pkey; CREATE EXTENSION file_fdw; CREATE SERVER files FOREIGN DATA WRAPPER file_fdw; \
             CREATE FOREIGN TABLE outbox.archived PARTITION OF outbox.events FOR VALUES \
                 FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00') \
                 SERVER files OPTIONS (filename '/dev/null')",
        )
        .await;
    let day = "SELECT count(*) FROM outbox.days() WHERE name = 'outbox.archived' AND day IS NULL";
    assert_eq!(database.number(day).await, 1);
}
