//! Tests of two running relays whose tables begin to share rows, because somebody attaches the table of one relay to
//! the partitioned table of the other. Only the relay of the attached table continues.

use serde_json::Value;

use super::{assert_done, stored};
use crate::condition::{status, wait_for_state};
use crate::harness::{self, Database, Relay, eventually, postrider};
use crate::http::free_addr;

const CREATE: &str = "\
    CREATE TABLE public.ob (id uuid DEFAULT gen_random_uuid(), aggregatetype text NOT NULL, \
        aggregateid text, event_type text, payload jsonb, part int) PARTITION BY LIST (part); \
    CREATE TABLE public.ob_1 PARTITION OF public.ob FOR VALUES IN (1); \
    CREATE TABLE public.ob_9 (LIKE public.ob INCLUDING ALL)";

const ATTACH: &str = "ALTER TABLE public.ob ATTACH PARTITION public.ob_9 FOR VALUES IN (9)";
const DETACH: &str = "ALTER TABLE public.ob DETACH PARTITION public.ob_9";

/// The settings of one relay.
struct Side {
    slot: &'static str,
    table: &'static str,
    addr: String,
}

impl Side {
    fn new(slot: &'static str, table: &'static str) -> Self {
        let addr = free_addr();
        Self { slot, table, addr }
    }

    /// The slot and the publication have the same name.
    fn settings(&self) -> [(&str, &str); 4] {
        [
            ("POSTRIDER_SLOT", self.slot),
            ("POSTRIDER_PUBLICATION", self.slot),
            ("POSTRIDER_TABLE", self.table),
            ("POSTRIDER_HTTP_ADDR", &self.addr),
        ]
    }

    fn init(&self, database: &Database) {
        let url = [("DATABASE_URL", database.url.as_str())];
        assert_done(&["init", "--apply"], &[&self.settings()[..], &url].concat());
    }

    async fn start(&self, database: &Database, host: &str) -> Relay {
        self.start_as("streaming", database, host).await
    }

    async fn start_as(&self, state: &str, database: &Database, host: &str) -> Relay {
        let relay = Relay::start_with(database, host, &self.settings());
        wait_for_state(&self.addr, state).await;
        relay
    }

    fn screen(&self, database: &Database) -> String {
        let environment = [
            ("DATABASE_URL", database.url.as_str()),
            ("PUBSUB_PROJECT_ID", "demo"),
        ];
        let environment = [&self.settings()[..], &environment].concat();
        let ran = postrider(&["status"], &environment).output().unwrap();
        String::from_utf8(ran.stdout).unwrap()
    }
}

async fn insert(database: &Database, table: &str, part: u32, rows: u32) -> Vec<String> {
    let sql = format!(
        "INSERT INTO public.{table} (aggregatetype, aggregateid, event_type, payload, part) \
         SELECT 'order', 'k-' || {part}, 'New', '{{}}', {part} FROM generate_series(1, {rows}) RETURNING id::text"
    );
    let rows = database.client.query(&sql, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

async fn wait_until_recorded(database: &Database, ids: &[String]) {
    let sql = "SELECT count(*) FROM outbox.dispatch WHERE state = 'published' AND event_id::text = ANY ($1)";
    eventually("the rows are recorded", || async {
        let row = database.client.query_one(sql, &[&ids]).await.unwrap();
        (row.get::<_, i64>(0) == ids.len() as i64).then_some(())
    })
    .await;
}

async fn wait_until_confirmed(database: &Database, slot: &str) {
    let written = database.current_wal().await;
    let sql = format!(
        "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = '{slot}'"
    );
    eventually("the slot has confirmed everything", || async {
        (database.number(&sql).await >= written).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attached_table_of_another_running_relay_is_published_by_its_owner_alone() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    database.execute(CREATE).await;
    let (root, part) = (
        Side::new("root_slot", "public.ob"),
        Side::new("part_slot", "public.ob_9"),
    );
    root.init(&database);
    part.init(&database);
    let of_root = root.start(&database, &host).await;
    let of_part = part.start(&database, &host).await;
    let before = insert(&database, "ob", 1, 3).await;
    wait_until_recorded(&database, &before).await;

    database.execute(ATTACH).await;
    let at_once = insert(&database, "ob", 9, 5).await;
    let broken = wait_for_state(&root.addr, "broken").await;
    assert_eq!(broken["code"], "table-captured", "{broken}");
    of_root
        .wait_for_log("is captured through slot \"part_slot\"")
        .await;
    let screen = root.screen(&database);
    for says in [
        "BROKEN",
        "table-captured",
        "part_slot",
        "detach partition public.ob_9 from its parent",
    ] {
        assert!(screen.contains(says), "{says} in\n{screen}");
    }
    // Both relays may have published the rows in `at_once`. If more rows are inserted into the partition, only the
    // partition's own relay (`of_part`) publishes them.
    let shared = insert(&database, "ob", 9, 20).await;
    let held_up = insert(&database, "ob", 1, 3).await;
    wait_until_recorded(&database, &[&shared[..], &at_once].concat()).await;
    let once = |ids: &[String]| {
        let stored = stored(&emulator);
        ids.iter().all(|id| stored.get(id) == Some(&1))
    };
    assert!(once(&shared), "{}", of_root.log());
    // The partition's own relay also publishes after a restart.
    of_part.stop().await;
    let of_part = part.start(&database, &host).await;
    let later = insert(&database, "ob", 9, 5).await;
    wait_until_recorded(&database, &later).await;

    // The relay of the partitioned table streams again after the detach, without a restart.
    database.execute(DETACH).await;
    wait_for_state(&root.addr, "streaming").await;
    wait_until_recorded(&database, &held_up).await;
    for slot in [root.slot, part.slot] {
        wait_until_confirmed(&database, slot).await;
    }
    for ids in [&shared, &later, &held_up] {
        assert!(once(ids), "{}", of_root.log());
    }
    let code = status(&root.addr)
        .await
        .map(|status| status["code"].clone());
    assert_eq!(code, Some(Value::Null));
    of_root.stop().await;
    of_part.stop().await;
}

/// The partitioned table has two relays: one streams, and the other is its standby. Once the table of a third relay
/// is attached, the first relay must stop streaming, and frees its slot. The standby takes the slot, but must not
/// stream either. Both processes must keep running and wait until the table is detached.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_of_the_refused_relay_waits_for_the_detach_too() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    database.execute(CREATE).await;
    let (root, standby, part) = (
        Side::new("root_slot", "public.ob"),
        Side::new("root_slot", "public.ob"),
        Side::new("part_slot", "public.ob_9"),
    );
    root.init(&database);
    part.init(&database);
    let of_root = root.start(&database, &host).await;
    let of_standby = standby.start_as("standby", &database, &host).await;
    let of_part = part.start(&database, &host).await;

    database.execute(ATTACH).await;
    let refused = "is captured through slot \"part_slot\"";
    of_root.wait_for_log(refused).await;
    of_standby.wait_for_log(refused).await;
    database.execute(DETACH).await;
    let rows = insert(&database, "ob", 1, 3).await;
    wait_until_recorded(&database, &rows).await;
    of_root.stop().await;
    of_standby.stop().await;
    of_part.stop().await;
}
