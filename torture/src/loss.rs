//! Faults of the slot and the publication, and the release of quarantined events as an operator
//! would do it.

use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::process::Command;
use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use crate::fault::{Down, Loss, Unpublished};
use crate::gather::{count, one};
use crate::ground::execute;
use crate::relay::{Relay, binary};
use crate::stage::Stage;

/// How long each wait for PostgreSQL or a relay may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Number of WAL segments to fill while `max_slot_wal_keep_size` is 1 MB, so that the server
/// invalidates the slot.
const SEGMENTS: usize = 4;

/// Counts the rows of `outbox.relay` that show a clean stop or an unfinished recovery.
const LEFT: &str =
    "SELECT count(*) FROM outbox.relay WHERE confirmed_is_final OR recovering IS NOT NULL";

/// Counts the events that wait for an operator.
const IN_QUARANTINE: &str = "SELECT count(*) FROM outbox.dispatch WHERE state = 'quarantined'";
/// Counts the events that should be published but are not yet.
const UNDELIVERED: &str =
    "SELECT count(*) FROM outbox.dispatch WHERE state IN ('quarantined', 'released')";

impl Stage<'_> {
    /// Waits until a relay has recorded a confirmed position. If the slot were lost earlier, the
    /// next relay would treat its own start as the first start.
    pub(crate) async fn served(&mut self) -> Result<(), String> {
        let client = self.database.connect().await?;
        let deadline = Instant::now() + LIMIT;
        let served = "SELECT count(*) FROM outbox.relay WHERE confirmed_lsn IS NOT NULL";
        while count(&client, served).await? == 0 {
            self.relays_must_run()?;
            not_after(deadline, "no relay has taken the slot")?;
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Waits until one of the relays has logged that it streams.
    pub(crate) async fn streams(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + LIMIT;
        let log = self.log.clone();
        let streams = |relay: &Relay| log.has_streamed(relay.pid());
        while !self.relays.iter().any(streams) {
            self.relays_must_run()?;
            not_after(deadline, "no relay streams")?;
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Stops all relays by SIGTERM.
    pub(crate) async fn stop_relays(&mut self) -> Result<(), String> {
        for relay in std::mem::take(&mut self.relays) {
            relay.stop().await?;
        }
        Ok(())
    }

    /// Drops, recreates or invalidates the slot without telling the relay.
    pub(crate) async fn lose_slot(&mut self, down: Down, loss: Loss) -> Result<(), String> {
        if down == Down::Stopped {
            // A relay that is stopped before it streams records no final position. So wait until it streams.
            self.streams().await?;
        }
        let seat = self.take_down(down).await?;
        let client = self.database.connect().await?;
        let slot = &self.database.name;
        // If the relay was stopped before its session began, it has recorded no position. The next relay could then
        // not notice a recreated slot. So in this case, drop the slot and do not recreate it.
        let is_told = down != Down::Stopped || count(&client, LEFT).await? > 0;
        match loss {
            Loss::Dropped => drop_slot(&client, slot).await?,
            Loss::Recreated if !is_told => drop_slot(&client, slot).await?,
            Loss::Recreated => {
                drop_slot(&client, slot).await?;
                let create =
                    format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')");
                // Ignore an error, because a running relay may have recreated the slot already.
                let _ = client.batch_execute(&create).await;
            }
            Loss::Invalidated => invalidate(&client).await?,
        }
        self.replace(seat, Duration::ZERO).await
    }

    /// Removes the outbox table from the publication or from the relay's settings, and adds it
    /// again after `span`.
    pub(crate) async fn leave_out(
        &mut self,
        down: Down,
        how: Unpublished,
        span: Duration,
    ) -> Result<(), String> {
        let (out, back) = match how {
            Unpublished::NotInSettings => return self.roll_settings_back(span).await,
            Unpublished::TableOut => (
                "ALTER PUBLICATION postrider DROP TABLE outbox.events",
                "ALTER PUBLICATION postrider ADD TABLE outbox.events",
            ),
            Unpublished::PublicationDropped => (
                "DROP PUBLICATION postrider",
                "CREATE PUBLICATION postrider FOR TABLE outbox.events \
                     WITH (publish = 'insert', publish_via_partition_root = true)",
            ),
        };
        // Wait until the relay streams. A relay that starts while the publication is wrong exits,
        // as it should, but the harness would report that as an error.
        self.streams().await?;
        let seat = self.take_down(down).await?;
        let client = self.database.connect().await?;
        let position = "SELECT pg_current_wal_insert_lsn()";
        let before: PgLsn = one(&client, position).await?;
        execute(&client, out).await?;
        tokio::time::sleep(span).await;
        execute(&client, back).await?;
        let after: PgLsn = one(&client, position).await?;
        self.gaps.push((before.into(), after.into()));
        self.replace(seat, Duration::ZERO).await
    }

    /// Acts like an operator who has fixed the cause of the refusals: lifts all refusals and
    /// releases everything in quarantine.
    pub(crate) async fn release(&mut self) -> Result<(), String> {
        for id in self.poison.drain(..) {
            self.pubsub.lift(id);
        }
        let client = self.database.connect().await?;
        if count(&client, IN_QUARANTINE).await? == 0 {
            return Ok(());
        }
        let done = Command::new(binary()?)
            .args(["quarantine", "release", "--all"])
            .env_clear()
            .env("DATABASE_URL", &self.database.relay_url)
            .env("POSTRIDER_SLOT", &self.database.name)
            .stdin(Stdio::null())
            .output()
            .await
            .map_err(|e| format!("postrider quarantine: {e}"))?;
        if done.status.success() {
            Ok(())
        } else {
            Err(format!(
                "postrider quarantine release: {}",
                String::from_utf8_lossy(&done.stderr)
            ))
        }
    }

    /// Releases repeatedly until every quarantined event is published. One release is not enough:
    /// an event that was refused just before the refusals were lifted may enter quarantine after
    /// the first release.
    pub(crate) async fn release_all(&mut self) -> Result<(), String> {
        let client = self.database.connect().await?;
        let deadline = Instant::now() + LIMIT;
        loop {
            self.release().await?;
            if count(&client, UNDELIVERED).await? == 0 {
                return Ok(());
            }
            self.relays_must_run()?;
            not_after(deadline, "released events are not published")?;
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// Terminates the session that reads from the slot, and drops the slot. Repeats both until the slot
/// is gone, because a new session may take the slot in between.
async fn drop_slot(client: &Client, slot: &str) -> Result<(), String> {
    let deadline = Instant::now() + LIMIT;
    let throw_out = format!(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
         WHERE slot_name = '{slot}' AND active_pid IS NOT NULL"
    );
    let remove = format!(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
         WHERE slot_name = '{slot}'"
    );
    loop {
        execute(client, &throw_out).await?;
        if execute(client, &remove).await.is_ok() {
            return Ok(());
        }
        not_after(deadline, "the slot cannot be dropped")?;
        tokio::time::sleep(POLL_INTERVAL / 5).await;
    }
}

/// Makes the server invalidate every slot that still needs older WAL segments: lowers
/// `max_slot_wal_keep_size`, fills some segments, and resets the setting.
async fn invalidate(client: &Client) -> Result<(), String> {
    execute(client, "ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'").await?;
    execute(client, "SELECT pg_reload_conf()").await?;
    for _ in 0..SEGMENTS {
        execute(
            client,
            "SELECT pg_logical_emit_message(false, 'torture', 'fill')",
        )
        .await?;
        execute(client, "SELECT pg_switch_wal()").await?;
    }
    execute(client, "CHECKPOINT").await?;
    execute(client, "ALTER SYSTEM RESET max_slot_wal_keep_size").await?;
    execute(client, "SELECT pg_reload_conf()").await
}

pub(crate) fn not_after(deadline: Instant, what: &str) -> Result<(), String> {
    if Instant::now() > deadline {
        Err(format!("{what} within {LIMIT:?}"))
    } else {
        Ok(())
    }
}
