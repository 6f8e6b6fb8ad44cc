//! Observes which position the slot has confirmed and which events are recorded. Both can be seen
//! only while the schedule runs.
//!
//! One connection polls the slot every few milliseconds. Times are on the journal's clock and are
//! taken *after* the answer, so that an observation never seems earlier than it was. The watch may
//! miss an error of the relay that lasts only a few milliseconds, but it never blames a correct
//! relay.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pubsub_emulator::Journal;
use tokio::task::JoinHandle;
use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use crate::ground::Database;

const POLL_INTERVAL: Duration = Duration::from_millis(4);

const RECORDS_BELOW: &str = "SELECT count(*) FROM outbox.dispatch WHERE commit_lsn < $1";

/// Number of polls after which the watch reads the ids of all recorded events again.
const RECORDS_EVERY: u32 = 40;

/// An observation of the slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    /// When the watch received the server's answer with the confirmed position.
    pub(crate) at: Duration,
    pub(crate) confirmed: u64,
    /// The number of dispatch rows below the confirmed position, counted right after the server had
    /// answered with that position.
    pub(crate) records_below: u64,
}

/// Everything that was observed.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen {
    /// One sample for each change of the confirmed position.
    pub(crate) samples: Vec<Sample>,
    /// Maps an event id to a time at which the event was known to have a dispatch row.
    pub(crate) recorded_at: HashMap<String, Duration>,
    pub(crate) polls: u64,
}

/// The running watch. It ends when dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    task: JoinHandle<()>,
    journal: Journal,
    seen: Arc<Mutex<Seen>>,
}

impl Watch {
    /// Starts the watch. `has_table_rows` means that the relay may publish some rows from their table. The slot may
    /// already have confirmed the position of such an event when the relay writes the event's dispatch row. So
    /// `records_below` does not count the dispatch rows of these events.
    pub(crate) fn start(database: Database, journal: Journal, has_table_rows: bool) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let records_below = if has_table_rows {
            format!("{RECORDS_BELOW} AND mod(commit_lsn - '0/0', 8) <> 7")
        } else {
            RECORDS_BELOW.to_owned()
        };
        let task = tokio::spawn(run(database, records_below, journal.clone(), seen.clone()));
        Self {
            task,
            journal,
            seen,
        }
    }

    /// Reads the recorded events now, for example before a relay is restarted.
    pub(crate) async fn note_records(&self, client: &Client) -> Result<(), String> {
        note_records(client, &self.journal, &self.seen)
            .await
            .map_err(|e| format!("{e:?}"))
    }

    pub(crate) fn seen(&self) -> Seen {
        lock(&self.seen).clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock(seen: &Mutex<Seen>) -> std::sync::MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn run(database: Database, records_below: String, journal: Journal, seen: Arc<Mutex<Seen>>) {
    loop {
        // The server may be down, because outages are among the faults.
        if let Ok(client) = database.connect().await {
            let _ =
                poll_until_error(&client, &database.name, &records_below, &journal, &seen).await;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn poll_until_error(
    client: &Client,
    slot: &str,
    records_below: &str,
    journal: &Journal,
    seen: &Mutex<Seen>,
) -> Result<(), tokio_postgres::Error> {
    let position = client
        .prepare(
            "SELECT confirmed_flush_lsn FROM pg_replication_slots \
             WHERE slot_name = $1 AND confirmed_flush_lsn IS NOT NULL",
        )
        .await?;
    // Count in a separate statement, because the snapshot of the count must not be older than the
    // position.
    let records = client.prepare(records_below).await?;
    let mut last = None;
    for look in 0u32.. {
        let row = client.query_one(&position, &[&slot]).await?;
        let confirmed: PgLsn = row.get(0);
        let at = journal.now();
        lock(seen).polls += 1;
        if last.replace(confirmed) != Some(confirmed) {
            let row = client.query_one(&records, &[&confirmed]).await?;
            let records_below: i64 = row.get(0);
            lock(seen).samples.push(Sample {
                at,
                confirmed: confirmed.into(),
                records_below: records_below as u64,
            });
        }
        if look % RECORDS_EVERY == 0 {
            note_records(client, journal, seen).await?;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

async fn note_records(
    client: &Client,
    journal: &Journal,
    seen: &Mutex<Seen>,
) -> Result<(), tokio_postgres::Error> {
    let rows = client
        .query("SELECT event_id::text FROM outbox.dispatch", &[])
        .await?;
    let at = journal.now();
    let mut seen = lock(seen);
    for row in rows {
        seen.recorded_at.entry(row.get(0)).or_insert(at);
    }
    Ok(())
}
