//! The servers of the demonstration: PostgreSQL, the emulator, the relay.
//!
//! All of them are real: a PostgreSQL server with its own data folder, an emulator that clients
//! reach over gRPC, and `postrider init` and `postrider run` as processes with the documented
//! environment variables. Dropping the [`World`] stops all servers and processes.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use pubsub_emulator::{Emulator, Recording, RunningEmulator};
use scratch_postgres::ScratchPostgres;
use tokio::net::TcpListener;

use crate::error::{Error, Result, failed};
use crate::relay_process::RelayProcess;
use crate::shop::{self, Shop};

pub(crate) const PROJECT: &str = "demo";
pub(crate) const TOPIC: &str = "projects/demo/topics/order.events";
pub(crate) const SUBSCRIPTION: &str = "projects/demo/subscriptions/order.events";

/// The preferred address of the relay's HTTP port. Users can open it in a browser.
const HTTP_ADDR: &str = "127.0.0.1:9464";

/// How long a relay may take to start. A relay usually starts within a second, but can need much longer
/// on a machine under load.
const START_LIMIT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// All servers and processes. The fields are dropped from top to bottom, so the relay stops first.
#[derive(Debug)]
pub(crate) struct World {
    relay: Option<RelayProcess>,
    /// The path of the program `postrider`.
    pub(crate) program: PathBuf,
    pub(crate) emulator: RunningEmulator,
    pub(crate) shop: Shop,
    /// `off`, or the address of the relay's HTTP port, which users can open in a browser.
    pub(crate) http_addr: String,
    server: ScratchPostgres,
}

impl World {
    /// Starts PostgreSQL and the emulator, but not the relay. Calls `say` to announce each step.
    pub(crate) async fn start(
        program: PathBuf,
        with_http: bool,
        say: impl Fn(String) -> Result<()>,
    ) -> Result<Self> {
        let server = tokio::task::spawn_blocking(|| ScratchPostgres::builder().start())
            .await
            .map_err(|panic| failed("PostgreSQL does not start").caused_by(panic))?
            .map_err(server_failed)?;
        say(format!(
            "PostgreSQL {} on port {}, with wal_level = logical",
            server.major_version().map_err(server_failed)?,
            server.port()
        ))?;
        Shop::create(&server.url("postgres")).await?;
        init(&program, &server).await?;
        let shop = Shop::open(&server.url(shop::DATABASE)).await?;
        say("tables, publication, roles and slot, by `postrider init --apply`".into())?;
        let emulator = Emulator::builder()
            .recording(Recording::Counts)
            .start()
            .await
            .map_err(|e| failed("the Pub/Sub emulator does not start").caused_by(e))?;
        emulator
            .create_topic(TOPIC)
            .await
            .map_err(|status| failed("cannot create the topic").caused_by(status))?;
        say(format!(
            "a Pub/Sub emulator on port {}, topic {TOPIC}",
            emulator.addr().port()
        ))?;
        let http_addr = if with_http {
            free_address().await?
        } else {
            "off".into()
        };
        Ok(Self {
            relay: None,
            program,
            emulator,
            shop,
            http_addr,
            server,
        })
    }

    /// Starts a relay and waits until it streams.
    pub(crate) async fn start_relay(&mut self) -> Result<()> {
        let environment = [
            ("DATABASE_URL", self.url(shop::RELAY)),
            ("PUBSUB_EMULATOR_HOST", self.emulator.addr().to_string()),
            ("PUBSUB_PROJECT_ID", PROJECT.into()),
            ("POSTRIDER_HTTP_ADDR", self.http_addr.clone()),
        ];
        self.relay = Some(RelayProcess::start(
            &self.program,
            &environment,
            &self.relay_log(),
        )?);
        let deadline = Instant::now() + START_LIMIT;
        while !self.shop.slot().await?.active {
            self.relay_must_run()?;
            if Instant::now() >= deadline {
                return Err(failed(format!(
                    "the relay is not streaming after {START_LIMIT:?}"
                )));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Sends SIGKILL to the relay.
    pub(crate) async fn kill_relay(&mut self) -> Result<()> {
        match self.relay.take() {
            Some(relay) => relay.kill_9().await,
            None => Ok(()),
        }
    }

    /// The relay's process id, if one is running.
    pub(crate) fn relay_pid(&self) -> Option<u32> {
        self.relay.as_ref().and_then(RelayProcess::pid)
    }

    /// Returns an error if a relay that should be running has ended.
    pub(crate) fn relay_must_run(&mut self) -> Result<()> {
        self.relay.as_mut().map_or(Ok(()), RelayProcess::must_run)
    }

    /// The last lines of the log, to which all relays append.
    pub(crate) fn relay_log_tail(&self, lines: usize) -> Vec<String> {
        let log = std::fs::read(self.relay_log()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let all: Vec<&str> = log.lines().collect();
        all[all.len().saturating_sub(lines)..]
            .iter()
            .map(|&line| line.into())
            .collect()
    }

    /// The database's URL for a role.
    pub(crate) fn url(&self, role: &str) -> String {
        let (host, port) = (self.server.host(), self.server.port());
        format!("postgres://{role}@{host}:{port}/{}", shop::DATABASE)
    }

    /// The relays' log file. It is in the server's folder, so it is removed together with the
    /// server.
    fn relay_log(&self) -> PathBuf {
        self.server.socket_dir().join("relay.log")
    }
}

/// Runs `postrider init --apply` as the superuser.
async fn init(program: &Path, server: &ScratchPostgres) -> Result<()> {
    let output = tokio::process::Command::new(program)
        .args(["init", "--apply", "--relay-user", shop::RELAY])
        .env_clear()
        .env("DATABASE_URL", server.url(shop::DATABASE))
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|e| failed("cannot start `postrider init`").caused_by(e))?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    Err(failed("`postrider init --apply` failed")
        .caused_by(String::from_utf8_lossy(&said).trim().to_owned()))
}

/// Returns the preferred address if its port is free, otherwise an address with any free port.
async fn free_address() -> Result<String> {
    for address in [HTTP_ADDR, "127.0.0.1:0"] {
        if let Ok(listener) = TcpListener::bind(address).await {
            let address = listener.local_addr();
            return Ok(address
                .map_err(|e| failed("no free port").caused_by(e))?
                .to_string());
        }
    }
    Err(failed("no free port on 127.0.0.1"))
}

fn server_failed(error: scratch_postgres::Error) -> Error {
    match error {
        scratch_postgres::Error::NoServerPrograms { .. } | scratch_postgres::Error::NoAccount => {
            failed("no PostgreSQL installation found")
                .caused_by(error)
                .hint(
                    "run `make demo`, which installs it; or apt-get install postgresql; or set \
                 POSTRIDER_PG_BIN to the folder with initdb and postgres",
                )
        }
        error => failed("PostgreSQL does not start").caused_by(error),
    }
}
