//! Runs `postrider init` on a database in which a stranger has created objects with the names of
//! Postrider's own objects.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn init_refuses_a_schema_and_tables_that_a_stranger_created() {
    for (made, what) in [
        ("CREATE SCHEMA outbox", "schema outbox"),
        (
            "RESET ROLE; CREATE SCHEMA outbox; GRANT CREATE, USAGE ON SCHEMA outbox TO stranger; \
             SET ROLE stranger; CREATE TABLE outbox.migrations (version int PRIMARY KEY, name text); \
             CREATE FUNCTION public.trap() RETURNS trigger LANGUAGE plpgsql AS \
                 'BEGIN EXECUTE ''ALTER ROLE stranger SUPERUSER''; RETURN NEW; END'; \
             CREATE TRIGGER trap BEFORE INSERT ON outbox.migrations \
                 FOR EACH ROW EXECUTE FUNCTION public.trap()",
            "outbox.migrations",
        ),
        (
            "RESET ROLE; CREATE SCHEMA outbox; GRANT CREATE, USAGE ON SCHEMA outbox TO stranger; \
             SET ROLE stranger; CREATE TABLE outbox.capture (identity text); \
             CREATE FUNCTION public.trap() RETURNS trigger LANGUAGE plpgsql AS \
                 'BEGIN EXECUTE ''ALTER ROLE stranger SUPERUSER''; RETURN NEW; END'; \
             CREATE TRIGGER trap BEFORE INSERT ON outbox.capture \
                 FOR EACH ROW EXECUTE FUNCTION public.trap()",
            "outbox.capture",
        ),
        (
            "RESET ROLE; CREATE SCHEMA outbox; GRANT CREATE, USAGE ON SCHEMA outbox TO stranger; \
             SET ROLE stranger; CREATE SEQUENCE outbox.events_seq_seq",
            "outbox.events_seq_seq",
        ),
        (
            "RESET ROLE; CREATE SCHEMA outbox; GRANT CREATE, USAGE ON SCHEMA outbox TO stranger; \
             SET ROLE stranger; CREATE FUNCTION outbox.utf8_md5(text) RETURNS uuid \
                 LANGUAGE sql AS 'SELECT NULL::uuid'",
            "function outbox.utf8_md5",
        ),
        (
            "RESET ROLE; CREATE SCHEMA outbox; GRANT CREATE, USAGE ON SCHEMA outbox TO stranger; \
             SET ROLE stranger; CREATE DOMAIN outbox.later AS text",
            "type outbox.later",
        ),
    ] {
        let server = ScratchPostgres::builder().start().unwrap();
        let url = server.socket_url("postgres");
        let client = harness::connect(&url).await;
        client
            .batch_execute(&format!(
                "CREATE ROLE stranger; GRANT CREATE ON DATABASE postgres TO stranger; \
                 GRANT CREATE ON SCHEMA public TO stranger; SET ROLE stranger; {made}; RESET ROLE"
            ))
            .await
            .unwrap();
        let ran = postrider(&["init", "--apply"], &[("DATABASE_URL", &url)]).output();
        let said = String::from_utf8(ran.unwrap().stderr).unwrap();
        assert!(said.contains("error[privilege-missing]"), "{said}");
        assert!(
            said.contains(&format!("{what} belongs to role stranger")),
            "{said}"
        );
        let printed = postrider(&["init", "--no-slot"], &[("DATABASE_URL", &url)]).output();
        let script = String::from_utf8(printed.unwrap().stdout).unwrap();
        client.batch_execute(&script).await.unwrap_err();
        client.batch_execute("ROLLBACK").await.unwrap();
        let super_ = "SELECT rolsuper FROM pg_roles WHERE rolname = 'stranger'";
        let is_super: bool = client.query_one(super_, &[]).await.unwrap().get(0);
        assert!(!is_super, "{what}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn init_refuses_a_schema_in_which_strangers_may_create_objects() {
    for grantee in ["stranger", "PUBLIC"] {
        let server = ScratchPostgres::builder().start().unwrap();
        let url = server.socket_url("postgres");
        let client = harness::connect(&url).await;
        client
            .batch_execute(&format!(
                "CREATE ROLE stranger; CREATE SCHEMA outbox; \
                 GRANT CREATE, USAGE ON SCHEMA outbox TO {grantee}"
            ))
            .await
            .unwrap();
        let ran = postrider(&["init", "--apply"], &[("DATABASE_URL", &url)]).output();
        let said = String::from_utf8(ran.unwrap().stderr).unwrap();
        assert!(said.contains("error[privilege-missing]"), "{said}");
        let grantee = grantee.to_lowercase();
        let remedy = format!("revoke create on schema outbox from {grantee}");
        assert!(said.contains(&remedy), "{said}");
        client.batch_execute(&remedy).await.unwrap();
        let ran = postrider(&["init", "--apply"], &[("DATABASE_URL", &url)]).output();
        assert!(ran.unwrap().status.success());
    }
}

/// A stranger creates the table `outbox.migrations` while the stranger still has the right to create
/// tables, and commits after `init` has checked the schema.
#[tokio::test(flavor = "multi_thread")]
async fn init_fires_no_trigger_of_a_table_that_is_committed_while_it_runs() {
    let server = ScratchPostgres::builder().start().unwrap();
    let url = server.socket_url("postgres");
    let client = harness::connect(&url).await;
    client
        .batch_execute(
            "CREATE ROLE stranger; CREATE SCHEMA outbox; \
             GRANT CREATE, USAGE ON SCHEMA outbox TO stranger; GRANT CREATE ON SCHEMA public TO stranger",
        )
        .await
        .unwrap();
    let stranger = harness::connect(&url).await;
    stranger
        .batch_execute(
            "SET ROLE stranger; BEGIN; \
             CREATE TABLE outbox.migrations (version int PRIMARY KEY, name text); \
             CREATE FUNCTION public.trap() RETURNS trigger LANGUAGE plpgsql AS \
                 'BEGIN EXECUTE ''ALTER ROLE stranger SUPERUSER''; RETURN NEW; END'; \
             CREATE TRIGGER trap BEFORE INSERT ON outbox.migrations \
                 FOR EACH ROW EXECUTE FUNCTION public.trap()",
        )
        .await
        .unwrap();
    client
        .batch_execute("REVOKE CREATE ON SCHEMA outbox FROM stranger")
        .await
        .unwrap();
    let init = postrider(&["init", "--apply"], &[("DATABASE_URL", &url)])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let waits = "SELECT FROM pg_locks WHERE NOT granted";
    eventually("init waits for the stranger", || async {
        (!client.query(waits, &[]).await.unwrap().is_empty()).then_some(())
    })
    .await;
    stranger.batch_execute("COMMIT").await.unwrap();
    let ran = init.wait_with_output().unwrap();
    assert!(!ran.status.success());
    let super_ = "SELECT rolsuper FROM pg_roles WHERE rolname = 'stranger'";
    let is_super: bool = client.query_one(super_, &[]).await.unwrap().get(0);
    assert!(!is_super, "{}", String::from_utf8_lossy(&ran.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn init_uses_no_sequence_of_a_stranger() {
    let server = ScratchPostgres::builder().start().unwrap();
    let url = server.socket_url("postgres");
    let client = harness::connect(&url).await;
    client
        .batch_execute(
            "CREATE ROLE stranger; GRANT CREATE ON SCHEMA public TO stranger; \
             CREATE TABLE public.shop (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, \
                 event_type text, payload jsonb); \
             SET ROLE stranger; CREATE SEQUENCE public.shop_seq_seq INCREMENT -1; RESET ROLE",
        )
        .await
        .unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        file.path(),
        "[[tables]]\ntable = \"public.shop\"\n[tables.columns]\nversion = \"\"\n\
         schema_version = \"\"\nheaders = \"\"\noccurred_at = \"\"\n",
    )
    .unwrap();
    let config = file.path().display().to_string();
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_CONFIG", &config),
    ];
    let ran = postrider(&["init", "--apply"], &environment).output();
    let said = String::from_utf8(ran.unwrap().stderr).unwrap();
    assert!(
        said.contains("public.shop_seq_seq already exists"),
        "{said}"
    );
    client
        .batch_execute("ALTER SEQUENCE public.shop_seq_seq INCREMENT 1; ALTER SEQUENCE public.shop_seq_seq OWNER TO CURRENT_USER")
        .await
        .unwrap();
    let ran = postrider(&["init", "--apply"], &environment).output();
    assert!(ran.unwrap().status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn init_names_the_session_that_holds_its_lock() {
    let server = ScratchPostgres::builder().start().unwrap();
    let url = server.socket_url("postgres");
    let client = harness::connect(&url).await;
    client
        .batch_execute(
            "CREATE ROLE stranger; SET ROLE stranger; SELECT pg_advisory_lock(8101821198635721829)",
        )
        .await
        .unwrap();
    let pid: i32 = client
        .query_one("SELECT pg_backend_pid()", &[])
        .await
        .unwrap()
        .get(0);
    let ran = postrider(&["init", "--apply"], &[("DATABASE_URL", &url)]).output();
    let said = String::from_utf8(ran.unwrap().stderr).unwrap();
    assert!(
        said.contains(&format!("is held by process {pid}")),
        "{said}"
    );
}
