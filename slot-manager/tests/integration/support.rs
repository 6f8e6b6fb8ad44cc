//! Servers, databases and a reader for the tests.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use scratch_postgres::{Builder, ScratchPostgres};
use slot_manager::SlotName;
use tokio_postgres::{Client, NoTls};

/// How long any step may take, even on a machine under load.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn builder() -> Builder {
    ScratchPostgres::builder()
        .setting("wal_level", "logical")
        .setting("max_replication_slots", "50")
        .setting("max_prepared_transactions", "5")
}

/// The server for all tests that do not disturb each other. A static is never dropped, so the
/// server's watchdog stops and removes the server when the test process has ended.
pub(crate) fn shared_server() -> &'static ScratchPostgres {
    static SERVER: OnceLock<ScratchPostgres> = OnceLock::new();
    SERVER.get_or_init(|| builder().start().expect("start the shared server"))
}

pub(crate) async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connect");
    tokio::spawn(connection);
    client
}

pub(crate) async fn superuser(server: &ScratchPostgres) -> Client {
    connect(&server.url("postgres")).await
}

/// Creates a database on the shared server. Returns the database's name, which is also a valid slot
/// name, and a connection to it.
pub(crate) async fn new_database() -> (String, Client) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("test_{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let server = shared_server();
    let maintenance = superuser(server).await;
    run(&maintenance, &format!("create database {name}")).await;
    let client = connect(&server.url(&name)).await;
    (name, client)
}

pub(crate) fn slot_name(text: &str) -> SlotName {
    text.parse().expect("a slot name")
}

pub(crate) async fn run(client: &Client, sql: &str) {
    client
        .batch_execute(sql)
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

pub(crate) async fn major(client: &Client) -> u32 {
    slot_manager::cluster::inspect(client)
        .await
        .expect("inspect")
        .major_version()
}

/// Prints that a test skipped the check of `claim`, and why.
pub(crate) fn skipped(claim: &str, reason: &str) {
    eprintln!("SKIPPED {claim}: {reason}");
}

/// Repeats `look` until it returns a value, for at most [`PATIENCE`].
pub(crate) async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A replication client that reads from a slot and confirms nothing. Dropping it closes the connection.
pub(crate) struct Reader {
    stream: TcpStream,
}

impl Reader {
    /// Starts to read from the slot. Returns once the server streams.
    pub(crate) fn start(server: &ScratchPostgres, database: &str, slot: &str) -> Self {
        let stream = TcpStream::connect((server.host(), server.port())).expect("connect");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        let mut reader = Self { stream };
        let startup = format!(
            "\0\x03\0\0user\0postgres\0database\0{database}\0replication\0database\0\
             application_name\0postrider reader of {slot}\0\0"
        );
        reader.send(None, startup.as_bytes());
        reader.wait_for(b'Z');
        let command = format!(
            "START_REPLICATION SLOT {slot} LOGICAL 0/0 \
             (proto_version '1', publication_names 'none')\0"
        );
        reader.send(Some(b'Q'), command.as_bytes());
        reader.wait_for(b'W');
        reader
    }

    fn send(&mut self, kind: Option<u8>, body: &[u8]) {
        let length = u32::try_from(body.len() + 4).expect("short").to_be_bytes();
        let message: Vec<u8> = kind
            .into_iter()
            .chain(length)
            .chain(body.iter().copied())
            .collect();
        self.stream.write_all(&message).expect("write");
    }

    fn wait_for(&mut self, wanted: u8) {
        loop {
            let mut head = [0; 5];
            self.stream.read_exact(&mut head).expect("read");
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
            let mut body = vec![0; length as usize - 4];
            self.stream.read_exact(&mut body).expect("read");
            assert_ne!(head[0], b'E', "{}", String::from_utf8_lossy(&body));
            if head[0] == wanted {
                return;
            }
        }
    }
}
