//! Tests in which a stranger has planted functions, operators, types and relations with the names of
//! PostgreSQL's own objects. The relay never uses them, regardless of the search path of the database or
//! the role.

mod aggregates;
mod commands;
mod init;

use scratch_postgres::ScratchPostgres;
use tokio_postgres::NoTls;

use crate::harness::{self, Database, Relay, eventually, insert_orders, postrider};
use crate::privileges::login_role;

/// Creates the schema `evil`, and plants copies of PostgreSQL's own objects:
///
/// - Functions and operators, in `evil` and in `public`. Some copies have other argument types, because
///   PostgreSQL prefers such a copy if the original would need a conversion.
/// - Types and relations, in `evil` only.
///
/// A sequence counts the calls of the copies, even those in a transaction that is rolled back.
const PLANT: &str = r#"
SET search_path = pg_catalog, pg_temp;
CREATE SCHEMA evil;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
CREATE SEQUENCE evil.calls;
GRANT ALL ON SEQUENCE evil.calls TO PUBLIC;
CREATE FUNCTION evil.trap() RETURNS bool LANGUAGE plpgsql SET search_path = pg_catalog AS
    'BEGIN PERFORM nextval(''evil.calls''); RAISE EXCEPTION ''planted''; END';
DO $plant$
DECLARE
    -- Pairs of argument types. A planted copy has the second type instead of the first.
    variants text[][] := ARRAY[['', ''], ['text', 'name'], ['text', 'varchar'],
        ['name', 'text'], ['integer', 'bigint'], ['bigint', 'integer'], ['oid', 'regclass'],
        ['anyelement', 'text'], ['anyarray', 'text[]'], ['"any"', 'text'],
        ['anycompatible', 'text'], ['anycompatiblearray', 'text[]'],
        ['timestamp with time zone', 'timestamp'], ['pg_lsn', 'text'], ['oid', 'integer']];
    schemas text[] := ARRAY['evil', 'public'];
    v int; home text; f record; arguments text[]; changed text[]; result text;
    planted int := 0;
BEGIN
    FOR f IN
        SELECT 'function' AS kind, p.proname::text AS name,
               (SELECT array_agg(format_type(t, NULL) ORDER BY n)
                FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY a (t, n)) AS types,
               format_type(p.prorettype, NULL) AS returns, false AS is_prefix
        FROM pg_proc p WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f'
        UNION ALL
        SELECT 'operator', o.oprname::text,
               array_remove(ARRAY[CASE WHEN o.oprleft <> 0 THEN format_type(o.oprleft, NULL) END,
                                  format_type(o.oprright, NULL)], NULL),
               format_type(o.oprresult, NULL), o.oprleft = 0
        FROM pg_operator o WHERE o.oprnamespace = 'pg_catalog'::regnamespace
    LOOP
        arguments := coalesce(f.types, '{}');
        FOR v IN 1 .. array_length(variants, 1) LOOP
            changed := CASE WHEN v = 1 THEN arguments
                            ELSE array_replace(arguments, variants[v][1], variants[v][2]) END;
            CONTINUE WHEN v > 1 AND changed = arguments;
            result := CASE WHEN f.returns IN ('anyelement', 'anyarray', 'anycompatible',
                           'anycompatiblearray') THEN 'text' ELSE f.returns END;
            FOREACH home IN ARRAY schemas LOOP
                BEGIN
                    IF f.kind = 'function' THEN
                        EXECUTE format('CREATE FUNCTION %I.%I(%s) RETURNS %s LANGUAGE plpgsql
                            SET search_path = pg_catalog
                            AS ''BEGIN PERFORM evil.trap(); END''',
                            home, f.name, array_to_string(changed, ', '), result);
                    ELSE
                        EXECUTE format('CREATE FUNCTION %I.%I(%s) RETURNS %s LANGUAGE plpgsql
                            SET search_path = pg_catalog
                            AS ''BEGIN PERFORM evil.trap(); END''',
                            home, 'op_' || planted, array_to_string(changed, ', '), result);
                        EXECUTE format('CREATE OPERATOR %I.%s (FUNCTION = %I.%I, %s RIGHTARG = %s)',
                            home, f.name, home, 'op_' || planted,
                            CASE WHEN f.is_prefix THEN ''
                                 ELSE 'LEFTARG = ' || changed[1] || ',' END,
                            changed[array_length(changed, 1)]);
                    END IF;
                    planted := planted + 1;
                EXCEPTION WHEN OTHERS THEN
                    NULL; -- no such function or operator can have these argument types
                END;
            END LOOP;
        END LOOP;
    END LOOP;
    IF planted < 5000 THEN
        RAISE EXCEPTION 'only % are planted', planted;
    END IF;
    FOR f IN SELECT typname::text AS name FROM pg_type
             WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype = 'b' AND typelem = 0
    LOOP
        EXECUTE format('CREATE DOMAIN evil.%I AS pg_catalog.%I CHECK (evil.trap())', f.name, f.name);
    END LOOP;
    FOR f IN SELECT relname::text AS name FROM pg_class
             WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v')
    LOOP
        BEGIN
            EXECUTE format('CREATE VIEW evil.%I AS SELECT * FROM pg_catalog.%I WHERE evil.trap()',
                           f.name, f.name);
            EXECUTE format('GRANT SELECT ON evil.%I TO PUBLIC', f.name);
        EXCEPTION WHEN OTHERS THEN
            NULL; -- a view cannot have a column of a pseudo-type
        END;
    END LOOP;
END
$plant$;
"#;

/// With the first path, PostgreSQL prefers the planted objects to its own. The second path is PostgreSQL's
/// default. With it, PostgreSQL uses a planted object only if the argument types match better.
const PATHS: [&str; 2] = ["evil, public, pg_catalog", "\"$user\", public"];

async fn planted(path: &str) -> ScratchPostgres {
    let server = ScratchPostgres::builder().start().unwrap();
    let client = harness::connect(&server.socket_url("postgres")).await;
    client.batch_execute(PLANT).await.unwrap();
    client.batch_execute(aggregates::PLANT).await.unwrap();
    let set = format!("ALTER DATABASE postgres SET search_path = {path}");
    client.batch_execute(&set).await.unwrap();
    server
}

/// How often a planted object has been called.
async fn calls(database: &Database) -> i64 {
    database
        .number("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM evil.calls")
        .await
}

/// Keeps the test's own session from calling planted objects.
async fn pin(database: &Database) {
    database
        .execute("SET search_path = pg_catalog, pg_temp")
        .await;
}

fn calls_nothing_planted(path: &str, arguments: &[&str], environment: &[(&str, &str)]) {
    let ran = postrider(arguments, environment).output().unwrap();
    let said = [ran.stdout, ran.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(
        !said.contains("planted") && !said.contains("error["),
        "{path}: {arguments:?}:\n{said}"
    );
    assert!(
        ran.status.code() <= Some(2),
        "{path}: {arguments:?}:\n{said}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn no_command_and_no_relay_calls_planted_objects() {
    for path in PATHS {
        let server = planted(path).await;
        // `Database::on` runs `init --apply` as a superuser, so a planted object would run with all
        // rights.
        let database = Database::on(server).await;
        pin(&database).await;
        assert_eq!(calls(&database).await, 0, "init with {path}");
        let url = login_role(&database).await;
        database
            .execute(&format!("ALTER ROLE shop_relay SET search_path = {path}"))
            .await;
        let emulator = harness::emulator().await;
        let host = emulator.addr().to_string();
        let run = || Relay::start_with(&database, &host, &[("DATABASE_URL", url.as_str())]);
        let relay = run();
        insert_orders(&database, 50, 5).await;
        commands::insert_bad_event(&database).await;
        database.wait_until_recorded().await;
        database.wait_until_audited().await;
        let environment = [
            ("DATABASE_URL", url.as_str()),
            ("PUBSUB_EMULATOR_HOST", host.as_str()),
            ("PUBSUB_PROJECT_ID", "demo"),
        ];
        let run_all = |list: &[&[&str]]| {
            for arguments in list {
                calls_nothing_planted(path, arguments, &environment);
            }
        };
        run_all(commands::READS);
        run_all(&[
            &["check"],
            &["slot", "list"],
            &["slot", "show"],
            &["quarantine", "list"],
            &["quarantine", "release", "--all"],
        ]);
        eventually(
            "the bad event is published or back in quarantine",
            || async {
                let waiting = "SELECT count(*) FROM outbox.dispatch WHERE state = 'released'";
                (database.number(waiting).await == 0).then_some(())
            },
        )
        .await;
        run_all(&[&["quarantine", "discard", "--all", "--yes"]]);
        relay.stop().await;
        let end = database.text("SELECT pg_current_wal_lsn()::text").await;
        run_all(&[&["slot", "advance", "--to", &end, "--yes"]]);
        let as_owner = [("DATABASE_URL", database.url.as_str()), environment[2]];
        let prune = ["prune", "--older-than", "1s", "--yes"];
        calls_nothing_planted(path, &prune, &as_owner);
        // Check that a recovery calls no planted object either.
        database.drop_slot().await;
        insert_orders(&database, 50, 5).await;
        run_all(&[&["recover", "--dry-run"], &["recover", "--yes"]]);
        let relay = run();
        relay.wait_for_log("recovered: ").await;
        database.wait_until_recorded().await;
        let log = relay.log();
        assert!(!log.contains("planted"), "{log}");
        relay.stop().await;
        commands::pretend_to_have_moved(&database).await;
        run_all(&[
            &["recover", "--adopt", "--yes"],
            &["slot", "drop", "--yes"],
            &["slot", "create", "--yes"],
            &["init"],
        ]);
        assert_eq!(calls(&database).await, 0, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_printed_script_and_its_functions_call_no_planted_objects() {
    for path in PATHS {
        let server = planted(path).await;
        let url = server.socket_url("postgres");
        let printed = postrider(&["init", "--no-slot"], &[("DATABASE_URL", &url)]).output();
        let script = String::from_utf8(printed.unwrap().stdout).unwrap();
        let other = [
            ("POSTRIDER_TABLE", "shop.own"),
            ("POSTRIDER_PUBLICATION", "other"),
        ];
        let printed = postrider(&["init", "--no-slot"], &other).output();
        let with_settings = String::from_utf8(printed.unwrap().stdout).unwrap();
        let client = harness::connect(&url).await;
        client
            .batch_execute(
                "CREATE SCHEMA shop; CREATE TABLE shop.own (id pg_catalog.uuid PRIMARY KEY)",
            )
            .await
            .unwrap();
        client.batch_execute(&script).await.unwrap();
        client.batch_execute(&with_settings).await.unwrap();
        let set = format!("RESET ROLE; SET search_path = {path}; SET ROLE postrider_writer");
        client.batch_execute(&set).await.unwrap();
        client
            .batch_execute(
                "SET outbox.traceparent = '00-1'; \
                 SELECT outbox.emit('order', '1', 'Placed', '{}', '{\"a\": \"b\"}')",
            )
            .await
            .unwrap();
        client.batch_execute("RESET ROLE").await.unwrap();
        client
            .batch_execute("SELECT outbox.event_uuid('shop.own', '1')")
            .await
            .unwrap();
        let refused = client.batch_execute("TRUNCATE outbox.events").await;
        let refused = refused.unwrap_err();
        assert_eq!(
            refused.code().map(|code| code.code()),
            Some("23001"),
            "{refused:?}"
        );
        let called = "SELECT is_called FROM evil.calls";
        let called: bool = client.query_one(called, &[]).await.unwrap().get(0);
        assert!(!called, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_of_types_from_public_are_delivered_and_recovered() {
    let server = ScratchPostgres::builder().start().unwrap();
    let (client, connection) = tokio_postgres::connect(&server.socket_url("postgres"), NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    let has_citext = client
        .batch_execute("CREATE EXTENSION citext")
        .await
        .is_ok();
    let kinds = [
        ("colour", "'red'", "'green'", true),
        ("short", "'a1'", "'b2'", true),
        ("citext", "'MixedCase'", "'Other'", has_citext),
    ];
    client
        .batch_execute(
            "CREATE TYPE colour AS ENUM ('red', 'green'); \
             CREATE DOMAIN short AS text CHECK (length(VALUE) < 10)",
        )
        .await
        .unwrap();
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let url = server.url("postgres");
    for (kind, first, second, is_there) in kinds {
        if !is_there {
            eprintln!("SKIPPED: there is no extension {kind}");
            continue;
        }
        is_delivered_and_recovered(&client, kind, [first, second], &url, &host).await;
    }
}

/// Creates a table whose ids have the type `kind`. Checks that the relay records the table's first
/// row from the stream, and the second row in a recovery.
async fn is_delivered_and_recovered(
    client: &tokio_postgres::Client,
    kind: &str,
    ids: [&str; 2],
    url: &str,
    host: &str,
) {
    client
        .batch_execute(&format!(
            "CREATE TABLE public.of_{kind} (id {kind} PRIMARY KEY, aggregatetype text NOT NULL, \
             aggregateid text, event_type text, payload jsonb)"
        ))
        .await
        .unwrap();
    let (table, slot) = (format!("public.of_{kind}"), format!("of_{kind}"));
    let publication = format!("of_{kind}");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        file.path(),
        format!(
            "[[tables]]\ntable = \"{table}\"\n[tables.columns]\nversion = \"\"\n\
             schema_version = \"\"\nheaders = \"\"\noccurred_at = \"\"\n"
        ),
    )
    .unwrap();
    let config = file.path().display().to_string();
    let environment = [
        ("DATABASE_URL", url),
        ("POSTRIDER_CONFIG", config.as_str()),
        ("POSTRIDER_SLOT", slot.as_str()),
        ("POSTRIDER_PUBLICATION", publication.as_str()),
        ("PUBSUB_EMULATOR_HOST", host),
        ("PUBSUB_PROJECT_ID", "demo"),
        ("POSTRIDER_HTTP_ADDR", "off"),
    ];
    let ran = postrider(&["init", "--apply"], &environment)
        .output()
        .unwrap();
    assert!(
        ran.status.success(),
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    let insert = |id: &str| {
        format!("INSERT INTO public.of_{kind} VALUES ({id}, 'order', 'o-1', 'Placed', '{{}}')")
    };
    let recorded = format!(
        "SELECT count(*) FROM public.of_{kind} e WHERE EXISTS (SELECT FROM outbox.dispatch d \
         WHERE d.source_id = 'public.of_{kind}:' || e.id::text)"
    );
    for (nth, id) in [(1, ids[0]), (2, ids[1])] {
        client.batch_execute(&insert(id)).await.unwrap();
        if nth == 2 {
            // Drop the slot, so that the relay reads this row from the table.
            let drop = format!("SELECT pg_drop_replication_slot('{slot}')");
            eventually("the slot is free", || async {
                client.batch_execute(&drop).await.ok()
            })
            .await;
        }
        let mut relay = postrider(&["run"], &environment).spawn().unwrap();
        eventually(&format!("{kind}: event {nth} is recorded"), || async {
            let row = client.query_one(&recorded, &[]).await.unwrap();
            (row.get::<_, i64>(0) == nth).then_some(())
        })
        .await;
        relay.kill().unwrap();
        relay.wait().unwrap();
    }
}
