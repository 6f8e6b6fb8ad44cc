//! The environment in which the tests follow a page: a PostgreSQL server, a Pub/Sub emulator, a working
//! folder, and a shell with the environment variables that a reader of the page would have set.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pubsub_emulator::{Emulator, RunningEmulator};
use scratch_postgres::ScratchPostgres;
use tempfile::TempDir;
use tokio_postgres::{Client, NoTls};

/// How long each wait may take. It is long because several suites may share the machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Playground {
    pub(crate) server: ScratchPostgres,
    pub(crate) client: Client,
    pub(crate) emulator: RunningEmulator,
    pub(crate) folder: TempDir,
}

/// A relay in the background. It is killed when dropped.
pub(crate) struct Relay {
    child: Child,
    log: Arc<Mutex<String>>,
}

pub(crate) fn server() -> ScratchPostgres {
    let server = ScratchPostgres::builder().setting("wal_level", "logical");
    server.start().expect("a server")
}

pub(crate) async fn connect(server: &ScratchPostgres) -> Client {
    connect_to(&server.url("postgres")).await
}

pub(crate) async fn connect_to(url: &str) -> Client {
    let connected = tokio_postgres::connect(url, NoTls).await;
    let (client, connection) = connected.expect("a session");
    tokio::spawn(connection);
    client
}

impl Playground {
    pub(crate) async fn open() -> Self {
        let emulator = Emulator::builder().listen("127.0.0.1:0".parse().expect("an address"));
        let emulator = emulator.start().await.expect("an emulator");
        let server = server();
        Self {
            client: connect(&server).await,
            server,
            emulator,
            folder: tempfile::tempdir().expect("a folder"),
        }
    }

    fn command(&self, script: &str) -> Command {
        let program = std::path::Path::new(env!("CARGO_BIN_EXE_postrider"));
        let ours = [program.parent().expect("a folder"), self.server.programs()];
        let path = std::env::var_os("PATH").unwrap_or_default();
        let ours = ours.iter().map(|folder| folder.to_path_buf());
        let path = std::env::join_paths(ours.chain(std::env::split_paths(&path)));
        let mut command = Command::new("sh");
        command
            .args(["-ec", script])
            .current_dir(self.folder.path())
            .env("PATH", path.expect("a path"))
            .env("DATABASE_URL", self.server.url("postgres"))
            .env("PUBSUB_EMULATOR_HOST", self.emulator.addr().to_string())
            .env("PUBSUB_PROJECT_ID", "demo")
            .env("POSTRIDER_CREATE_TOPICS", "true")
            .env("POSTRIDER_HTTP_ADDR", "off")
            .stdin(Stdio::null());
        command
    }

    /// Runs a script until it exits. Returns the output even if the script fails.
    pub(crate) fn try_shell(&self, script: &str, environment: &[(&str, &str)]) -> Output {
        let mut command = self.command(script);
        command.envs(environment.iter().copied());
        command.output().expect("a shell")
    }

    /// Runs a script, which must succeed, and returns what it prints.
    pub(crate) fn shell(&self, script: &str) -> String {
        let output = self.try_shell(script, &[]);
        assert!(output.status.success(), "{script}: {output:#?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Starts a relay with a command from a page, such as `postrider run`.
    pub(crate) fn relay(&self, command: &str) -> Relay {
        self.relay_from(&format!("exec {command}"))
    }

    /// Starts a relay with a script whose last command is `exec postrider run`.
    pub(crate) fn relay_from(&self, script: &str) -> Relay {
        let mut child = self
            .command(script)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the relay starts");
        let lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let log = Arc::new(Mutex::new(String::new()));
        let sink = log.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let mut log = sink.lock().expect("the log");
                log.push_str(&line);
                log.push('\n');
            }
        });
        Relay { child, log }
    }

    /// Waits until this query returns the number.
    pub(crate) async fn wait_for(&self, query: &str, number: i64) {
        let began = Instant::now();
        loop {
            let row = self.client.query_one(query, &[]).await.expect("a number");
            let found: i64 = row.get(0);
            if found == number {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{query}: {found}, not {number}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until this number of events is published.
    pub(crate) async fn wait_until_published(&self, events: i64) {
        let query = "SELECT count(*) FROM outbox.dispatch WHERE state = 'published'";
        self.wait_for(query, events).await;
    }

    /// How many messages the emulator has stored.
    pub(crate) fn stored(&self) -> u64 {
        self.emulator.journal().counts().stored_messages
    }
}

impl Relay {
    pub(crate) async fn wait_for_log(&self, text: &str) {
        let began = Instant::now();
        while !self.log.lock().expect("the log").contains(text) {
            let log = self.log.lock().expect("the log").clone();
            assert!(began.elapsed() < PATIENCE, "no {text:?} in the log:\n{log}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn kill_9(mut self) {
        self.end();
    }

    /// Stops the relay with SIGTERM, and waits until it has ended.
    pub(crate) fn stop(mut self) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(sent.is_ok_and(|status| status.success()), "the relay runs");
        let status = self.child.wait().expect("the relay ends");
        assert!(status.success(), "{status}");
    }

    fn end(&mut self) {
        // Ignore the results, because both calls fail only if the relay has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.end();
    }
}
