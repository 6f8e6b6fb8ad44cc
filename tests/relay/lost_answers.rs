//! Tests in which the connection that writes the dispatch rows breaks at the worst moments: in the middle
//! of a COPY, and between COMMIT and its answer.
//!
//! A trigger makes the writer's backend wait at one of these moments. Then the test breaks the TCP
//! connection of this session only.

use fault_proxy::{Cut, FaultProxy};
use pubsub_emulator::RunningEmulator;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::load::proxied;

/// Key of the advisory lock that the test holds and the trigger waits for.
pub(crate) const LOCK: i64 = 4_711;

/// A trigger function that waits for the lock. Before that, it gives the transaction an id, so that the
/// test can identify the transaction even if the transaction has written nothing yet.
pub(crate) const TRIGGER: &str = "\
    CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS $$ \
    BEGIN \
        PERFORM pg_current_xact_id(); \
        PERFORM pg_advisory_xact_lock_shared(4711); \
        RETURN new; \
    END $$; ";

/// Makes the writer wait at a row in the middle of a COPY.
const IN_COPY: &str = "\
    CREATE TRIGGER hold_up BEFORE INSERT ON outbox.dispatch FOR EACH ROW \
        WHEN (new.ordering_key = 'o-3') EXECUTE FUNCTION hold_up()";

/// Makes the writer wait at COMMIT: a deferred trigger fires when COMMIT arrives.
pub(crate) const AT_COMMIT: &str = "\
    CREATE CONSTRAINT TRIGGER hold_up AFTER INSERT ON outbox.dispatch \
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION hold_up()";

/// Finds the writer's session while it waits in the trigger.
pub(crate) const HELD_UP: &str = "\
    SELECT client_port, backend_xid::text FROM pg_stat_activity \
    WHERE datname = current_database() \
      AND application_name LIKE 'postrider dispatch%' AND wait_event_type = 'Lock' \
      AND wait_event = 'advisory'";

/// A session of the writer with an open transaction.
struct HeldUp {
    /// The port of the client's end of the connection.
    port: u16,
    xid: String,
}

struct World {
    database: Database,
    emulator: RunningEmulator,
    proxy: FaultProxy,
    relay: Relay,
}

impl World {
    /// Starts a relay, inserts 50 events, and waits until the relay's writer waits in `trigger`.
    async fn start(trigger: &str) -> (Self, HeldUp) {
        let database = Database::start().await;
        let emulator = harness::emulator().await;
        let (proxy, url) = proxied(&database).await;
        let host = emulator.addr().to_string();
        let relay = Relay::start_with(&database, &host, &[("DATABASE_URL", &url)]);
        relay.wait_for_log("streaming").await;
        database.execute(&format!("{TRIGGER}{trigger}")).await;
        database
            .execute(&format!("SELECT pg_advisory_lock({LOCK})"))
            .await;
        insert_orders(&database, 50, 5).await;
        let committed = database.current_wal().await;
        let held_up = eventually("the writer waits in the trigger", || async {
            let row = database.client.query_opt(HELD_UP, &[]).await.unwrap()?;
            let port = u16::try_from(row.get::<_, i32>(0)).unwrap();
            Some(HeldUp {
                port,
                xid: row.get(1),
            })
        })
        .await;
        assert!(database.confirmed().await < committed, "{}", relay.log());
        let world = Self {
            database,
            emulator,
            proxy,
            relay,
        };
        (world, held_up)
    }

    /// Breaks the writer's connection, and then lets the writer's backend continue.
    async fn cut(&self, held_up: &HeldUp) {
        self.proxy.cut_one(held_up.port, Cut::Reset);
        self.relay
            .wait_for_log("cannot write outbox.dispatch, retrying")
            .await;
        self.database
            .execute(&format!("SELECT pg_advisory_unlock({LOCK})"))
            .await;
    }

    /// The number of committed dispatch rows of the transaction that waited in the trigger. Zero if PostgreSQL has
    /// rolled this transaction back.
    async fn records_of(&self, held_up: &HeldUp) -> i64 {
        let xid = &held_up.xid;
        let count = format!("SELECT count(*) FROM outbox.dispatch WHERE xmin::text = '{xid}'");
        self.database.number(&count).await
    }

    /// Checks that every event was published once, recorded and confirmed, and that the relay kept its
    /// replication session.
    async fn is_well(&self) {
        self.database.wait_until_recorded().await;
        insert_orders(&self.database, 50, 5).await;
        self.database.wait_until_recorded().await;
        self.database.wait_until_confirmed().await;
        let report = harness::check_streamed(&self.database, &self.emulator).await;
        let log = self.relay.log();
        assert!(report.is_clean(), "{report}\n{log}");
        assert_eq!(report.duplicates.len(), 0, "{report}\n{log}");
        assert_eq!(log.matches("streaming").count(), 1, "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_broken_during_a_copy_loses_no_record_and_repeats_nothing() {
    let (world, held_up) = World::start(IN_COPY).await;
    world.cut(&held_up).await;
    world.is_well().await;
    assert_eq!(world.records_of(&held_up).await, 0, "rolled back");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_commit_loses_no_record_and_repeats_nothing() {
    let (world, held_up) = World::start(AT_COMMIT).await;
    world.cut(&held_up).await;
    world.is_well().await;
    assert!(world.records_of(&held_up).await > 0, "committed");
}
