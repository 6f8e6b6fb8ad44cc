//! The services of the shop: each transaction updates some orders and inserts an event for each of
//! them.
//!
//! The services know nothing about the relay. Several writers work on the same orders. UPDATE locks
//! an order until the commit and returns its new version, which the writer puts into the event. So
//! the versions of an order follow the order of the commits. Some transactions are rolled back on
//! purpose, and their events must never arrive.

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_postgres::Statement;

use crate::error::{Result, failed};
use crate::ledger::{OrderId, Step};
use crate::session::Session;
use crate::{SharedLedger, lock};

/// Number of writers: enough that writers wait for each other's row locks, and few enough for a
/// small machine.
pub(crate) const WRITERS: u32 = 4;
/// Number of orders: enough that a batch rarely contains only one order, and few enough that each
/// order gets many versions.
pub(crate) const ORDERS: u32 = 200;

/// Average number of events per transaction. A transaction has one to three events.
const EVENTS_PER_TRANSACTION: u32 = 2;
/// One of this many transactions is rolled back.
const ROLLBACK_EVERY: u32 = 50;

const MOVE_ON: &str = "\
    update public.orders set version = version + 1, changed_at = now(), status = case status \
        when 'placed' then 'paid' when 'paid' then 'packed' when 'packed' then 'shipped' \
        when 'shipped' then 'delivered' else 'placed' end \
    where id = $1 returning version, status";

const EMIT: &str = "\
    select outbox.emit('order', $1::int::text, 'Order' || initcap($2::text), \
        jsonb_build_object('order', $1::int, 'status', $2::text), version => $3::bigint)";

/// The running writers. They end when this value is dropped.
#[derive(Debug)]
pub(crate) struct Writers {
    tasks: JoinSet<Result<()>>,
    stop: watch::Sender<bool>,
}

impl Writers {
    /// Starts the writers. Together they aim at `rate` events per second.
    pub(crate) fn start(url: &str, rate: u32, ledger: &SharedLedger) -> Self {
        let (stop, stopped) = watch::channel(false);
        let pause = Duration::from_secs(1) * WRITERS * EVENTS_PER_TRANSACTION / rate;
        let mut tasks = JoinSet::new();
        for number in 0..WRITERS {
            let (url, ledger, stopped) = (url.to_owned(), ledger.clone(), stopped.clone());
            tasks.spawn(async move {
                let writer = Writer::connect(number, &url, ledger).await?;
                writer.run(pause, stopped).await
            });
        }
        Self { tasks, stop }
    }

    /// Returns an error if a writer has ended.
    pub(crate) fn must_run(&mut self) -> Result<()> {
        match self.tasks.try_join_next() {
            None => Ok(()),
            Some(Ok(Err(error))) => Err(failed("a writer has ended").caused_by(error)),
            Some(Ok(Ok(()))) => Err(failed("a writer has ended")),
            Some(Err(panic)) => Err(failed("a writer has ended").caused_by(panic)),
        }
    }

    /// Lets each writer finish its current transaction, and waits until all writers have ended.
    pub(crate) async fn finish(mut self) -> Result<()> {
        // An error means that all writers have ended. The results below say why.
        let _ = self.stop.send(true);
        while let Some(ended) = self.tasks.join_next().await {
            ended.map_err(|panic| failed("a writer has ended").caused_by(panic))??;
        }
        Ok(())
    }
}

struct Writer {
    number: u32,
    sql: Session,
    move_on: Statement,
    emit: Statement,
    ledger: SharedLedger,
}

impl Writer {
    async fn connect(number: u32, url: &str, ledger: SharedLedger) -> Result<Self> {
        let sql = Session::connect(url, "shop").await?;
        let (move_on, emit) = (sql.prepare(MOVE_ON).await?, sql.prepare(EMIT).await?);
        Ok(Self {
            number,
            sql,
            move_on,
            emit,
            ledger,
        })
    }

    async fn run(mut self, pause: Duration, stopped: watch::Receiver<bool>) -> Result<()> {
        let mut beat = tokio::time::interval(pause);
        beat.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut transaction = 0;
        while !*stopped.borrow() {
            beat.tick().await;
            self.transact(transaction).await?;
            transaction += 1;
        }
        Ok(())
    }

    /// Runs one transaction of a service, which writes business rows and their events.
    async fn transact(&mut self, number: u32) -> Result<()> {
        let orders = orders_of(self.number, number);
        let transaction = self.sql.transaction().await?;
        let mut steps = Vec::with_capacity(orders.len());
        for order in orders {
            let row = transaction.query_one(&self.move_on, &[&order]).await?;
            let (version, status): (i64, String) = (row.get(0), row.get(1));
            transaction
                .execute(&self.emit, &[&order, &status, &version])
                .await?;
            steps.push(Step { order, version });
        }
        if number % ROLLBACK_EVERY == ROLLBACK_EVERY - 1 {
            transaction.rollback().await?;
            lock(&self.ledger).rolled_back(steps.len());
            return Ok(());
        }
        lock(&self.ledger).committing(&steps, Instant::now());
        transaction.commit().await?;
        lock(&self.ledger).committed(steps.len());
        Ok(())
    }
}

/// Returns one to three different orders, sorted. Because each writer locks orders in ascending order, two
/// writers cannot deadlock.
fn orders_of(writer: u32, transaction: u32) -> Vec<OrderId> {
    /// Multipliers that spread consecutive numbers over the orders. Any large odd numbers work.
    const SPREAD: (u32, u32) = (2_654_435_761, 2_246_822_519);
    let count = 1 + transaction % (2 * EVENTS_PER_TRANSACTION - 1);
    let mixed = writer.wrapping_mul(SPREAD.0) ^ transaction.wrapping_mul(SPREAD.1);
    let start = (mixed >> 8) % ORDERS;
    let mut orders: Vec<OrderId> = (0..count)
        .map(|n| (1 + (start + n * ORDERS / 3) % ORDERS).cast_signed())
        .collect();
    orders.sort_unstable();
    orders
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_order_is_updated_and_no_transaction_takes_one_twice() {
        let mut seen = BTreeSet::new();
        let mut events = 0;
        for transaction in 0..3_000 {
            let orders = orders_of(transaction % WRITERS, transaction);
            assert!(orders.is_sorted_by(|a, b| a < b), "{orders:?}");
            events += orders.len() as u32;
            seen.extend(orders);
        }
        assert_eq!(events, 3_000 * EVENTS_PER_TRANSACTION);
        assert_eq!(seen, (1..=ORDERS.cast_signed()).collect());
    }
}
