//! The desk of an operator: a database, Pub/Sub and a relay, with functions that cause an incident and
//! read all views.

use std::time::{Duration, Instant};

use pubsub_emulator::RunningEmulator;
use serde_json::Value;

use super::sight::{CommandView, Expected, Sight};
use crate::harness::{self, Database, Relay, insert_orders, postrider};
use crate::http::{free_addr, get};
use crate::page::ask;

/// Pause between two reads of all views.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The programs that take part in an incident, and the operator's access to their views.
pub(super) struct Desk {
    pub(super) database: Database,
    pub(super) emulator: RunningEmulator,
    /// The relay; `None` while it is down.
    pub(super) relay: Option<Relay>,
    /// The address at which the relay reaches Pub/Sub: the address of the emulator or of a proxy.
    pub(super) pubsub: String,
    /// The URL with which the relay logs in.
    pub(super) relay_url: String,
    /// The address of the relay's HTTP port.
    addr: String,
    /// The logs of the relays that have ended.
    old_log: String,
    /// Whether the relay is stopped by a signal. Its port then takes connections but does not answer.
    is_frozen: bool,
}

impl Desk {
    /// Prepares a desk whose relay streams and has delivered a few events.
    pub(super) async fn new() -> Self {
        Self::on(Database::start().await).await
    }

    pub(super) async fn on(database: Database) -> Self {
        let emulator = harness::emulator().await;
        let pubsub = emulator.addr().to_string();
        let mut desk = Self::prepared(database, emulator, pubsub);
        desk.begin().await;
        desk
    }

    /// Prepares a desk whose relay has not been started.
    pub(super) fn prepared(database: Database, emulator: RunningEmulator, pubsub: String) -> Self {
        Self {
            relay_url: database.url.clone(),
            database,
            emulator,
            relay: None,
            pubsub,
            addr: free_addr(),
            old_log: String::new(),
            is_frozen: false,
        }
    }

    /// Starts the relay, and waits until it has delivered a few events and all views are healthy.
    pub(super) async fn begin(&mut self) {
        self.start();
        insert_orders(&self.database, 10, 5).await;
        self.database.wait_until_recorded().await;
        self.sees(Expected::HEALTHY).await;
    }

    pub(super) fn start(&mut self) {
        let settings = [
            ("POSTRIDER_HTTP_ADDR", self.addr.as_str()),
            ("DATABASE_URL", &self.relay_url),
        ];
        self.relay = Some(Relay::start_with(&self.database, &self.pubsub, &settings));
    }

    pub(super) fn kill(&mut self) {
        if let Some(relay) = self.relay.take() {
            self.old_log += &relay.log();
            relay.kill_9();
        }
    }

    /// Waits until the relay has logged the error `code` and has ended on its own. Returns its exit
    /// status.
    pub(super) async fn ended(&mut self, code: &str) -> Option<i32> {
        let relay = self.relay.take().expect("a relay runs");
        relay.wait_for_error(code).await;
        self.old_log += &relay.log();
        relay.wait().await.code()
    }

    /// Writes 40 events with 8 keys. Most incidents hold up these events.
    pub(super) async fn write_events(&self) {
        insert_orders(&self.database, 40, 8).await;
    }

    /// Reads all views until they have the expected content. Panics after a minute. Some content takes up
    /// to half a minute: the `restart_lsn` of a slot advances only when PostgreSQL writes the running
    /// transactions to the WAL, every 15 seconds, and sometimes only after the second write.
    pub(super) async fn sees(&self, expected: Expected) -> Sight {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let sight = self.read_all_views().await;
            let faults = sight.faults(&expected);
            if faults.is_empty() {
                return sight;
            }
            let report = || format!("{}\n{sight}", faults.join("\n"));
            assert!(Instant::now() < deadline, "{}", report());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until every event is recorded and all views are healthy.
    pub(super) async fn sees_all_delivered(&self) -> Sight {
        self.database.wait_until_recorded().await;
        self.sees(Expected::HEALTHY).await
    }

    /// Like `sees_all_delivered`, and also requires that the relay's log contains each text in
    /// `log`.
    pub(super) async fn sees_all_delivered_and_logs(&self, log: &'static [&'static str]) {
        self.database.wait_until_recorded().await;
        self.sees(Expected::HEALTHY.log(log)).await;
    }

    pub(super) async fn read_all_views(&self) -> Sight {
        let log = self.relay.as_ref().map(Relay::log).unwrap_or_default();
        let mut sight = Sight {
            status: self.command(&["status"]),
            slot: self.command(&["slot", "show"]),
            port: None,
            ready: None,
            page: None,
            metrics: None,
            log: format!("{}\n{log}", self.old_log),
        };
        if !self.is_frozen {
            let port = get(&self.addr, "/status").await;
            sight.port = port.and_then(|(_, body)| serde_json::from_str(&body).ok());
            sight.ready = get(&self.addr, "/readyz").await;
            sight.page = Self::page(&self.addr).await;
            sight.metrics = get(&self.addr, "/metrics").await.map(|(_, body)| body);
        }
        sight
    }

    /// Stops the process of the relay with SIGSTOP.
    pub(super) fn freeze(&mut self) {
        self.relay.as_ref().expect("a relay runs").signal("STOP");
        self.is_frozen = true;
    }

    /// Lets the process of the relay continue.
    pub(super) fn thaw(&mut self) {
        self.relay.as_ref().expect("a relay runs").signal("CONT");
        self.is_frozen = false;
    }

    /// The state that `slot show` prints.
    pub(super) fn state_of_slot(&self) -> String {
        let shown = self.run(&["slot", "show", "--json"]);
        let json: Value = serde_json::from_slice(&shown.stdout).unwrap_or_default();
        json["state"].as_str().unwrap_or_default().to_owned()
    }

    /// The output of `postrider check`.
    pub(super) fn check(&self) -> String {
        String::from_utf8_lossy(&self.run(&["check"]).stdout).into_owned()
    }

    /// The state that the page of the relay at `addr` shows. `None` if the port does not answer.
    pub(super) async fn page(addr: &str) -> Option<Value> {
        get(addr, "/livez").await?;
        let (_, answer) = ask(addr, "/overview", "Host: localhost\r\n").await;
        let (_, body) = answer.split_once("\r\n\r\n")?;
        let overview: Value = serde_json::from_str(body).ok()?;
        Some(overview["relay"].clone())
    }

    fn command(&self, arguments: &[&str]) -> CommandView {
        let ran = self.run(arguments);
        let (out, err) = (&ran.stdout, &ran.stderr);
        let json = self.run(&[arguments, &["--json"]].concat());
        CommandView {
            exit: ran.status.code(),
            screen: String::from_utf8_lossy(&[&out[..], err].concat()).into_owned(),
            json: serde_json::from_slice(&json.stdout).unwrap_or(Value::Null),
        }
    }

    /// Runs a command as the operator, with the relay's settings but as the owner of the database.
    /// Commands reach the database, but not the relay.
    pub(super) fn run(&self, arguments: &[&str]) -> std::process::Output {
        let environment = [
            ("DATABASE_URL", self.database.url.as_str()),
            ("PUBSUB_PROJECT_ID", "demo"),
            ("PUBSUB_EMULATOR_HOST", &self.pubsub),
            ("POSTRIDER_SLOT", self.database.slot()),
        ];
        postrider(arguments, &environment).output().unwrap()
    }
}
