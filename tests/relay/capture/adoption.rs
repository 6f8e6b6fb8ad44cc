//! Follows docs/how-to/adopting.md: the relay replaces a poller while the services keep writing.
//! Every committed row is sent exactly once, by the poller or by the relay.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use pubsub_emulator::RunningEmulator;
use scratch_postgres::ScratchPostgres;
use tempfile::NamedTempFile;
use tokio::task::JoinHandle;

use super::{assert_done, stored};
use crate::harness::{self, Database, Relay, eventually, postrider};

const TABLE: &str = "\
    CREATE TABLE public.outbox (id bigserial PRIMARY KEY, aggregatetype text NOT NULL, \
        aggregateid text, event_type text NOT NULL, payload jsonb, processed_at timestamptz)";

const SETTINGS: &str = "start = \"all\"\n[[tables]]\ntable = \"public.outbox\"\n";

/// The SQL statement in docs/how-to/adopting.md that creates records for the rows sent by the
/// poller.
fn what_was_sent() -> String {
    let page = include_str!("../../../docs/how-to/adopting.md");
    let (_, rest) = page.split_once("```sql\n").unwrap();
    let (statement, _) = rest.split_once("```").unwrap();
    statement.to_owned()
}

/// Starts a service that inserts rows until `stop` is set. All services share one counter, and roll
/// back every seventh row.
fn writer(url: &str, name: &'static str, stop: Arc<AtomicBool>) -> JoinHandle<()> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let url = url.to_owned();
    tokio::spawn(async move {
        let client = harness::connect(&url).await;
        while !stop.load(Ordering::Relaxed) {
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let end = if n.is_multiple_of(7) {
                "ROLLBACK"
            } else {
                "COMMIT"
            };
            let sql = format!("BEGIN; {}; {end}", row(&format!("{name}-{}", n % 5)));
            client.batch_execute(&sql).await.unwrap();
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    })
}

fn row(key: &str) -> String {
    format!(
        "INSERT INTO public.outbox (aggregatetype, aggregateid, event_type, payload) \
         VALUES ('order', '{key}', 'Placed', '{{}}')"
    )
}

/// Starts the poller that the relay replaces. The poller marks the rows that it sends, until `stop`
/// is set. The task returns the ids of these rows.
fn poller(url: &str, stop: Arc<AtomicBool>) -> JoinHandle<Vec<i64>> {
    let url = url.to_owned();
    tokio::spawn(async move {
        let client = harness::connect(&url).await;
        let mut sent = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let sql = "UPDATE public.outbox SET processed_at = now() WHERE id IN ( \
                       SELECT id FROM public.outbox WHERE processed_at IS NULL \
                       ORDER BY id LIMIT 20 FOR UPDATE SKIP LOCKED) RETURNING id";
            let rows = client.query(sql, &[]).await.unwrap();
            sent.extend(rows.iter().map(|row| row.get::<_, i64>(0)));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        sent
    })
}

struct Shop {
    database: Database,
    emulator: RunningEmulator,
    /// The settings file. It is deleted when this value is dropped.
    _settings: NamedTempFile,
}

impl Shop {
    /// The event ids of the rows that meet `condition`.
    async fn events(&self, condition: &str) -> HashSet<String> {
        let sql = format!(
            "SELECT outbox.event_uuid('public.outbox', id::text, inserted_xid)::text \
             FROM public.outbox WHERE {condition}"
        );
        let rows = self.database.client.query(&sql, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    async fn wait_until_published(&self, relay: &Relay) {
        eventually("every row is sent", || async {
            assert!(!relay.log().contains("error["), "{}", relay.log());
            let (ours, stored) = (
                self.events("processed_at IS NULL").await,
                stored(&self.emulator),
            );
            ours.iter().all(|id| stored.contains_key(id)).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_row_is_sent_once_by_the_poller_or_by_the_relay_that_replaces_it() {
    let builder = ScratchPostgres::builder().setting("wal_level", "logical");
    let server = builder.start().unwrap();
    let url = server.socket_url("postgres");
    let client = harness::connect(&url).await;
    client.batch_execute(TABLE).await.unwrap();
    let history = format!("{} ", row("history")).replace(
        "VALUES ('order', 'history', 'Placed', '{}')",
        "SELECT 'order', 'history', 'Placed', '{}' FROM generate_series(1, 300)",
    );
    client.batch_execute(&history).await.unwrap();
    let stop_writers = Arc::new(AtomicBool::new(false));
    let stop_poller = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = ["a", "b"]
        .map(|name| writer(&url, name, stop_writers.clone()))
        .into();
    let polling = poller(&url, stop_poller.clone());

    let settings = NamedTempFile::new().unwrap();
    std::fs::write(settings.path(), SETTINGS).unwrap();
    let path = settings.path().display().to_string();
    let database = Database::on_with(server, &[("POSTRIDER_CONFIG", &path)]).await;
    let emulator = harness::emulator().await;
    let shop = Shop {
        database,
        emulator,
        _settings: settings,
    };

    let slow = harness::connect(&url).await;
    let sql = format!("BEGIN; {}", row("slow"));
    slow.batch_execute(&sql).await.unwrap();
    eventually("the poller keeps sending", || async {
        let sent = "SELECT count(*) FROM public.outbox WHERE processed_at IS NOT NULL";
        (shop.database.number(sent).await > 350).then_some(())
    })
    .await;
    stop_poller.store(true, Ordering::Relaxed);
    let sent = polling.await.unwrap();
    shop.database.execute(&what_was_sent()).await;
    // An operator may repeat step 4 of docs/how-to/adopting.md after step 5. Delete some records
    // and run the statement of step 4 again, which must add the missing records.
    let unmarked = "DELETE FROM outbox.dispatch WHERE ordinal % 3 = 0";
    shop.database.execute(unmarked).await;
    shop.database.execute(&what_was_sent()).await;

    let host = shop.emulator.addr().to_string();
    let more = [("POSTRIDER_CONFIG", path.as_str())];
    let relay = Relay::start_with(&shop.database, &host, &more);
    relay.wait_for_log("recovering").await;
    slow.batch_execute("COMMIT").await.unwrap();
    relay.wait_for_log("recovered").await;
    stop_writers.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    shop.wait_until_published(&relay).await;
    shop.database.wait_until_confirmed().await;
    relay.stop().await;
    assert_each_once(&shop, &sent).await;
    // A second start streams and does not recover, although `start = all` is still set.
    shop.database.execute(&row("later")).await;
    let relay = Relay::start_with(&shop.database, &host, &more);
    shop.wait_until_published(&relay).await;
    shop.database.wait_until_audited().await;
    assert!(!relay.log().contains("recovering"), "{}", relay.log());
    relay.stop().await;
    assert_each_once(&shop, &sent).await;
}

async fn assert_each_once(shop: &Shop, sent: &[i64]) {
    let by_poller = shop.events("processed_at IS NOT NULL").await;
    assert_eq!(
        by_poller.len(),
        sent.len(),
        "the poller has marked the rows it sent"
    );
    let by_relay = stored(&shop.emulator);
    let twice = by_relay
        .iter()
        .filter(|(id, copies)| **copies > 1 || by_poller.contains(*id));
    assert_eq!(twice.count(), 0, "sent twice");
    let all = shop.events("true").await;
    assert_eq!(by_relay.len() + by_poller.len(), all.len());
    assert!(by_relay.len() > 10, "the writers kept writing");
}

/// Creates a shop with ten old rows and runs `init` with a settings file that contains `settings`.
/// Also returns the path of this file.
async fn prepared_with(settings: &str) -> (Shop, String) {
    let builder = ScratchPostgres::builder().setting("wal_level", "logical");
    let server = builder.start().unwrap();
    let url = server.socket_url("postgres");
    let client = harness::connect(&url).await;
    client.batch_execute(TABLE).await.unwrap();
    for n in 0..10 {
        client.batch_execute(&row(&format!("k-{n}"))).await.unwrap();
    }
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), settings).unwrap();
    let path = file.path().display().to_string();
    let database = Database::on_with(server, &[("POSTRIDER_CONFIG", &path)]).await;
    let emulator = harness::emulator().await;
    let shop = Shop {
        database,
        emulator,
        _settings: file,
    };
    (shop, path)
}

/// The relay publishes old rows if its own settings say `start = all`, even if `init` ran without this
/// setting.
#[tokio::test(flavor = "multi_thread")]
async fn start_all_publishes_old_rows_even_if_init_ran_without_it() {
    let (shop, path) = prepared_with(&SETTINGS.replace("start = \"all\"\n", "")).await;
    let host = shop.emulator.addr().to_string();
    let more = [
        ("POSTRIDER_CONFIG", path.as_str()),
        ("POSTRIDER_START", "all"),
    ];
    let relay = Relay::start_with(&shop.database, &host, &more);
    shop.wait_until_published(&relay).await;
    relay.stop().await;
}

/// `init` has recorded `start = all`. The recorded choice takes precedence over `start = new` in the
/// settings of the relay.
#[tokio::test(flavor = "multi_thread")]
async fn old_rows_are_published_if_only_init_ran_with_start_all() {
    let (shop, path) = prepared_with(SETTINGS).await;
    let host = shop.emulator.addr().to_string();
    let more = [
        ("POSTRIDER_CONFIG", path.as_str()),
        ("POSTRIDER_START", "new"),
    ];
    let relay = Relay::start_with(&shop.database, &host, &more);
    relay.wait_for_log("`start = new` has no effect").await;
    relay.wait_for_log("recovered: ").await;
    shop.wait_until_published(&relay).await;
    relay.stop().await;
    let relay = Relay::start_with(&shop.database, &host, &more);
    relay.wait_for_log("streaming").await;
    assert!(!relay.log().contains("has no effect"), "{}", relay.log());
    relay.stop().await;
}

/// Step 5 of docs/how-to/adopting.md: `recover --dry-run`, before the relay starts.
#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_counts_the_rows_the_poller_has_not_sent() {
    let builder = ScratchPostgres::builder().setting("wal_level", "logical");
    let server = builder.start().unwrap();
    let url = server.socket_url("postgres");
    let client = harness::connect(&url).await;
    client.batch_execute(TABLE).await.unwrap();
    for n in 0..20 {
        client.batch_execute(&row(&format!("k-{n}"))).await.unwrap();
    }
    let settings = NamedTempFile::new().unwrap();
    std::fs::write(settings.path(), SETTINGS).unwrap();
    let path = settings.path().display().to_string();
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_CONFIG", &path),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    assert_done(&["init", "--apply"], &environment);
    let mark = "UPDATE public.outbox SET processed_at = now() WHERE id <= 15";
    client.batch_execute(mark).await.unwrap();
    client.batch_execute(&what_was_sent()).await.unwrap();
    let shown = postrider(&["recover", "--dry-run", "--json"], &environment)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&shown.stdout);
    assert!(
        text.contains("\"rows\": 5") || text.contains("\"rows\":5"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_whose_id_is_padded_with_blanks_are_recorded_under_the_id_of_their_event() {
    let builder = ScratchPostgres::builder().setting("wal_level", "logical");
    let server = builder.start().unwrap();
    let url = server.socket_url("postgres");
    let client = harness::connect(&url).await;
    let table = TABLE.replace("bigserial PRIMARY KEY", "char(5) PRIMARY KEY");
    client.batch_execute(&table).await.unwrap();
    let rows = "INSERT INTO public.outbox SELECT i::text, 'order', 'k', 'Placed', '{}', \
                CASE WHEN i <= 5 THEN now() END FROM generate_series(1, 8) i";
    client.batch_execute(rows).await.unwrap();
    let settings = NamedTempFile::new().unwrap();
    std::fs::write(settings.path(), SETTINGS).unwrap();
    let path = settings.path().display().to_string();
    let database = Database::on_with(server, &[("POSTRIDER_CONFIG", &path)]).await;
    let emulator = harness::emulator().await;
    database.execute(&what_was_sent()).await;
    let host = emulator.addr().to_string();
    let more = [("POSTRIDER_CONFIG", path.as_str())];
    let relay = Relay::start_with(&database, &host, &more);
    relay.wait_for_log("recovered").await;
    let published = "SELECT count(*) FROM outbox.dispatch WHERE state = 'published'";
    assert_eq!(database.number(published).await, 3, "{}", relay.log());
    assert_eq!(stored(&emulator).len(), 3);
    let named = "SELECT count(*) FROM outbox.dispatch WHERE source_id = 'public.outbox:1    '";
    assert_eq!(database.number(named).await, 1);
    relay.stop().await;
}

/// Checks that old rows of a key are published in insertion order. In the file of the table, the last rows of the key
/// lie before its first rows, because the last rows reuse the space of deleted rows. All rows are inserted before
/// `init` adds Postrider's columns to the table.
async fn old_rows_keep_their_order(version: &str) {
    let builder = ScratchPostgres::builder().setting("wal_level", "logical");
    let server = builder.start().unwrap();
    let client = harness::connect(&server.socket_url("postgres")).await;
    let insert = |key: &str, from: u32, to: u32| {
        let (column, value) = match version {
            "" => ("", ""),
            _ => (", version", ", i"),
        };
        format!(
            "DO $$ BEGIN FOR i IN {from}..{to} LOOP INSERT INTO public.outbox \
             (aggregatetype, aggregateid, event_type, payload{column}) \
             SELECT 'order', '{key}', 'Placed', to_jsonb(i){value}; COMMIT; END LOOP; END $$"
        )
    };
    let create = format!(
        "CREATE TABLE public.outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), \
         aggregatetype text, aggregateid text, event_type text, payload jsonb {version})"
    );
    for sql in [
        &create,
        &insert("filler", 1, 100),
        &insert("k", 1, 3),
        "DELETE FROM public.outbox WHERE aggregateid = 'filler'",
        "VACUUM public.outbox",
        &insert("k", 4, 6),
    ] {
        client.batch_execute(sql).await.unwrap();
    }
    let lies = "SELECT string_agg(payload::text, ',' ORDER BY ctid) FROM public.outbox";
    let lies: String = client.query_one(lies, &[]).await.unwrap().get(0);
    assert_eq!(lies, "4,5,6,1,2,3");

    let settings = NamedTempFile::new().unwrap();
    std::fs::write(settings.path(), SETTINGS).unwrap();
    let path = settings.path().display().to_string();
    let more = [("POSTRIDER_CONFIG", path.as_str())];
    let database = Database::on_with(server, &more).await;
    let emulator = harness::emulator().await;
    let relay = Relay::start_with(&database, &emulator.addr().to_string(), &more);
    eventually("all rows are published", || async {
        (emulator.journal().counts().stored_messages == 6).then_some(())
    })
    .await;
    relay.stop().await;
    let attempts = emulator.journal().attempts();
    let sent = attempts.iter().flat_map(|attempt| attempt.event_ids.iter());
    let sent: Vec<&str> = sent.flatten().map(|id| &**id).collect();
    let wanted = "SELECT string_agg(id::text, ',' ORDER BY payload) FROM public.outbox";
    assert_eq!(sent.join(","), database.text(wanted).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn old_rows_of_a_key_are_published_in_the_order_of_their_version() {
    old_rows_keep_their_order(", version int").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_rows_of_a_key_without_a_version_are_published_in_the_order_of_their_transactions() {
    old_rows_keep_their_order("").await;
}
