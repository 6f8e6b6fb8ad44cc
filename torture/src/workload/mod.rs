//! The writes during the faults: several writers, and other activity in the database.
//!
//! Writers reconnect when the server or their connection fails. If a writer got no answer to a COMMIT,
//! only the table shows whether the events should have been published.

mod beside;
mod transaction;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::JoinSet;
use tokio_postgres::{Client, SimpleQueryMessage};

use crate::ground::{Database, roll_prepared_back};
use crate::plan::WorkloadPlan;
use crate::random::Random;
use transaction::{Ending, Transaction};
pub(crate) use transaction::{Shape, refused_id};

/// A writer gives up its transaction if it waits for a lock for 1 s, for example a lock of a prepared
/// transaction.
const SESSION: &str = "SET lock_timeout = '1s'; SET client_min_messages = 'error'";

/// Returns the current WAL position. A writer runs this query right before BEGIN and right after COMMIT,
/// so the transaction lies between the two positions.
const POSITION: &str = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint";

/// Limit for the number of transactions of a writer, as a multiple of the planned number. While more faults are
/// to come, a writer continues after the planned number, so that the faults still find writes.
const MOST_ROUNDS: u64 = 2;

/// What the writers know about their transactions.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// For each transaction, by label: a WAL position at or before its begin.
    pub(crate) begun_after: HashMap<String, u64>,
    /// For each transaction whose COMMIT the server answered, by label: a WAL position at or after its end.
    pub(crate) committed_by: HashMap<String, u64>,
    /// Counts the transactions by shape, whether or not they committed.
    pub(crate) transactions: BTreeMap<Shape, u64>,
}

impl Written {
    fn merge(&mut self, other: Self) {
        self.begun_after.extend(other.begun_after);
        self.committed_by.extend(other.committed_by);
        for (shape, count) in other.transactions {
            *self.transactions.entry(shape).or_default() += count;
        }
    }
}

/// The running writers.
#[derive(Debug)]
pub(crate) struct Writers {
    tasks: JoinSet<Result<Written, String>>,
    beside: JoinSet<()>,
    /// True when no more faults will come.
    faults_are_over: Arc<AtomicBool>,
}

impl Writers {
    /// Starts the writers and the other activity. `makes_slots` means that slots are created while the writers
    /// write. In that case, no statement of the other activity in this database rewrites a table: PostgreSQL 15
    /// could otherwise create a slot that cannot be read (see `beside::MILD_NOISE`).
    pub(crate) fn start(
        database: &Database,
        plan: &WorkloadPlan,
        makes_slots: bool,
        random: &mut Random,
    ) -> Self {
        let faults_are_over = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        for number in 0..plan.writers {
            let writer = Writer {
                number,
                in_doubt: None,
                database: database.clone(),
                plan: plan.clone(),
                random: random.fork(),
                written: Written::default(),
            };
            tasks.spawn(writer.run(faults_are_over.clone()));
        }
        let beside = beside::start(database, plan, makes_slots, random);
        Self {
            tasks,
            beside,
            faults_are_over,
        }
    }

    /// Lets the writers finish, and returns the WAL positions and counts that they noted. Must be called
    /// when the faults are over.
    pub(crate) async fn finish(mut self) -> Result<Written, String> {
        self.faults_are_over.store(true, Ordering::Relaxed);
        let mut all = Written::default();
        while let Some(ended) = self.tasks.join_next().await {
            all.merge(ended.map_err(|e| format!("a writer: {e}"))??);
        }
        self.beside.shutdown().await;
        Ok(all)
    }
}

struct Writer {
    number: u64,
    /// The name of a transaction that failed with an error, if the writer meant to prepare it. The server may have
    /// prepared the transaction all the same. So before its next transaction, the writer tries to roll it back, because
    /// a prepared transaction keeps its locks.
    in_doubt: Option<String>,
    database: Database,
    plan: WorkloadPlan,
    random: Random,
    written: Written,
}

impl Writer {
    async fn run(mut self, faults_are_over: Arc<AtomicBool>) -> Result<Written, String> {
        let mut client: Option<Client> = None;
        for n in 0..self.plan.transactions * MOST_ROUNDS {
            if n >= self.plan.transactions && faults_are_over.load(Ordering::Relaxed) {
                break;
            }
            let connected = match client.take().filter(|client| !client.is_closed()) {
                Some(client) => client,
                None => self.connect().await?,
            };
            if let Some(gid) = self.in_doubt.take() {
                // Ignore an error, because usually it means that the transaction is not prepared. `tidy` rolls
                // back any prepared transaction that remains.
                let undo = format!("ROLLBACK PREPARED '{gid}'");
                let _ = connected.batch_execute(&undo).await;
            }
            let label = format!("{}-{n}", self.number);
            let is_refused = self.plan.poison.contains(&(self.number, n));
            let poison = is_refused.then(|| refused_id(self.number, n));
            let (database, random) = (&self.database.name, &mut self.random);
            let transaction = Transaction::draw(database, label, poison, &self.plan, random);
            *self
                .written
                .transactions
                .entry(transaction.shape)
                .or_default() += 1;
            if let Ok(Some(position)) = position(&connected, POSITION).await {
                let label = transaction.label.clone();
                self.written.begun_after.insert(label, position);
            }
            match run(&connected, &transaction).await {
                Ok(Some(position)) => {
                    self.written
                        .committed_by
                        .insert(transaction.label, position);
                }
                Ok(None) => {}
                // Ignore the error. Expected causes are a lock that was not available, a deadlock, a
                // deliberate division by zero, and a server that went away. The table shows whether the
                // transaction committed.
                Err(_) => {
                    // Ignore an error, which means that the connection broke. The writer then reconnects.
                    let _ = connected.batch_execute("ROLLBACK").await;
                    if let Ending::Prepare { gid, .. } = transaction.ending {
                        self.in_doubt = Some(gid);
                    }
                }
            }
            client = Some(connected);
            tokio::time::sleep(self.random.millis(0..=self.plan.pause_ms)).await;
        }
        Ok(self.written)
    }

    async fn connect(&self) -> Result<Client, String> {
        // The loop ends, because `Database::connect` fails if the server stays away.
        loop {
            let client = self.database.connect().await?;
            if client.batch_execute(SESSION).await.is_ok() {
                return Ok(client);
            }
        }
    }
}

/// Runs the transaction. Returns a WAL position at or after its end if the server answered the commit.
async fn run(
    client: &Client,
    transaction: &Transaction,
) -> Result<Option<u64>, tokio_postgres::Error> {
    let mut parts = transaction.parts.iter();
    // Without a pause, send the whole transaction in one message, as many drivers do.
    let mut batch = String::from("BEGIN");
    for part in parts.by_ref() {
        batch = format!("{batch}; {part}");
        if !transaction.pause.is_zero() {
            client.batch_execute(&batch).await?;
            tokio::time::sleep(transaction.pause).await;
            batch = String::from("SELECT 1");
        }
    }
    match &transaction.ending {
        Ending::Commit => position(client, &format!("{batch}; COMMIT; {POSITION}")).await,
        Ending::Rollback => {
            client.batch_execute(&format!("{batch}; ROLLBACK")).await?;
            Ok(None)
        }
        Ending::Prepare { gid, pause, commit } => {
            let prepare = format!("{batch}; PREPARE TRANSACTION '{gid}'");
            client.batch_execute(&prepare).await?;
            tokio::time::sleep(*pause).await;
            // Send `COMMIT PREPARED` or `ROLLBACK PREPARED` alone. PostgreSQL runs several statements in one
            // message as a transaction block, and refuses these two statements there.
            let end = if *commit { "COMMIT" } else { "ROLLBACK" };
            client
                .batch_execute(&format!("{end} PREPARED '{gid}'"))
                .await?;
            if *commit {
                position(client, POSITION).await
            } else {
                Ok(None)
            }
        }
    }
}

/// Runs `sql` and returns the WAL position that its last statement returns.
async fn position(client: &Client, sql: &str) -> Result<Option<u64>, tokio_postgres::Error> {
    let messages = client.simple_query(sql).await?;
    let row = messages.iter().rev().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    Ok(row.and_then(|text| text.parse().ok()))
}

/// Rolls back the prepared transactions that the writers left behind.
pub(crate) async fn tidy(database: &Database) -> Result<(), String> {
    roll_prepared_back(&database.connect().await?).await
}
