//! Tests with a `DATABASE_URL` that names several servers. They check which server the relay uses, at the
//! start and after a failover.

use scratch_postgres::{ScratchPostgres, StopMode};
use tokio::net::TcpListener;
use tokio_postgres::Client;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::load::{Load, wait_for_more};

/// Counts the relay's sessions with one `backend_type`. The caller appends the quoted type.
const SESSIONS: &str = "SELECT count(*) FROM pg_stat_activity \
    WHERE application_name LIKE 'postrider%' AND backend_type = ";

/// A primary server and a hot standby server that streams from it. The standby server has no slot of
/// the relay.
struct Pair {
    database: Database,
    standby: ScratchPostgres,
    on_standby: Client,
}

impl Pair {
    async fn start() -> Self {
        let mut database = Database::private().await;
        let primary = database.server();
        primary.stop(StopMode::Fast, harness::PATIENCE).unwrap();
        let standby = ScratchPostgres::builder().standby_of(primary);
        let standby = standby.start().unwrap();
        primary.start_again().unwrap();
        database.reconnect().await;
        let on_standby = harness::connect(&standby.socket_url("postgres")).await;
        Self {
            database,
            standby,
            on_standby,
        }
    }

    fn ports(&mut self) -> (u16, u16) {
        (self.database.server().port(), self.standby.port())
    }

    /// Stops the primary, which first sends all WAL to the standby server, and promotes the standby
    /// server.
    async fn fail_over(&mut self) {
        let primary = self.database.server();
        primary.stop(StopMode::Fast, harness::PATIENCE).unwrap();
        self.on_standby
            .execute("SELECT pg_promote(true, 30)", &[])
            .await
            .unwrap();
    }
}

async fn sessions(client: &Client, kind: &str) -> i64 {
    let row = client.query_one(&format!("{SESSIONS}'{kind}'"), &[]).await;
    row.unwrap().get(0)
}

/// The server of the relay's last session, according to the relay's log.
fn host_of_last_session(relay: &Relay) -> String {
    let log = relay.log();
    let streaming = log.lines().rfind(|line| line.contains("streaming "));
    let host = streaming
        .and_then(|line| line.split("host=").nth(1))
        .unwrap();
    host.trim_matches('"').to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_host_that_is_down_or_never_answers_is_passed_over() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    let port = database.server().port();
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let hangs = silent.local_addr().unwrap().port();
    let host = emulator.addr().to_string();
    for first in [1, hangs] {
        insert_orders(&database, 20, 3).await;
        let url = format!(
            "postgres://postgres@127.0.0.1:{first},localhost:{port}/postgres?connect_timeout=1"
        );
        let relay = Relay::start_with(&database, &host, &[("DATABASE_URL", &url)]);
        database.wait_until_recorded().await;
        assert_eq!(host_of_last_session(&relay), format!("localhost:{port}"));
        relay.stop().await;
    }
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_is_named_first_serves_no_session() {
    let mut pair = Pair::start().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let (primary, standby) = pair.ports();
    for attrs in [
        "",
        "target_session_attrs=primary",
        "target_session_attrs=read-write",
    ] {
        let text = format!(
            "host=127.0.0.1,127.0.0.1 port={standby},{primary} user=postgres dbname=postgres {attrs}"
        );
        insert_orders(&pair.database, 20, 3).await;
        let relay = Relay::start_with(&pair.database, &host, &[("DATABASE_URL", &text)]);
        pair.database.wait_until_recorded().await;
        assert_eq!(host_of_last_session(&relay), format!("127.0.0.1:{primary}"));
        assert_eq!(sessions(&pair.database.client, "walsender").await, 1);
        assert!(sessions(&pair.database.client, "client backend").await > 0);
        for kind in ["walsender", "client backend"] {
            assert_eq!(sessions(&pair.on_standby, kind).await, 0, "{attrs}: {kind}");
        }
        relay.stop().await;
    }
    let url = format!(
        "postgres://postgres@127.0.0.1:{standby},127.0.0.1:{primary}/postgres?target_session_attrs=any"
    );
    let relay = Relay::start_with(&pair.database, &host, &[("DATABASE_URL", &url)]);
    relay.wait_for_log("code=postgres-standby").await;
    let named = format!("postgres@127.0.0.1:{standby}/postgres is a standby");
    relay.wait_for_log(&named).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_failover_the_relay_goes_to_the_new_primary_by_itself_and_loses_nothing() {
    let mut pair = Pair::start().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let (primary, standby) = pair.ports();
    let url = format!("postgres://postgres@127.0.0.1:{primary},127.0.0.1:{standby}/postgres");
    let relay = Relay::start_with(&pair.database, &host, &[("DATABASE_URL", &url)]);
    relay.wait_for_log("streaming").await;
    assert_eq!(host_of_last_session(&relay), format!("127.0.0.1:{primary}"));
    let load = Load::at(format!("{url}?target_session_attrs=read-write"));
    wait_for_more(&pair.database, 300).await;
    pair.fail_over().await;
    pair.database.client = harness::connect(&pair.standby.socket_url("postgres")).await;
    relay.wait_for_log("recovering").await;
    load.wait_for_rows(300).await;
    load.stop().await;
    pair.database.wait_until_recorded().await;
    pair.database.wait_until_confirmed().await;
    let report = harness::check(&pair.database, &emulator).await;
    let log = relay.log();
    assert!(report.is_clean(), "{report}\n{log}");
    assert!(report.duplicates.len() < 300, "{report}");
    assert!(!log.contains("foreign-cluster"), "{log}");
    assert_eq!(
        sessions(&pair.database.client, "walsender").await,
        1,
        "{log}"
    );
    relay.stop().await;
}

/// All connections of a session must go to the same server. The test starts the old primary again after the
/// failover, so there are two primaries. (The relay cannot prevent this. The failover tool must fence the old
/// primary.)
#[tokio::test(flavor = "multi_thread")]
async fn a_session_stays_on_its_server_when_the_old_primary_comes_back() {
    let mut pair = Pair::start().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let (primary, standby) = pair.ports();
    pair.fail_over().await;
    let url = format!("postgres://postgres@127.0.0.1:{primary},127.0.0.1:{standby}/postgres");
    let relay = Relay::start_with(&pair.database, &host, &[("DATABASE_URL", &url)]);
    let supervisor = "SELECT min(pid)::bigint FROM pg_stat_activity \
                      WHERE application_name LIKE 'postrider supervisor%'";
    let pid_on_new = || async {
        let row = pair.on_standby.query_one(supervisor, &[]).await.unwrap();
        row.get::<_, Option<i64>>(0)
    };
    let before = eventually("the supervisor works on the new primary", pid_on_new).await;
    pair.database.server().start_again().unwrap();
    pair.database.reconnect().await;
    pair.on_standby
        .execute("SELECT pg_terminate_backend($1::bigint::int)", &[&before])
        .await
        .unwrap();
    eventually("the supervisor is back on the new primary", || async {
        pid_on_new().await.filter(|pid| *pid != before)
    })
    .await;
    for kind in ["walsender", "client backend"] {
        assert_eq!(sessions(&pair.database.client, kind).await, 0, "{kind}");
    }
    relay.stop().await;
}
