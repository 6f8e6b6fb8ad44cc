//! Tests that the relay publishes exactly the right rows of a captured table: each row that is
//! committed after capturing began, and no older row, no matter how the table changes. With
//! `dispatch = full`, the relay publishes each row once.

mod adoption;
mod bounded;
mod chosen_values;
mod columns;
mod detached;
mod displaced;
mod exceptions;
mod first_start;
mod gaps;
mod held_horizon;
mod history;
mod large_table;
mod later_records;
mod long_recovery;
mod lost_at_once;
mod moved_rows;
mod moved_slot;
mod order;
mod other_table;
mod owner;
mod plans;
mod renamed;
mod replaced;
mod reused_ids;
mod reused_names;
mod rotated;
mod settled;
mod shared_rows;
mod slot_creation;
mod table;
mod transactions;
mod waiting_rows;
mod wraparound;

use std::collections::{HashMap, HashSet};

use pubsub_emulator::RunningEmulator;
use pubsub_emulator::checks::{self, Expected, Report, Stream};
use scratch_postgres::ScratchPostgres;
use tempfile::NamedTempFile;

use crate::harness::{self, Database, Relay, eventually, postrider};
use table::Kind;

/// Attaches the table of [`World::fill_partition`] to the captured table.
const ATTACH: &str = "ALTER TABLE public.parts ATTACH PARTITION public.more \
                      FOR VALUES FROM ('2030-01-01') TO ('2031-01-01')";

/// A captured table on a private server, the relay's settings, and the rows that must be published.
struct World {
    database: Database,
    emulator: RunningEmulator,
    kind: Kind,
    /// The current name of the table.
    table: String,
    /// An SQL expression for the event id of a row. The statement must give the table the alias `e`.
    event_id: String,
    settings: NamedTempFile,
    /// Environment variables of the relay, in addition to the settings file.
    more: Vec<(&'static str, String)>,
    /// The number of the next row. A row's payload contains its number as `n`.
    next: u32,
    expected: Expected,
    /// The event ids in `expected`.
    noted: HashSet<String>,
}

impl World {
    /// Creates a table with `old_rows` old rows, and prepares it with `postrider init --apply`, which
    /// creates the slot.
    async fn new(kind: Kind, old_rows: u32) -> Self {
        Self::with_emulator(kind, old_rows, harness::emulator().await).await
    }

    async fn with_emulator(kind: Kind, old_rows: u32, emulator: RunningEmulator) -> Self {
        let builder = ScratchPostgres::builder().setting("wal_level", "logical");
        let builder = builder.setting("max_prepared_transactions", "10");
        Self::on(builder.start().unwrap(), kind, old_rows, emulator).await
    }

    async fn on(
        server: ScratchPostgres,
        kind: Kind,
        old_rows: u32,
        emulator: RunningEmulator,
    ) -> Self {
        let url = server.socket_url("postgres");
        let client = harness::connect(&url).await;
        let settings = NamedTempFile::new().unwrap();
        write_settings(&settings, kind, kind.table());
        let path = settings.path().display().to_string();
        if kind == Kind::Events {
            let environment = [("DATABASE_URL", url.as_str()), ("POSTRIDER_CONFIG", &path)];
            assert_done(&["init", "--apply", "--no-slot"], &environment);
        } else {
            client.batch_execute(&kind.create()).await.unwrap();
        }
        let old = kind.insert_old(kind.table(), old_rows);
        client.batch_execute(&old).await.unwrap();
        let database = Database::on_with(server, &[("POSTRIDER_CONFIG", &path)]).await;
        Self {
            database,
            emulator,
            kind,
            table: kind.table().to_owned(),
            event_id: kind.event_id().to_owned(),
            settings,
            more: Vec::new(),
            next: 1,
            expected: Expected::new(),
            noted: HashSet::new(),
        }
    }

    /// Removes the slot and the capture records, as if `init` had created no slot. The relay then
    /// creates the slot at its first start.
    async fn without_slot(self) -> Self {
        self.database.drop_slot().await;
        self.database.execute("DELETE FROM outbox.capture").await;
        self
    }

    /// Writes the new name of the table to the settings file, and uses it in later statements.
    fn now_called(&mut self, table: &str) {
        write_settings(&self.settings, self.kind, table);
        table.clone_into(&mut self.table);
    }

    fn relay(&self) -> Relay {
        let config = self.settings.path().display().to_string();
        let mut more = vec![("POSTRIDER_CONFIG", config.as_str())];
        more.extend(
            self.more
                .iter()
                .map(|(name, value)| (*name, value.as_str())),
        );
        Relay::start_with(&self.database, &self.emulator.addr().to_string(), &more)
    }

    /// Starts a relay and waits until it streams.
    async fn streaming(&self) -> Relay {
        let relay = self.relay();
        relay.wait_for_log("streaming").await;
        relay
    }

    /// Runs a `postrider` command with the relay's database, slot and settings file, and with the
    /// variables `more`. Ignores `self.more`.
    fn run(&self, arguments: &[&str], more: &[(&str, &str)]) -> std::process::Output {
        let config = self.settings.path().display().to_string();
        let mut environment = vec![
            ("DATABASE_URL", self.database.url.as_str()),
            ("POSTRIDER_CONFIG", &config),
            ("POSTRIDER_SLOT", self.database.slot()),
        ];
        environment.extend(more);
        postrider(arguments, &environment).output().unwrap()
    }

    async fn execute(&self, sql: &str) {
        let sql = sql.replace("TABLE_NAME", &self.table);
        if let Err(error) = self.database.client.batch_execute(&sql).await {
            panic!("{error:?}: {sql}");
        }
    }

    /// Commits new rows with five keys, one transaction per row.
    async fn insert(&mut self, prefix: &str, rows: u32) {
        let sql = self.insert_sql(prefix, rows);
        self.database.execute(&sql).await;
    }

    fn insert_sql(&mut self, prefix: &str, rows: u32) -> String {
        let sql = self.kind.insert(&self.table, prefix, self.next, rows);
        self.next += rows;
        sql
    }

    /// Commits new rows with five keys, all in one transaction.
    async fn insert_at_once(&mut self, prefix: &str, rows: u32) {
        let sql = self
            .kind
            .insert_at_once(&self.table, prefix, self.next, rows);
        self.next += rows;
        self.database.execute(&sql).await;
    }

    /// Like [`insert_at_once`](Self::insert_at_once), but only into the partition of 2020. So the rows
    /// stay in the table when a test detaches a later partition.
    async fn insert_into_first_partition(&mut self, prefix: &str, rows: u32) {
        let sql = format!(
            "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
             SELECT 'order', '{prefix}-' || i % 5, 'New', jsonb_build_object('n', i), '2020-03-03' \
             FROM generate_series({}, {}) i",
            self.next,
            self.next + rows - 1
        );
        self.next += rows;
        self.database.execute(&sql).await;
    }

    /// Creates `public.more`, a table like the captured table, and inserts `rows` new rows into it.
    async fn fill_partition(&mut self, rows: u32) {
        let insert = format!(
            "CREATE TABLE public.more (LIKE public.parts INCLUDING ALL); \
             INSERT INTO public.more (aggregatetype, aggregateid, event_type, payload, day) \
             SELECT 'order', 'attached-' || i % 5, 'New', jsonb_build_object('n', i), '2030-05-05' \
             FROM generate_series({}, {}) i",
            self.next,
            self.next + rows - 1
        );
        self.next += rows;
        self.execute(&insert).await;
    }

    /// Attaches a partition with `rows` new rows. The stream does not contain these rows, because they
    /// are inserted before the partition belongs to the captured table.
    async fn attach_filled_partition(&mut self, rows: u32) {
        self.fill_partition(rows).await;
        self.execute(ATTACH).await;
    }

    /// The SQL statement that inserts the next row.
    fn row_sql(&mut self, key: &str) -> String {
        let sql = self.kind.row(&self.table, key, self.next);
        self.next += 1;
        sql
    }

    /// Adds the new rows that are now in the table to the expected rows. Old rows are never expected.
    async fn note(&mut self) {
        let sql = format!(
            "SELECT {id}::text, aggregateid FROM {table} e \
             WHERE event_type = 'New' ORDER BY (payload->>'n')::bigint",
            id = self.event_id,
            table = self.table,
        );
        self.note_rows(&sql).await;
    }

    /// Adds the rows of the query `sql` to the expected rows. The query returns event ids and keys.
    async fn note_rows(&mut self, sql: &str) {
        for row in self.database.client.query(sql, &[]).await.unwrap() {
            let (id, key): (String, String) = (row.get(0), row.get(1));
            if self.noted.insert(id.clone()) {
                let stream = Stream::new("projects/demo/topics/order.events", key);
                self.expected.entry(stream).or_default().push(id);
            }
        }
    }

    /// Waits until every expected row is published. The deadline starts again whenever a row is
    /// published.
    async fn wait_until_published(&self, relay: &Relay) {
        loop {
            let before = self.missing();
            if before == 0 {
                return;
            }
            let what = format!("more of {} rows are published", self.noted.len());
            eventually(&what, || async {
                assert!(!relay.log().contains("error["), "{}", relay.log());
                (self.missing() < before).then_some(())
            })
            .await;
        }
    }

    /// The number of expected rows that are not yet published.
    fn missing(&self) -> usize {
        let stored = stored(&self.emulator);
        let is_missing = |id: &&String| !stored.contains_key(*id);
        self.noted.iter().filter(is_missing).count()
    }

    /// Waits until this relay has audited the tables in its current session, no recovery is open, and
    /// the slot has confirmed everything written so far.
    async fn wait_until_compared(&self, relay: &Relay) {
        let sql = format!(
            "SELECT count(*) FROM outbox.relay WHERE instance LIKE '%:{}' \
             AND audited_at > since AND recovering IS NULL",
            relay.pid()
        );
        eventually("the tables are compared", || async {
            assert!(!relay.log().contains("error["), "{}", relay.log());
            (self.database.number(&sql).await == 1).then_some(())
        })
        .await;
        self.database.wait_until_confirmed().await;
    }

    /// Checks that the relay publishes each expected row exactly once and in order, and no other row. The new
    /// rows that the table contains now are expected too. Restarts the relay before the check, and stops the
    /// relay afterwards.
    async fn assert_published_once(&mut self, relay: Relay) {
        let relay = self.published_all(relay).await;
        let report = self.report();
        assert!(
            report.is_clean() && report.duplicates.is_empty(),
            "{report}\n{}",
            relay.log()
        );
        relay.stop().await;
    }

    /// Like `assert_published_once`, but allows repeats.
    async fn assert_published(&mut self, relay: Relay) {
        let relay = self.published_all(relay).await;
        let report = self.report();
        assert!(report.is_clean(), "{report}\n{}", relay.log());
        relay.stop().await;
    }

    /// Waits until every new row in the table is published, and restarts the relay.
    async fn published_all(&mut self, relay: Relay) -> Relay {
        self.note().await;
        self.wait_until_published(&relay).await;
        self.wait_until_compared(&relay).await;
        relay.stop().await;
        let relay = self.relay();
        self.wait_until_compared(&relay).await;
        relay
    }

    fn report(&self) -> Report {
        checks::check(&self.emulator.journal().attempts(), &self.expected)
    }

    /// Creates a table with 20 old rows and starts a relay. Waits until the relay has published `rows`
    /// new rows with keys `before-…` and has compared the table.
    async fn served(kind: Kind, rows: u32) -> (Self, Relay) {
        Self::new(kind, 20).await.serve(rows).await
    }

    async fn serve(mut self, rows: u32) -> (Self, Relay) {
        let relay = self.streaming().await;
        self.insert("before", rows).await;
        self.note().await;
        self.wait_until_published(&relay).await;
        self.wait_until_compared(&relay).await;
        let keeps_records = !self
            .more
            .iter()
            .any(|(name, _)| *name == "POSTRIDER_DISPATCH");
        if keeps_records {
            self.wait_until_recorded().await;
        }
        (self, relay)
    }

    /// Waits until every expected row has its record.
    async fn wait_until_recorded(&self) {
        let ids: Vec<String> = self.noted.iter().cloned().collect();
        let sql = "SELECT count(*) FROM outbox.dispatch WHERE event_id::text = ANY ($1)";
        eventually("every expected row has its record", || async {
            let row = self.database.client.query_one(sql, &[&ids]).await.unwrap();
            (row.get::<_, i64>(0) >= ids.len() as i64).then_some(())
        })
        .await;
    }
}

/// How often the emulator stored each event, by event id.
fn stored(emulator: &RunningEmulator) -> HashMap<String, u32> {
    let mut stored = HashMap::new();
    for attempt in emulator.journal().attempts() {
        if attempt.is_stored() {
            for id in attempt.event_ids.iter().flatten() {
                *stored.entry(id.to_string()).or_default() += 1;
            }
        }
    }
    stored
}

fn write_settings(file: &NamedTempFile, kind: Kind, table: &str) {
    std::fs::write(file.path(), kind.settings(table)).unwrap();
}

fn assert_done(arguments: &[&str], environment: &[(&str, &str)]) {
    let done = postrider(arguments, environment).output().unwrap();
    assert!(
        done.status.success(),
        "{}{}",
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr)
    );
}
