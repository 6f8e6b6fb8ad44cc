//! A database with an outbox, a table of orders and the role of a service, as examples/producers/README.md
//! describes it.

use std::io::Write;
use std::process::{Command, Stdio};

use scratch_postgres::ScratchPostgres;
use tokio_postgres::{Client, NoTls};

use crate::page;

/// Name of an order whose event PostgreSQL refuses.
pub(crate) const REFUSED: &str = "order-refused";

/// Counts for one order: rows of the order, its events, and pairs of an order row and an event from the
/// same transaction.
#[derive(Debug, PartialEq)]
pub(crate) struct Counts {
    orders: i64,
    events: i64,
    pairs: i64,
}

impl Counts {
    pub(crate) const BOTH: Self = Self {
        orders: 1,
        events: 1,
        pairs: 1,
    };
    pub(crate) const NEITHER: Self = Self {
        orders: 0,
        events: 0,
        pairs: 0,
    };
}

pub(crate) struct Shop {
    server: ScratchPostgres,
    pub(crate) superuser: Client,
}

impl Shop {
    pub(crate) async fn open() -> Self {
        let server = ScratchPostgres::builder().setting("wal_level", "logical");
        let server = server.start().expect("a server");
        let url = server.url("postgres");
        let init = Command::new(env!("CARGO_BIN_EXE_postrider"))
            .args(["init", "--apply"])
            .env("DATABASE_URL", &url)
            .stdin(Stdio::null())
            .output()
            .expect("init starts");
        assert!(init.status.success(), "{init:?}");
        let connected = tokio_postgres::connect(&url, NoTls).await;
        let (superuser, connection) = connected.expect("a session");
        tokio::spawn(connection);
        let setup = std::fs::read_to_string(page::examples().join("setup.sql"));
        let refuse = format!("ALTER TABLE outbox.events ADD CHECK (aggregateid <> '{REFUSED}')");
        for sql in [&setup.expect("setup.sql"), &refuse] {
            superuser
                .batch_execute(sql)
                .await
                .expect("the shop can be set up");
        }
        Self { server, superuser }
    }

    pub(crate) fn service_url(&self) -> String {
        let port = self.server.port();
        format!(
            "postgres://shop_service:secret@{}:{port}/postgres",
            self.server.host()
        )
    }

    pub(crate) fn service_jdbc_url(&self) -> String {
        let (host, port) = (self.server.host(), self.server.port());
        format!("jdbc:postgresql://{host}:{port}/postgres?user=shop_service&password=secret")
    }

    /// Runs a script with psql as the service's role. Returns the only row that the script prints, or
    /// psql's error.
    pub(crate) fn psql(&self, script: &str, order: &str) -> Result<String, String> {
        let with_server = self.server.programs().join("psql");
        let psql = if with_server.is_file() {
            with_server
        } else {
            "psql".into()
        };
        let mut child = Command::new(psql)
            .args([
                "--no-psqlrc",
                "--quiet",
                "--tuples-only",
                "--no-align",
                "--set=ON_ERROR_STOP=1",
            ])
            .arg(format!("--set=order={order}"))
            .arg(self.service_url())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("psql starts");
        let mut input = child.stdin.take().expect("a pipe");
        input
            .write_all(script.as_bytes())
            .expect("psql reads the script");
        drop(input);
        let output = child.wait_with_output().expect("psql ends");
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    pub(crate) async fn counts(&self, order: &str) -> Counts {
        let sql = "SELECT (SELECT count(*) FROM shop.orders WHERE id = $1),
                          (SELECT count(*) FROM outbox.events WHERE aggregateid = $1),
                          (SELECT count(*) FROM shop.orders o, outbox.events e
                           WHERE o.id = $1 AND e.aggregateid = $1 AND o.xmin = e.xmin)";
        let row = self
            .superuser
            .query_one(sql, &[&order])
            .await
            .expect("counts");
        Counts {
            orders: row.get(0),
            events: row.get(1),
            pairs: row.get(2),
        }
    }

    pub(crate) async fn event_ids(&self, order: &str) -> Vec<String> {
        let sql = "SELECT id::text FROM outbox.events WHERE aggregateid = $1";
        let rows = self.superuser.query(sql, &[&order]).await.expect("ids");
        rows.iter().map(|row| row.get(0)).collect()
    }
}
