//! The PostgreSQL server on which one job plays its schedules.
//!
//! The server is created once, and any schedule may stop or crash it. Each schedule gets its own
//! database, publication and slot on the server.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use scratch_postgres::{ScratchPostgres, StopMode};
use tokio_postgres::{Client, NoTls};

use crate::fault::Outage;
use crate::plan::Plan;

/// A second database on the same server. No relay reads from it.
const BYSTANDER: &str = "bystander";

/// The role that prepares the databases and owns everything in them.
const OWNER: &str = "postgres";

/// The role of the relays.
const RELAY: &str = "torture_relay";

/// How long PostgreSQL may take to stop while a relay streams from it (guarantee G6).
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// How long to wait for a server that is starting.
const CONNECT_LIMIT: Duration = Duration::from_secs(60);

const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// The server of one job.
#[derive(Debug)]
pub(crate) struct Ground {
    server: Arc<Mutex<ScratchPostgres>>,
    address: SocketAddr,
    socket: String,
}

impl Ground {
    pub(crate) async fn start() -> Result<Self, String> {
        let started = tokio::task::spawn_blocking(|| {
            ScratchPostgres::builder()
                .setting("max_prepared_transactions", "50")
                .setting("deadlock_timeout", "100ms")
                .setting("max_wal_size", "256MB")
                .start()
        });
        let server = started
            .await
            .map_err(|e| e.to_string())?
            .map_err(|e| e.to_string())?;
        let ground = Self {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, server.port())),
            socket: server.socket_url(""),
            server: Arc::new(Mutex::new(server)),
        };
        let admin = connect(&ground.socket_url("postgres")).await?;
        execute(&admin, &format!("CREATE DATABASE {BYSTANDER}")).await?;
        // The relay's role has only the rights that the documentation tells operators to grant.
        // Roles belong to the whole server, so they are created once, before the first database.
        let roles = format!(
            "CREATE ROLE postrider_writer; CREATE ROLE postrider_relay; \
             CREATE ROLE {RELAY} LOGIN REPLICATION IN ROLE postrider_relay"
        );
        execute(&admin, &roles).await?;
        let bystander = connect(&ground.socket_url(BYSTANDER)).await?;
        execute(&bystander, "CREATE TABLE noise (n int, pad text)").await?;
        Ok(ground)
    }

    /// The server's address, which the relay uses if there is no proxy.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    fn socket_url(&self, database: &str) -> String {
        format!("{}{database}", self.socket)
    }

    /// Creates the database of a schedule, with everything that exists before the first relay starts.
    pub(crate) async fn database(&self, plan: &Plan) -> Result<Database, String> {
        let name = format!("torture_{}", plan.index);
        let admin = connect(&self.socket_url("postgres")).await?;
        let encoding = plan.table.encoding.of_database();
        execute(&admin, &format!("CREATE DATABASE {name}{encoding}")).await?;
        execute(
            &admin,
            &format!(
                "ALTER DATABASE {name} SET logical_decoding_work_mem = '{}kB'",
                plan.workload.decoding_work_mem_kb
            ),
        )
        .await?;
        let database = Database {
            url: self.socket_url(&name),
            owner_url: url(OWNER, self.address, &name),
            relay_url: url(RELAY, self.address, &name),
            bystander_url: self.socket_url(BYSTANDER),
            name,
        };
        database.prepare(plan).await?;
        Ok(database)
    }

    /// Takes the server down, and starts it again after `span`.
    pub(crate) async fn outage(&self, outage: Outage, span: Duration) -> Result<(), String> {
        let server = self.server.clone();
        let done = tokio::task::spawn_blocking(move || {
            let mut server = server.lock().unwrap_or_else(PoisonError::into_inner);
            match outage {
                Outage::Fast => server.stop(StopMode::Fast, STOP_LIMIT)?,
                Outage::Immediate => server.stop(StopMode::Immediate, STOP_LIMIT)?,
                Outage::Kill9 => server.kill_9()?,
            }
            std::thread::sleep(span);
            server.start_again()
        });
        done.await
            .map_err(|e| e.to_string())?
            .map_err(|e| e.to_string())
    }

    /// Drops the database and the slots of a schedule.
    pub(crate) async fn clear(&self, database: &Database) -> Result<(), String> {
        let name = &database.name;
        let own = connect(&database.url).await?;
        roll_prepared_back(&own).await?;
        drop(own);
        let admin = connect(&self.socket_url("postgres")).await?;
        for sql in [
            format!(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
                 WHERE database = '{name}' AND active"
            ),
            format!(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
                 WHERE database = '{name}'"
            ),
            format!("DROP DATABASE {name} WITH (FORCE)"),
        ] {
            // Retry, because a terminated walsender takes a moment to end.
            let deadline = Instant::now() + CONNECT_LIMIT;
            while let Err(error) = execute(&admin, &sql).await {
                if Instant::now() > deadline {
                    return Err(error);
                }
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
        Ok(())
    }

    /// Returns the last lines of the server's log.
    pub(crate) fn log_tail(&self, lines: usize) -> String {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let log = server.log().unwrap_or_else(|e| e.to_string());
        let all: Vec<&str> = log.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

/// The database of one schedule. Its name is also the name of the slot.
#[derive(Debug, Clone)]
pub(crate) struct Database {
    pub(crate) name: String,
    /// The URL for the harness, over the Unix socket.
    pub(crate) url: String,
    /// The URL for preparing the database, over TCP.
    pub(crate) owner_url: String,
    /// The URL for the relay, over TCP.
    pub(crate) relay_url: String,
    pub(crate) bystander_url: String,
}

impl Database {
    pub(crate) async fn connect(&self) -> Result<Client, String> {
        connect(&self.url).await
    }

    /// The URL of this database for a relay that connects to another address, such as a proxy.
    pub(crate) fn url_at(&self, address: SocketAddr) -> String {
        url(RELAY, address, &self.name)
    }
}

fn url(role: &str, address: SocketAddr, database: &str) -> String {
    format!("postgres://{role}@{address}/{database}")
}

/// Connects. Retries for up to `CONNECT_LIMIT`, because the server may still be starting.
pub(crate) async fn connect(url: &str) -> Result<Client, String> {
    let deadline = Instant::now() + CONNECT_LIMIT;
    loop {
        match tokio_postgres::connect(url, NoTls).await {
            Ok((client, connection)) => {
                // Nothing has to wait for the task: it ends when the client is dropped or the connection
                // breaks. If the connection breaks, the client's next statement fails.
                tokio::spawn(connection);
                return Ok(client);
            }
            Err(error) if Instant::now() > deadline => return Err(format!("{error:?}")),
            Err(_) => tokio::time::sleep(RETRY_PAUSE).await,
        }
    }
}

pub(crate) async fn execute(client: &Client, sql: &str) -> Result<(), String> {
    client
        .batch_execute(sql)
        .await
        .map_err(|e| format!("{sql}: {e:?}"))
}

/// Rolls back the prepared transactions that their writers neither committed nor rolled back.
pub(crate) async fn roll_prepared_back(client: &Client) -> Result<(), String> {
    let rows = client
        .query(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()",
            &[],
        )
        .await
        .map_err(|e| format!("{e:?}"))?;
    for row in rows {
        let gid: String = row.get(0);
        execute(client, &format!("ROLLBACK PREPARED '{gid}'")).await?;
    }
    Ok(())
}
