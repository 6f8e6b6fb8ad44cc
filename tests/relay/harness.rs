//! What every test needs: a server, an emulator, the relay as a process, and patience.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pubsub_emulator::checks::{self, Expected, Report, Stream};
use pubsub_emulator::{Emulator, RunningEmulator};
use scratch_postgres::ScratchPostgres;
use tokio_postgres::{Client, NoTls};

/// How long a condition may take to come true; generous, since machines are shared.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `probe` gives a value.
pub(crate) async fn eventually<T, F: Future<Output = Option<T>>>(
    what: &str,
    mut probe: impl FnMut() -> F,
) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = probe().await {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A database, prepared as `postrider init --apply` does it.
pub(crate) struct Database {
    pub(crate) client: Client,
    pub(crate) url: String,
    slot: String,
    home: Home,
}

/// Where the database lives.
enum Home {
    /// On a server of its own, which the test may stop and break.
    Private(Box<ScratchPostgres>),
    /// On the server that `DATABASE_URL` names, beside others.
    Shared { _guest: Guest },
}

/// Database and slot on somebody's server; both are dropped at the end.
struct Guest {
    server_url: String,
    name: String,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let (url, name) = (self.server_url.clone(), self.name.clone());
        let cleaner = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.unwrap().block_on(async {
                let client = connect(&url).await;
                for sql in [
                    "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
                     WHERE slot_name = 'NAME' AND active",
                    "SELECT pg_drop_replication_slot('NAME')",
                    "DROP DATABASE NAME WITH (FORCE)",
                ] {
                    // Walsenders take a moment to end.
                    eventually("the database is cleaned up", || async {
                        client.batch_execute(&sql.replace("NAME", &name)).await.ok()
                    })
                    .await;
                }
            });
        });
        let _ = cleaner.join();
    }
}

impl Database {
    /// On the server that `DATABASE_URL` names, which needs `wal_level = logical` and a superuser,
    /// or on one of its own.
    pub(crate) async fn start() -> Self {
        match std::env::var("DATABASE_URL") {
            Ok(url) if !url.is_empty() => Self::on_shared(url).await,
            _ => Self::private().await,
        }
    }

    /// On a server that the test has for itself.
    pub(crate) async fn private() -> Self {
        let builder = ScratchPostgres::builder().setting("wal_level", "logical");
        Self::on(builder.start().unwrap()).await
    }

    pub(crate) async fn on(server: ScratchPostgres) -> Self {
        Self::on_with(server, &[]).await
    }

    /// On that server, prepared with more settings than usual.
    pub(crate) async fn on_with(server: ScratchPostgres, more: &[(&str, &str)]) -> Self {
        let socket_url = server.socket_url("postgres");
        init(&socket_url, "postrider", more);
        Self {
            client: connect(&socket_url).await,
            url: server.url("postgres"),
            slot: "postrider".into(),
            home: Home::Private(Box::new(server)),
        }
    }

    async fn on_shared(server_url: String) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("postrider_test_{}_{count}", std::process::id());
        let admin = connect(&server_url).await;
        admin
            .batch_execute(&format!("CREATE DATABASE {name}"))
            .await
            .unwrap();
        let (base, query) = match server_url.split_once('?') {
            Some((base, query)) => (base, format!("?{query}")),
            None => (server_url.as_str(), String::new()),
        };
        let (server, _) = base
            .rsplit_once('/')
            .expect("DATABASE_URL names a database");
        let url = format!("{server}/{name}{query}");
        init(&url, &name, &[]);
        Self {
            client: connect(&url).await,
            url,
            slot: name.clone(),
            home: Home::Shared {
                _guest: Guest { server_url, name },
            },
        }
    }

    /// The private server.
    pub(crate) fn server(&mut self) -> &mut ScratchPostgres {
        match &mut self.home {
            Home::Private(server) => server,
            Home::Shared { .. } => panic!("a test that touches the server starts a private one"),
        }
    }

    /// Connects again after the server was restarted.
    pub(crate) async fn reconnect(&mut self) {
        let url = self.server().socket_url("postgres");
        self.client = connect(&url).await;
    }

    pub(crate) fn slot(&self) -> &str {
        &self.slot
    }

    pub(crate) async fn execute(&self, sql: &str) {
        self.client.batch_execute(sql).await.unwrap();
    }

    pub(crate) async fn text(&self, sql: &str) -> String {
        self.client.query_one(sql, &[]).await.unwrap().get(0)
    }

    pub(crate) async fn number(&self, sql: &str) -> i64 {
        self.client.query_one(sql, &[]).await.unwrap().get(0)
    }

    /// Events of `outbox.events` in commit order per stream, as they should be published. Tests
    /// write the events of a key from one session at a time: then insertion order is commit order.
    pub(crate) async fn expected(&self) -> Expected {
        let rows = self
            .client
            .query(
                "SELECT id::text, aggregatetype, coalesce(aggregateid, '') \
                 FROM outbox.events ORDER BY occurred_at, version",
                &[],
            )
            .await
            .unwrap();
        let mut expected = BTreeMap::new();
        for row in rows {
            let (id, kind, key): (String, String, String) = (row.get(0), row.get(1), row.get(2));
            let stream = Stream::new(format!("projects/demo/topics/{kind}.events"), key);
            expected.entry(stream).or_insert_with(Vec::new).push(id);
        }
        expected
    }

    /// Waits until every event has its dispatch row.
    pub(crate) async fn wait_until_recorded(&self) {
        eventually("every event is recorded", || async {
            let missing = self
                .number(
                    "SELECT count(*) FROM outbox.events e \
                     WHERE NOT EXISTS (SELECT FROM outbox.dispatch d WHERE d.event_id = e.id)",
                )
                .await;
            (missing == 0).then_some(())
        })
        .await;
    }

    /// Waits until the relay has compared everything once.
    pub(crate) async fn wait_until_audited(&self) {
        eventually("the first audit is complete", || async {
            let audited = "SELECT count(*) FROM outbox.relay WHERE audited_at IS NOT NULL";
            (self.number(audited).await == 1).then_some(())
        })
        .await;
    }

    /// The slot's confirmed position as a number.
    pub(crate) async fn confirmed(&self) -> i64 {
        self.number(&format!(
            "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots \
             WHERE slot_name = '{}'",
            self.slot
        ))
        .await
    }

    /// Drops the slot, which nobody reads from any more.
    pub(crate) async fn drop_slot(&self) {
        let sql = format!("SELECT pg_drop_replication_slot('{}')", self.slot);
        eventually("the slot is free and dropped", || async {
            self.client.batch_execute(&sql).await.ok()
        })
        .await;
    }

    pub(crate) async fn current_wal(&self) -> i64 {
        self.number("SELECT (pg_current_wal_lsn() - '0/0')::bigint")
            .await
    }

    /// Waits until the slot has confirmed everything written until now.
    pub(crate) async fn wait_until_confirmed(&self) {
        let target = self.current_wal().await;
        eventually("the slot has confirmed everything", || async {
            (self.confirmed().await >= target).then_some(())
        })
        .await;
    }
}

/// Runs `postrider init --apply`.
pub(crate) fn init(url: &str, slot: &str, more: &[(&str, &str)]) {
    let mut environment = vec![("DATABASE_URL", url), ("POSTRIDER_SLOT", slot)];
    environment.extend(more);
    let done = postrider(&["init", "--apply"], &environment)
        .output()
        .unwrap();
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
}

pub(crate) async fn connect(url: &str) -> Client {
    let (client, connection) = eventually("the server takes connections", || async {
        tokio_postgres::connect(url, NoTls).await.ok()
    })
    .await;
    tokio::spawn(connection);
    client
}

/// Compares the journal with what the table holds.
pub(crate) async fn check(database: &Database, emulator: &RunningEmulator) -> Report {
    checks::check(&emulator.journal().attempts(), &database.expected().await)
}

/// The same, where the stream alone must have brought everything: what the auditor finds in a table,
/// since the stream has left it out, is delivered too, and a loss would not show in the journal.
pub(crate) async fn check_streamed(database: &Database, emulator: &RunningEmulator) -> Report {
    let from_a_table = "SELECT count(*) FROM outbox.dispatch \
                        WHERE mod(commit_lsn - '0/0'::pg_lsn, 8) <> 0";
    assert_eq!(database.number(from_a_table).await, 0, "from a table");
    check(database, emulator).await
}

/// Waits until nothing of killed relays is under way: the server has ended their sessions, whose
/// last statements may still record outcomes, and what they have sent is in the journal.
pub(crate) async fn wait_until_killed_relays_are_gone(
    database: &Database,
    emulator: &RunningEmulator,
) {
    let sessions = "SELECT count(*) FROM pg_stat_activity \
                    WHERE application_name LIKE 'postrider%' AND datname = current_database()";
    eventually("nothing of the killed relays is left", || async {
        (database.number(sessions).await == 0).then_some(())
    })
    .await;
    eventually("the journal has been quiet for a while", || async {
        let attempts = || emulator.journal().counts().attempts;
        let before = attempts();
        tokio::time::sleep(Duration::from_millis(200)).await;
        (before == attempts()).then_some(())
    })
    .await;
}

/// An emulator with the topic `order.events` of project `demo`.
pub(crate) async fn emulator() -> RunningEmulator {
    let emulator = Emulator::builder()
        .listen("127.0.0.1:0".parse().unwrap())
        .start()
        .await
        .unwrap();
    emulator
        .create_topic("projects/demo/topics/order.events")
        .await
        .unwrap();
    emulator
}

/// The binary under test with an environment of its own.
pub(crate) fn postrider(arguments: &[&str], environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
    command
        .args(arguments)
        .env_clear()
        .envs(environment.iter().copied());
    command
}

/// A running relay; killed when dropped.
pub(crate) struct Relay {
    child: Child,
    log: Arc<Mutex<Vec<String>>>,
}

impl Relay {
    pub(crate) fn start(database: &Database, emulator: &RunningEmulator) -> Self {
        Self::start_with(database, &emulator.addr().to_string(), &[])
    }

    pub(crate) fn start_with(database: &Database, emulator: &str, more: &[(&str, &str)]) -> Self {
        let mut environment = vec![
            ("DATABASE_URL", database.url.as_str()),
            ("PUBSUB_EMULATOR_HOST", emulator),
            ("PUBSUB_PROJECT_ID", "demo"),
            ("POSTRIDER_HTTP_ADDR", "off"),
            ("POSTRIDER_SLOT", database.slot.as_str()),
        ];
        environment.extend(more);
        let mut child = postrider(&["run"], &environment)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let sink = log.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                sink.lock().unwrap().push(line);
            }
        });
        Self { child, log }
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    /// Whether one of its sessions found its slot lost: what was on its way then comes again.
    pub(crate) fn has_lost_its_slot(&self) -> bool {
        self.log().contains("code=lease-lost")
    }

    pub(crate) async fn wait_for_log(&self, text: &str) {
        eventually(
            &format!("the log says {text:?}; it says\n{}", self.log()),
            || async { self.log().contains(text).then_some(()) },
        )
        .await;
    }

    /// Waits until it has told an error to its last line.
    pub(crate) async fn wait_for_error(&self, code: &str) {
        self.wait_for_log(&format!("error[{code}]")).await;
        self.wait_for_log(&format!("postrider explain {code}"))
            .await;
    }

    /// Before it has a handler for SIGTERM the system ends the process, which has touched nothing.
    pub(crate) async fn wait_until_it_takes_sigterm(&self) {
        const SIGTERM: u32 = 15;
        let path = format!("/proc/{}/status", self.child.id());
        eventually("the relay takes SIGTERM itself", || async {
            let status = std::fs::read_to_string(&path).unwrap();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
            let caught = u64::from_str_radix(caught.unwrap().trim(), 16).unwrap();
            (caught & 1 << (SIGTERM - 1) != 0).then_some(())
        })
        .await;
    }

    /// The most memory that the process has had, KiB.
    pub(crate) fn peak_rss_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = peak.unwrap().trim().strip_suffix(" kB").unwrap();
        kib.parse().unwrap()
    }

    /// File descriptors that the process has open.
    pub(crate) fn open_files(&self) -> usize {
        let folder = format!("/proc/{}/fd", self.child.id());
        std::fs::read_dir(folder).unwrap().count()
    }

    pub(crate) fn kill_9(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM.
    pub(crate) fn terminate(&self) {
        self.signal("TERM");
    }

    /// Sends a signal by its name.
    pub(crate) fn signal(&self, name: &str) {
        let (option, pid) = (format!("-{name}"), self.child.id().to_string());
        let sent = Command::new("kill").args([option, pid]).status();
        assert!(sent.unwrap().success());
    }

    /// Sends SIGTERM and waits for the end, which must be a success.
    pub(crate) async fn stop(self) {
        self.wait_until_it_takes_sigterm().await;
        self.terminate();
        let log = self.log.clone();
        let status = self.wait().await;
        assert!(
            status.success(),
            "{status}:\n{}",
            log.lock().unwrap().join("\n")
        );
    }

    /// Waits until the process ends by itself.
    pub(crate) async fn wait(mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "the relay did not end:\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("a relay of the failed test said:\n{}\n", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Inserts `count` events in transactions of one row each, spread over `keys` keys.
pub(crate) async fn insert_orders(database: &Database, count: u32, keys: u32) {
    database.execute(&insert_orders_sql(count, keys)).await;
}

/// The statement that does so.
pub(crate) fn insert_orders_sql(count: u32, keys: u32) -> String {
    format!(
        "DO $$ BEGIN FOR i IN 1..{count} LOOP \
         INSERT INTO outbox.events \
             (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
         VALUES ('order', 'o-' || (i % {keys}), 'OrderPlaced', i, \
                 jsonb_build_object('n', i), clock_timestamp()); \
         COMMIT; END LOOP; END $$"
    )
}

/// A gRPC connection to an emulator at `host:port`.
pub(crate) async fn channel(host: &str) -> tonic::transport::Channel {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{host}")).unwrap();
    eventually("the emulator takes connections", || async {
        endpoint.connect().await.ok()
    })
    .await
}
