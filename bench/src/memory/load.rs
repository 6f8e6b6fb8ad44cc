//! The loads, and how to run each load.

use std::path::Path;
use std::time::Duration;

use crate::backlog::Backlog;
use crate::cores::Cores;
use crate::database::Database;
use crate::peers::Emulator;
use crate::process::{self, Running};

const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// How long Pub/Sub stays down after the last row. By the end of this time, the relay has filled
/// its memory budget, and reads no more events until Pub/Sub is back.
const OUTAGE_AFTER_ROWS: Duration = Duration::from_secs(10);

/// How long a relay may make no progress before the measurement fails.
const STANDSTILL: Duration = Duration::from_secs(300);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    Outage,
    Transaction,
    Keys,
}

impl Load {
    pub(crate) const ALL: [Self; 3] = [Self::Outage, Self::Transaction, Self::Keys];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Outage => "outage",
            Self::Transaction => "one-transaction",
            Self::Keys => "distinct-keys",
        }
    }

    pub(crate) fn describe(self) -> &'static str {
        match self {
            Self::Outage => "Pub/Sub is down while the rows arrive, and comes back",
            Self::Transaction => "all rows in one transaction",
            Self::Keys => "an ordering key for every row",
        }
    }

    fn backlog(self, rows: u64) -> Backlog {
        let (rows_per_transaction, keys) = match self {
            Self::Outage => (Some(100), Some(1_000)),
            Self::Transaction => (None, Some(1_000)),
            Self::Keys => (Some(100), None),
        };
        Backlog::new(rows, rows_per_transaction, keys)
    }

    /// Runs the load. Returns the relay's peak memory, in units of 10^6 bytes.
    pub(crate) async fn peak_mb(self, binary: &Path, rows: u64) -> Result<f64, String> {
        let database = Database::start(binary).await?;
        database.copy_slot("postrider").await?;
        let emulator = Emulator::start(0, false, Cores::Shared)?;
        let host = emulator.host.clone();
        // For the load `Outage`, stop the emulator, so that nobody listens at its address until the
        // emulator is started again.
        let mut emulator = (self != Self::Outage).then_some(emulator);
        let mut relay = process::relay(binary, &database.url(), &host)?;
        // Write the rows only now, because they must arrive while the relay runs.
        database.load(&self.backlog(rows)).await?;
        let end = database.wal_position().await?;
        eprintln!(
            "  the rows are written, peak {:.1} MB",
            peak_mb(&mut relay)?
        );
        if self == Self::Outage {
            tokio::time::sleep(OUTAGE_AFTER_ROWS).await;
            if database
                .count("SELECT count(*) FROM outbox.dispatch")
                .await?
                > 0
            {
                return Err("something was published although Pub/Sub was down".into());
            }
            eprintln!("  Pub/Sub is back, peak {:.1} MB", peak_mb(&mut relay)?);
            emulator = Some(Emulator::start_at(&host)?);
        }
        wait_until_confirmed(&database, &end, &mut relay).await?;
        let recorded = database
            .count("SELECT count(*) FROM outbox.dispatch")
            .await?;
        if recorded != rows {
            return Err(format!("{recorded} of {rows} events have a dispatch row"));
        }
        let peak = peak_mb(&mut relay)?;
        drop((relay, emulator));
        Ok(peak)
    }
}

fn peak_mb(relay: &mut Running) -> Result<f64, String> {
    Ok(relay.usage()?.peak_rss_kib as f64 * 1024.0 / 1e6)
}

async fn wait_until_confirmed(
    database: &Database,
    end: &str,
    relay: &mut Running,
) -> Result<(), String> {
    let rest = format!(
        "SELECT greatest('{end}' - confirmed_flush_lsn, 0)::bigint FROM pg_replication_slots \
         WHERE slot_name = 'postrider'"
    );
    let mut best = u64::MAX;
    let mut since = std::time::Instant::now();
    loop {
        relay.usage()?;
        match database.count(&rest).await? {
            0 => return Ok(()),
            rest if rest < best => (best, since) = (rest, std::time::Instant::now()),
            rest if since.elapsed() > STANDSTILL => {
                return Err(format!("{rest} bytes of WAL stay unconfirmed"));
            }
            _ => {}
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
