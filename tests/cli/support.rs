//! Gives each test its own database on a shared server, and runs the binary with only the
//! environment variables that the test passes.

use std::process::Stdio;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use scratch_postgres::ScratchPostgres;
use tokio::process::Command;
use tokio_postgres::{Client, NoTls};

/// How long a step may take, even on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The only role that needs a password (SCRAM). The server trusts all other roles.
pub(crate) const LOCKED_ROLE: &str = "locked";
pub(crate) const LOCKED_PASSWORD: &str = "c0rrect-horse";

/// The server that the tests share. A watchdog stops and removes the server when the test process
/// ends.
fn server() -> &'static ScratchPostgres {
    static SERVER: OnceLock<ScratchPostgres> = OnceLock::new();
    SERVER.get_or_init(|| {
        ScratchPostgres::builder()
            .setting("max_replication_slots", "250")
            .setting("max_wal_senders", "120")
            .hba_line(&format!(
                "host all {LOCKED_ROLE} 127.0.0.1/32 scram-sha-256"
            ))
            .start()
            .unwrap()
    })
}

/// The database of one test. The database and its slot have the same name.
pub(crate) struct Database {
    pub(crate) name: String,
    pub(crate) url: String,
    pub(crate) client: Client,
}

impl Database {
    pub(crate) async fn new() -> Self {
        Self::on(server()).await
    }

    /// Creates the database on this server. A test that must not see other slots passes its own
    /// server.
    pub(crate) async fn on(server: &ScratchPostgres) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("cli_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let maintenance = connect(&server.url("postgres")).await;
        execute(&maintenance, &format!("create database {name}")).await;
        let url = server.url(&name);
        Self {
            client: connect(&url).await,
            url,
            name,
        }
    }

    /// Creates the database and runs `postrider init --apply`.
    pub(crate) async fn initialised() -> Self {
        Self::initialised_on(server()).await
    }

    pub(crate) async fn initialised_on(server: &ScratchPostgres) -> Self {
        let database = Self::on(server).await;
        database.run(&["init", "--apply"]).await.assert_status(0);
        database
    }

    /// The URL of the database for another role. `user_info` may contain a password.
    pub(crate) fn url_as(&self, user_info: &str) -> String {
        let (_, rest) = self.url.split_once('@').unwrap();
        format!("postgres://{user_info}@{rest}")
    }

    /// Creates the role that needs a password, unless another test has already created it.
    pub(crate) async fn create_locked_role(&self) {
        let exists = format!(
            "do $$ begin create role {LOCKED_ROLE} login replication password '{LOCKED_PASSWORD}'; \
             exception when duplicate_object or unique_violation then null; end $$"
        );
        self.execute(&exists).await;
    }

    pub(crate) async fn execute(&self, sql: &str) {
        execute(&self.client, sql).await;
    }

    /// Inserts events as a service does.
    pub(crate) async fn emit(&self, events: u32) {
        let emit = "select outbox.emit('order', (i % 7)::text, 'OrderPlaced', '{\"a\": 1}') \
                    from generate_series(1, $1::bigint) i";
        self.client
            .query(emit, &[&i64::from(events)])
            .await
            .unwrap();
    }

    pub(crate) async fn number(&self, sql: &str) -> i64 {
        self.client.query_one(sql, &[]).await.unwrap().get(0)
    }

    pub(crate) async fn text(&self, sql: &str) -> String {
        self.client.query_one(sql, &[]).await.unwrap().get(0)
    }

    /// The variables that every command needs for this database.
    pub(crate) fn env(&self) -> Vec<(&str, &str)> {
        vec![("DATABASE_URL", &self.url), ("POSTRIDER_SLOT", &self.name)]
    }

    pub(crate) async fn run(&self, args: &[&str]) -> Ran {
        self.run_with(args, &[]).await
    }

    /// Like `run`, with the additional variables `env`, which override the variables of `run`.
    pub(crate) async fn run_with(&self, args: &[&str], env: &[(&str, &str)]) -> Ran {
        let env: Vec<(&str, &str)> = self.env().into_iter().chain(env.iter().copied()).collect();
        postrider(args, &env).await
    }
}

pub(crate) async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

pub(crate) async fn execute(client: &Client, sql: &str) {
    client
        .batch_execute(sql)
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

/// The command that runs the binary with `args`, and with only `env` in its environment.
pub(crate) fn command(args: &[&str], env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
    command.args(args).env_clear();
    if args.first() == Some(&"check") {
        // Another process of this machine may use the default port.
        command.env("POSTRIDER_HTTP_ADDR", "off");
    }
    command
        .envs(env.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// Runs the binary until it exits. Panics if this takes longer than `PATIENCE`.
pub(crate) async fn postrider(args: &[&str], env: &[(&str, &str)]) -> Ran {
    let output = tokio::time::timeout(PATIENCE, command(args, env).output());
    let output = output
        .await
        .unwrap_or_else(|_| panic!("{args:?} ran for longer than {PATIENCE:?}"));
    let output = output.unwrap();
    Ran {
        what: args.join(" "),
        status: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct Ran {
    what: String,
    status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    #[track_caller]
    pub(crate) fn assert_status(&self, status: i32) {
        assert_eq!(self.status, Some(status), "{self}");
    }

    /// Checks that the command printed exactly one error message, with this code and a hint. Also
    /// checks that the command exited with this status and shows no sign of a crash.
    #[track_caller]
    pub(crate) fn assert_error(&self, code: &str, status: i32) {
        if let Ok(object) = serde_json::from_str::<serde_json::Value>(&self.stderr) {
            let error = &object["error"];
            assert_eq!(error["code"], code, "{self}");
            assert!(
                error["what"].is_string() && error["hint"].is_string(),
                "{self}"
            );
            return self.assert_status(status);
        }
        let blocks = self.stderr.matches("error[").count();
        assert!(
            self.stderr.contains(&format!("error[{code}]: ")) && blocks == 1,
            "{self}"
        );
        assert!(self.stderr.contains("\n  hint:  "), "{self}");
        assert!(
            self.stderr
                .ends_with(&format!("postrider explain {code}\n")),
            "{self}"
        );
        for crash in ["panicked", "RUST_BACKTRACE", "stack backtrace"] {
            assert!(!self.stderr.contains(crash), "{self}");
        }
        self.assert_status(status);
    }

    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self}"))
    }

    /// Returns the finding with this code from the JSON output of `check` or `init`.
    #[track_caller]
    pub(crate) fn finding(&self, code: &str) -> serde_json::Value {
        let json = self.json();
        let findings = json["findings"].as_array().unwrap();
        let found = findings.iter().find(|finding| finding["code"] == code);
        found
            .unwrap_or_else(|| panic!("no finding {code}: {self}"))
            .clone()
    }
}

impl std::fmt::Display for Ran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            what,
            status,
            stdout,
            stderr,
        } = self;
        write!(
            f,
            "postrider {what}: {status:?}\n{stdout}\n--- stderr\n{stderr}"
        )
    }
}

#[track_caller]
pub(crate) fn assert_contains(text: &str, part: &str) {
    assert!(text.contains(part), "{part:?} is not in:\n{text}");
}
