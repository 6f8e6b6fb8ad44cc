//! A database with an outbox, on a private or a shared server.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

use pubsub_emulator::checks::{Expected, Stream};
use scratch_postgres::ScratchPostgres;
use tokio_postgres::{Client, NoTls};

use super::{eventually, postrider};

/// A database, prepared by `postrider init --apply`.
pub(crate) struct Database {
    pub(crate) client: Client,
    pub(crate) url: String,
    slot: String,
    home: Home,
}

enum Home {
    /// On a private server, which the test may stop and break.
    Private(Box<ScratchPostgres>),
    /// On the server that `DATABASE_URL` names, together with other databases.
    Shared { _guest: Guest },
}

/// A database and a slot, both named `name`, on a shared server. `Drop` removes them.
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
                    // Retry each statement, because walsenders take a moment to end.
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
    /// Creates a database on the server that `DATABASE_URL` names. The server needs
    /// `wal_level = logical`, and the URL must log in as a superuser. Without the variable, starts a
    /// private server.
    pub(crate) async fn start() -> Self {
        match std::env::var("DATABASE_URL") {
            Ok(url) if !url.is_empty() => Self::on_shared(url).await,
            _ => Self::private().await,
        }
    }

    /// Starts a server that only this test uses.
    pub(crate) async fn private() -> Self {
        let builder = ScratchPostgres::builder().setting("wal_level", "logical");
        Self::on(builder.start().unwrap()).await
    }

    /// Starts a server with the login role `role`, which has the rights of a relay and must log in with
    /// `password`.
    pub(crate) async fn with_password(role: &str, password: &str) -> Self {
        let rule = format!("host all {role} 127.0.0.1/32 scram-sha-256");
        let server = ScratchPostgres::builder().hba_line(&rule).start().unwrap();
        let database = Self::on(server).await;
        let create = format!(
            "CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{password}'; GRANT postrider_relay TO {role}"
        );
        database.execute(&create).await;
        database
    }

    pub(crate) async fn on(server: ScratchPostgres) -> Self {
        Self::on_with(server, &[]).await
    }

    /// Prepares the database `postgres` on `server` with `postrider init --apply` and the additional
    /// settings `more`.
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

    /// The private server. Panics if the database is on a shared server.
    pub(crate) fn server(&mut self) -> &mut ScratchPostgres {
        match &mut self.home {
            Home::Private(server) => server,
            Home::Shared { .. } => panic!("a test that touches the server starts a private one"),
        }
    }

    /// Replaces the private server with `server`, which has the same database.
    pub(crate) async fn move_to(&mut self, server: ScratchPostgres) {
        self.url = server.url("postgres");
        self.home = Home::Private(Box::new(server));
        self.reconnect().await;
    }

    /// Reconnects after the server was restarted.
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

    /// The events of `outbox.events` per topic and key, in the order in which the relay should publish
    /// them. They are sorted by `occurred_at` and `version`. This is their commit order, because tests
    /// write the events of a key from one session at a time.
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

    /// Waits until a relay of this database has completed an audit, now or earlier.
    pub(crate) async fn wait_until_audited(&self) {
        eventually("an audit is complete", || async {
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

    /// Waits until no session uses the slot, and drops the slot.
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

    /// Waits until the slot has confirmed everything written so far.
    pub(crate) async fn wait_until_confirmed(&self) {
        let target = self.current_wal().await;
        eventually("the slot has confirmed everything", || async {
            (self.confirmed().await >= target).then_some(())
        })
        .await;
    }
}

/// Runs `postrider init --apply` with the additional settings `more`.
fn init(url: &str, slot: &str, more: &[(&str, &str)]) {
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
