//! Writes random sequences of outcomes to a real PostgreSQL, whose sessions are terminated along the way,
//! and compares the table with a plain model.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PublishResponse;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use prost::Message;
use publisher::MessageIds;
use scratch_postgres::ScratchPostgres;
use slot_manager::cluster;
use tokio_postgres::Client;

use super::super::outcome::Outcome;
use super::*;
use crate::condition::Troubles;
use crate::environment::Environment;
use crate::event::{CommittedAt, EventId, EventPosition, EventRef, Standing};
use crate::postgres::Target;
use crate::store::position;

const PATIENCE: Duration = Duration::from_secs(60);

/// One step of a random sequence.
#[derive(Debug, Clone)]
enum Step {
    /// The writer gets the outcomes of several events of one key, all published or all quarantined:
    ///
    /// - First come new events; `events` is their number. Some of them already have a row: `there` is the number of
    ///   such events. In production this happens if PostgreSQL commits a batch, and the connection breaks before the
    ///   writer learns of the commit.
    /// - Then come events that were published before and must not get a row; `repeated` is their number.
    Outcome {
        key: u8,
        publishes: bool,
        events: usize,
        there: usize,
        repeated: usize,
    },
    /// A released event gets its outcome: the relay publishes it or quarantines it again. An operator may
    /// have discarded the event while it was in flight.
    Release { which: usize, publishes: bool },
    /// An operator discards a quarantined event.
    Discard { which: usize },
    /// PostgreSQL terminates the writer's session.
    Cut,
}

fn step() -> impl Strategy<Value = Step> {
    let outcome = (0u8..3, any::<bool>(), 1usize..6, 0usize..3, 0usize..3).prop_map(
        |(key, publishes, events, there, repeated)| Step::Outcome {
            key,
            publishes,
            events,
            there: there.min(events),
            repeated,
        },
    );
    let release = (0usize..20, any::<bool>());
    prop_oneof![
        8 => outcome,
        3 => release.prop_map(|(which, publishes)| Step::Release { which, publishes }),
        1 => (0usize..20).prop_map(|which| Step::Discard { which }),
        1 => Just(Step::Cut),
    ]
}

/// State, ordering key, message id, attempts, and error.
type Row = (String, Option<String>, Option<String>, i32, Option<String>);

struct World {
    sql: Client,
    writer: Option<DispatchWriter>,
    events: mpsc::UnboundedReceiver<WriterEvent>,
    handed_over: u64,
    written: u64,
    /// The model of the table.
    rows: BTreeMap<EventPosition, Row>,
    /// The expected number of resolved events of each transaction, by commit LSN.
    commits: BTreeMap<u64, u64>,
    /// The reported number of resolved events of each transaction, by commit LSN.
    recorded: BTreeMap<u64, u64>,
}

impl World {
    async fn start(server: &ScratchPostgres) -> Self {
        let (sql, connection) =
            tokio_postgres::connect(&server.url("postgres"), tokio_postgres::NoTls)
                .await
                .unwrap();
        tokio::spawn(connection);
        sql.batch_execute("TRUNCATE outbox.dispatch").await.unwrap();
        let cluster = cluster::inspect(&sql).await.unwrap();
        let url = server.url("postgres");
        let target = Target::from_settings(&url, &Environment::new()).unwrap();
        let reader = SlotReader {
            target: target.unwrap(),
            instance: "test".to_owned(),
            walsender: 0,
            system_identifier: cluster.system_identifier,
            timeline: cluster.timeline,
        };
        let slot: SlotName = "p".parse().unwrap();
        let (sender, events) = mpsc::unbounded_channel();
        let writer = DispatchWriter::start(&slot, reader, sender, Troubles::default().unwritten());
        Self {
            sql,
            writer: Some(writer),
            events,
            handed_over: 0,
            written: 0,
            rows: BTreeMap::new(),
            commits: BTreeMap::new(),
            recorded: BTreeMap::new(),
        }
    }

    async fn play(&mut self, n: u64, step: &Step) {
        match *step {
            Step::Outcome {
                key,
                publishes,
                events,
                there,
                repeated,
            } => {
                let key = ["", "a", "b"][usize::from(key)];
                let refs = (1..=(events + repeated) as u32).map(|ordinal| {
                    let mut event = event(n, ordinal);
                    event.unknown_outcomes = ordinal % 3;
                    if ordinal as usize > events {
                        event.standing = Standing::NeedsNoRow;
                    }
                    event
                });
                let record = record(n, key, refs.collect(), publishes);
                *self.commits.entry(1_000 * n).or_default() += (events + repeated) as u64;
                for (at, event) in record.events[..events].iter().enumerate() {
                    let row = if at < there {
                        let before = Some("before".to_owned());
                        ("published".to_owned(), None, before, 9, None)
                    } else {
                        row(&record, at)
                    };
                    if at < there {
                        self.insert(event, &row).await;
                    }
                    self.rows.insert(event.position, row);
                }
                self.hand_over(record);
            }
            Step::Release { which, publishes } => {
                // An operator can release or discard only events with a durable row.
                self.wait_until_written().await;
                let states = ["quarantined", "discarded"];
                let Some(at) = self.nth(which, &states) else {
                    return;
                };
                let mut event = event(at.commit.lsn().as_u64() / 1_000, at.ordinal);
                event.standing = Standing::Released;
                event.unknown_outcomes = 2;
                let record = record(n, "released", vec![event], publishes);
                let before = &self.rows[&at];
                if before.0 == "quarantined" || publishes {
                    let mut after = row(&record, 0);
                    after.3 += before.3;
                    self.rows.insert(at, after);
                }
                self.hand_over(record);
            }
            Step::Discard { which } => self.discard(which).await,
            Step::Cut => {
                let cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                           WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'";
                self.sql.execute(cut, &[]).await.unwrap();
            }
        }
    }

    async fn discard(&mut self, which: usize) {
        self.wait_until_written().await;
        let Some(at) = self.nth(which, &["quarantined"]) else {
            return;
        };
        let discard = "UPDATE outbox.dispatch SET state = 'discarded' \
                       WHERE commit_lsn = $1 AND ordinal = $2";
        let (lsn, ordinal) = position::columns(at);
        let done = self.sql.execute(discard, &[&lsn, &ordinal]).await;
        assert_eq!(done.unwrap(), 1);
        self.rows.get_mut(&at).unwrap().0 = "discarded".to_owned();
    }

    /// Returns the position of the `n`-th row in one of these states, wrapping around.
    fn nth(&self, n: usize, states: &[&str]) -> Option<EventPosition> {
        let rows = self
            .rows
            .iter()
            .filter(|(_, row)| states.contains(&&*row.0));
        let places: Vec<EventPosition> = rows.map(|(at, _)| *at).collect();
        places.get(n % places.len().max(1)).copied()
    }

    async fn insert(&self, event: &EventRef, (state, key, message_id, attempts, _): &Row) {
        let (lsn, ordinal) = position::columns(event.position);
        let insert = "INSERT INTO outbox.dispatch (commit_lsn, ordinal, event_id, committed_at, \
                      state, ordering_key, message_id, attempts) \
                      VALUES ($1, $2, $3, now(), $4, $5, $6, $7)";
        let id = uuid::Uuid::from_bytes(event.event_id.uuid);
        self.sql
            .execute(
                insert,
                &[&lsn, &ordinal, &id, state, key, message_id, attempts],
            )
            .await
            .unwrap();
    }

    fn hand_over(&mut self, record: Record) {
        self.handed_over += 1;
        self.writer.as_ref().unwrap().record(record);
    }

    async fn wait_until_written(&mut self) {
        while self.written < self.handed_over {
            let said = tokio::time::timeout(PATIENCE, self.events.recv()).await;
            self.take_in(
                said.expect("the writer reports in time")
                    .expect("the writer runs"),
            );
        }
    }

    fn take_in(&mut self, said: WriterEvent) {
        match said {
            WriterEvent::Recorded(written) => {
                self.written += written.records;
                for (commit, events) in written.resolved.commits {
                    *self.recorded.entry(commit.lsn().as_u64()).or_default() += events;
                }
            }
            WriterEvent::Retrying(_) => {}
            WriterEvent::Failed(error) => panic!("{error}"),
        }
    }

    async fn table(&self) -> BTreeMap<EventPosition, Row> {
        let select = "SELECT commit_lsn, ordinal, state, ordering_key, message_id, attempts, error \
                      FROM outbox.dispatch";
        let rows = self.sql.query(select, &[]).await.unwrap();
        rows.iter()
            .map(|row| {
                (
                    position::read(row, 0),
                    (row.get(2), row.get(3), row.get(4), row.get(5), row.get(6)),
                )
            })
            .collect()
    }
}

/// Returns the event with this ordinal in transaction `n`, which commits at LSN 1,000 * `n`.
fn event(n: u64, ordinal: u32) -> EventRef {
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&n.to_be_bytes());
    uuid[12..].copy_from_slice(&ordinal.to_be_bytes());
    let id = EventId {
        uuid,
        source_id: None,
    };
    let at = CommittedAt {
        position: EventPosition::for_tests(1_000 * n, ordinal),
        ..CommittedAt::default()
    };
    EventRef::new(at, id)
}

fn record(n: u64, key: &str, events: Vec<EventRef>, publishes: bool) -> Record {
    let message_ids = events
        .iter()
        .map(|event| format!("{n}-{}", event.position.ordinal));
    let answer = PublishResponse {
        message_ids: message_ids.collect(),
    };
    let ids = MessageIds::decode(answer.encode_to_vec().as_slice()).unwrap();
    Record {
        topic: Some("projects/p/topics/t".into()),
        ordering_key: key.into(),
        // Each outcome needs a different time, because the writer skips an update to the same time.
        at: SystemTime::UNIX_EPOCH + Duration::from_secs(2_000_000_000 + n),
        events,
        outcome: if publishes {
            Outcome::Published(ids)
        } else {
            Outcome::Quarantined(format!("refused in step {n}").into())
        },
    }
}

/// Returns the expected row of the event with the index `at` in a record.
fn row(record: &Record, at: usize) -> Row {
    let event = &record.events[at];
    let key = record.ordering_key.as_str();
    let key = (!key.is_empty()).then(|| key.to_owned());
    let failed = event.unknown_outcomes as i32;
    match &record.outcome {
        Outcome::Published(ids) => {
            let id = ids.get(at).map(ToOwned::to_owned);
            ("published".to_owned(), key, id, failed + 1, None)
        }
        Outcome::Quarantined(why) | Outcome::Released(why) => {
            let why = Some(why.to_string());
            ("quarantined".to_owned(), key, None, failed, why)
        }
    }
}

#[test]
fn the_table_matches_a_plain_model_and_each_outcome_is_reported_once() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = ScratchPostgres::builder().start().unwrap();
    runtime.block_on(migrate(&server));
    let mut runner = TestRunner::new(Config::with_cases(24));
    let steps = prop::collection::vec(step(), 1..40);
    let found = runner.run(&steps, |steps| {
        runtime.block_on(async {
            let mut world = World::start(&server).await;
            for (n, step) in (1..).zip(&steps) {
                world.play(n, step).await;
            }
            let writer = world.writer.take().unwrap();
            writer.finish(PATIENCE).await;
            while let Ok(said) = world.events.try_recv() {
                world.take_in(said);
            }
            prop_assert_eq!(world.table().await, world.rows);
            prop_assert_eq!(world.recorded, world.commits);
            prop_assert_eq!(world.written, world.handed_over);
            Ok(())
        })
    });
    found.unwrap();
}

async fn migrate(server: &ScratchPostgres) {
    let (sql, connection) = tokio_postgres::connect(&server.url("postgres"), tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
    let mut files: Vec<_> = (std::fs::read_dir(folder).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "sql"))
        .collect();
    files.sort();
    for file in files {
        let migration = std::fs::read_to_string(&file).unwrap();
        sql.batch_execute(&migration).await.unwrap();
    }
}

#[test]
fn a_batch_is_full_at_8000_rows_or_4_mib_of_text() {
    let of = |events: u32, key: &str| {
        let mut batch = Batch::default();
        batch.add(record(
            1,
            key,
            (1..=events).map(|n| event(1, n)).collect(),
            true,
        ));
        batch.is_full()
    };
    assert!(!of(MAX_ROWS as u32 - 1, "k") && of(MAX_ROWS as u32, "k"));
    let long = "k".repeat(1_024);
    assert!(!of(4_000, &long) && of(4_200, &long));
}

#[test]
fn a_writer_that_finds_another_session_on_the_slot_records_nothing_and_ends_the_session() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = ScratchPostgres::builder().start().unwrap();
    runtime.block_on(async {
        migrate(&server).await;
        let mut world = World::start(&server).await;
        let take = "INSERT INTO outbox.relay (slot, system_identifier, timeline, instance) \
                    VALUES ('p', '1', 1, 'another')";
        world.sql.batch_execute(take).await.unwrap();
        world.hand_over(record(1, "k", vec![event(1, 1)], true));
        let said = tokio::time::timeout(PATIENCE, world.events.recv()).await;
        let Some(WriterEvent::Failed(error)) = said.unwrap() else {
            panic!("the writer recorded although another session has the slot");
        };
        assert_eq!(error.code(), Code::LeaseLost);
        assert!(world.table().await.is_empty());
    });
}
