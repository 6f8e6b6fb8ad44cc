//! A load generator that continues through every fault. Only one of its sessions writes at a time, so
//! insertion order is commit order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fault_proxy::{FaultProxy, Target};
use tokio::task::JoinHandle;
use tokio_postgres::NoTls;

use crate::harness::{Database, eventually, insert_orders_sql};

/// Number of rows per round.
const ROUND: u32 = 10;
/// Number of ordering keys.
const KEYS: u32 = 10;
/// How long the load pauses between two rounds, and before a reconnect.
const PAUSE: Duration = Duration::from_millis(15);

/// Inserts several hundred orders a second until the test stops it. Reconnects when its connection
/// breaks.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Load {
    pub(crate) fn start(database: &Database) -> Self {
        Self::at(database.url.clone())
    }

    pub(crate) fn at(url: String) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let rounds = Arc::new(AtomicU64::new(0));
        let (stopped, counted) = (stop.clone(), rounds.clone());
        let task = tokio::spawn(async move {
            while !stopped.load(Ordering::SeqCst) {
                if let Ok((client, connection)) = tokio_postgres::connect(&url, NoTls).await {
                    let driver = tokio::spawn(connection);
                    while !stopped.load(Ordering::SeqCst)
                        && client
                            .batch_execute(&insert_orders_sql(ROUND, KEYS))
                            .await
                            .is_ok()
                    {
                        counted.fetch_add(1, Ordering::SeqCst);
                        tokio::time::sleep(PAUSE).await;
                    }
                    driver.abort();
                }
                tokio::time::sleep(PAUSE).await;
            }
        });
        Self { stop, rounds, task }
    }

    /// Waits until about `rows` more rows are committed, rounded down to whole rounds.
    pub(crate) async fn wait_for_rows(&self, rows: u32) {
        let target = self.rounds.load(Ordering::SeqCst) + u64::from(rows / ROUND);
        eventually("rows are written", || async {
            (self.rounds.load(Ordering::SeqCst) >= target).then_some(())
        })
        .await;
    }

    /// Stops the load after the current round.
    pub(crate) async fn stop(self) {
        self.stop.store(true, Ordering::SeqCst);
        self.task.await.unwrap();
    }
}

/// Waits until the relay has recorded `more` further events.
pub(crate) async fn wait_for_more(database: &Database, more: i64) {
    const COUNT: &str = "SELECT count(*) FROM outbox.dispatch";
    let before = database.number(COUNT).await;
    eventually("more events are recorded", || async {
        (database.number(COUNT).await >= before + more).then_some(())
    })
    .await;
}

/// Starts a proxy in front of the database's server. Also returns the URL that leads through the proxy.
pub(crate) async fn proxied(database: &Database) -> (FaultProxy, String) {
    let (credentials, rest) = database.url.split_once('@').unwrap();
    let (address, name) = rest.split_once('/').unwrap();
    let proxy = FaultProxy::start(Target::tcp(address)).await.unwrap();
    let url = format!("{credentials}@{}/{name}", proxy.addr());
    (proxy, url)
}
