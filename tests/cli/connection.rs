//! Tests how a command finds its server if the connection string names several servers, has the form
//! `name=value name=value`, or names a service.

use crate::support::{Database, LOCKED_PASSWORD, LOCKED_ROLE, Ran, assert_contains};

/// Host and port of the shared server.
fn address(database: &Database) -> &str {
    let (_, rest) = database.url.split_once('@').unwrap();
    rest.split_once('/').unwrap().0
}

async fn check(database: &Database, env: &[(&str, &str)]) -> Ran {
    let emulator = [
        ("PUBSUB_EMULATOR_HOST", "127.0.0.1:1"),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    let env = [&emulator[..], env].concat();
    database.run_with(&["check", "--json"], &env).await
}

#[tokio::test]
async fn check_names_the_server_that_it_reached() {
    let database = Database::initialised().await;
    let (address, name) = (address(&database), &database.name);
    let (host, port) = address.split_once(':').unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let service = format!("[shop]\nhost=127.0.0.1,{host}\nport=1,{port}\ndbname={name}\n");
    std::fs::write(file.path(), service).unwrap();
    let path = file.path().to_str().unwrap();
    let url = format!("postgres://postgres@127.0.0.1:1,{address}/{name}");
    let pairs = format!("host=127.0.0.1,{host} port=1,{port} dbname='{name}' user=postgres");
    for env in [
        &[("DATABASE_URL", url.as_str())][..],
        &[("DATABASE_URL", &pairs)],
        &[
            ("DATABASE_URL", "service=shop user=postgres"),
            ("PGSERVICEFILE", path),
        ],
        &[
            ("DATABASE_URL", ""),
            ("PGSERVICE", "shop"),
            ("PGUSER", "postgres"),
            ("PGSERVICEFILE", path),
        ],
    ] {
        let ran = check(&database, env).await;
        let reached = format!("connected to postgres@{address}/{name}");
        assert_contains(&ran.finding("connection")["what"].to_string(), &reached);
        assert_eq!(
            ran.finding("replication-session")["severity"],
            "ok",
            "{ran}"
        );
    }
}

#[tokio::test]
async fn if_no_server_can_be_reached_each_one_is_named_with_its_reason() {
    let database = Database::new().await;
    let url = "postgres://u@127.0.0.1:1,127.0.0.1:2/shop";
    let ran = check(&database, &[("DATABASE_URL", url)]).await;
    let what = ran.finding("postgres-unreachable")["what"].to_string();
    for port in [1, 2] {
        let reason = format!("u@127.0.0.1:{port}/shop: Connection refused");
        assert_contains(&what, &reason);
    }
}

#[tokio::test]
async fn a_refused_login_does_not_try_the_next_server() {
    let database = Database::new().await;
    database.create_locked_role().await;
    let address = address(&database);
    let url = |password: &str| {
        format!("postgres://{LOCKED_ROLE}:{password}@{address},127.0.0.1:2/postgres")
    };
    let ran = check(&database, &[("DATABASE_URL", &url("wr0ng"))]).await;
    let what = ran.finding("postgres-authentication")["what"].to_string();
    assert_contains(&what, address);
    assert!(
        !what.contains("127.0.0.1:2/") && !what.contains("wr0ng"),
        "{what}"
    );
    let ran = check(&database, &[("DATABASE_URL", &url(LOCKED_PASSWORD))]).await;
    assert_contains(&ran.finding("connection")["what"].to_string(), address);
}

/// The hint of a refused login names the place where the password comes from.
#[tokio::test]
async fn a_refused_login_says_where_the_password_came_from() {
    let database = Database::new().await;
    database.create_locked_role().await;
    let url = format!("postgres://{LOCKED_ROLE}@{}/postgres", address(&database));
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    let home = tempfile::tempdir().unwrap();
    let default = home.path().join(".pgpass");
    std::fs::write(&default, "elsewhere:*:*:*:wr0ng\n").unwrap();
    let own = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&default, own).unwrap();
    for (text, variable, value, hint) in [
        (
            "elsewhere:*:*:*:wr0ng\n",
            "PGPASSFILE",
            path,
            format!("no line of the password file {path} matches {LOCKED_ROLE}@"),
        ),
        (
            "*:*:*:*:wr0ng\n",
            "PGPASSFILE",
            path,
            format!("the password comes from the password file {path}"),
        ),
        (
            "",
            "HOME",
            home.path().to_str().unwrap(),
            format!("no line of the password file {} matches", default.display()),
        ),
        (
            "",
            "POSTRIDER_PASSWORD_COMMAND",
            "echo wr0ng",
            format!("password_command prints the present password of role {LOCKED_ROLE}"),
        ),
        (
            "",
            "PGAPPNAME",
            "x",
            "set the password, if the server wants one".to_owned(),
        ),
        (
            "",
            "PGPASSWORD",
            "wr0ng",
            "check the user and password in DATABASE_URL".to_owned(),
        ),
    ] {
        std::fs::write(file.path(), text).unwrap();
        let env = [("DATABASE_URL", url.as_str()), (variable, value)];
        let ran = database.run_with(&["status"], &env).await;
        ran.assert_error("postgres-authentication", 3);
        assert_contains(&ran.stderr.replace("\n         ", " "), &hint);
        assert!(!ran.stderr.contains("wr0ng"), "{ran}");
    }
}
