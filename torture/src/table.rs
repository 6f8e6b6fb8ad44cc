//! Faults of the captured table itself: it is replaced by a copy, recreated, left out of the
//! settings for a while, or gets a row that the stream cannot deliver.

use std::time::{Duration, Instant};

use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use crate::fault::{Down, Replacement};
use crate::gather::one;
use crate::ground::execute;
use crate::loss::{LIMIT, POLL_INTERVAL, not_after};
use crate::relay::Relay;
use crate::stage::Stage;

/// A short lock timeout, so that DDL does not make the writers wait long.
const SESSION: &str = "SET lock_timeout = '200ms'; SET client_min_messages = 'error'";

/// Copies the rows to the new table. The copies keep their `seq` and `inserted_xid`.
const COPY: &str = "\
    INSERT INTO outbox.made_anew SELECT * FROM outbox.events ORDER BY seq; \
    DROP TABLE IF EXISTS outbox.put_away; \
    ALTER TABLE outbox.events RENAME TO put_away";

/// Drops the table. `shop.former` keeps the rows, so that the judges still know all committed
/// events.
const DROP: &str = "\
    INSERT INTO shop.former \
        SELECT id, aggregatetype, aggregateid, version, payload FROM outbox.events \
        WHERE payload->>'t' IS DISTINCT FROM 'history'; \
    DROP TABLE outbox.events";

/// Creates another table, and adds it to the publication. For a while, [`Stage::roll_settings_back`] runs a relay
/// whose settings name this table instead of `outbox.events`.
const OTHER: &str = "\
    CREATE TABLE IF NOT EXISTS shop.other (LIKE outbox.events INCLUDING ALL); \
    GRANT USAGE ON SCHEMA shop TO postrider_relay; \
    GRANT SELECT ON shop.other TO postrider_relay; \
    ALTER PUBLICATION postrider ADD TABLE shop.other";

/// Inserts a row that is too long. PostgreSQL sends the `bytea` column as hexadecimal text, which is
/// longer than the 64 MiB that the relay accepts in one message of the stream. No published message
/// contains the column.
const TOO_LONG: &str = "\
    INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload, scan) \
    VALUES ('order', 'too-long', 'Scanned', 1, jsonb_build_object('t', 'too-long'), \
        convert_to(repeat('x', 36000000), 'UTF8'))";

impl Stage<'_> {
    /// Replaces `outbox.events` by another table, in one transaction.
    pub(crate) async fn replace_table(
        &mut self,
        down: Down,
        how: Replacement,
    ) -> Result<(), String> {
        self.streams().await?;
        let seat = self.take_down(down).await?;
        let put_away = match how {
            Replacement::Copied => COPY,
            Replacement::Recreated => DROP,
        };
        let sql = format!(
            "BEGIN; LOCK TABLE outbox.events IN ACCESS EXCLUSIVE MODE; \
             CREATE TABLE outbox.made_anew (LIKE outbox.events INCLUDING ALL); {put_away}; \
             ALTER TABLE outbox.made_anew RENAME TO events; \
             GRANT SELECT ON outbox.events TO postrider_relay; \
             ALTER PUBLICATION postrider SET TABLE outbox.events; COMMIT"
        );
        alter(&self.database.connect().await?, &sql).await?;
        self.replace(seat, Duration::ZERO).await
    }

    /// For a while, lets a relay whose settings name another table read from the slot. In production
    /// this happens when a deployment is rolled back and then rolled forward again.
    pub(crate) async fn roll_settings_back(&mut self, span: Duration) -> Result<(), String> {
        self.streams().await?;
        let Some(seat) = self.take_down(Down::Stopped).await? else {
            return Ok(());
        };
        let client = self.database.connect().await?;
        alter(&client, OTHER).await?;
        // The other relay gets the events that the first relay had not confirmed, and ignores them.
        // So the gap begins at the confirmed position.
        let confirmed = "SELECT confirmed_flush_lsn FROM pg_replication_slots \
                         WHERE slot_name = current_database()";
        let before: PgLsn = one(&client, confirmed).await?;
        let launch = self.seats[seat].launch.with_table("shop.other");
        let mut other = Relay::start(&launch, seat, self.log.clone())?;
        let deadline = Instant::now() + LIMIT;
        while !self.log.has_streamed(other.pid()) {
            if let Some(status) = other.has_ended()? {
                return Err(format!("the relay of another table ended: {status}"));
            }
            not_after(deadline, "the relay of another table does not stream")?;
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        tokio::time::sleep(span).await;
        other.stop().await?;
        let after: PgLsn = one(&client, "SELECT pg_current_wal_insert_lsn()").await?;
        self.gaps.push((before.into(), after.into()));
        self.replace(Some(seat), Duration::ZERO).await
    }

    /// Commits a row that PostgreSQL cannot convert to UTF-8. Also commits earlier and later rows of the same
    /// key, and rows of another key.
    pub(crate) async fn write_undecodable(&mut self, number: u64) -> Result<(), String> {
        self.streams().await?;
        let client = self.database.connect().await?;
        let (id, text) = (undecodable_id(number), self.encoding.undecodable());
        // Put the bytes that have no form in UTF-8 into a text column or into a JSON value.
        let (event_type, payload) = if self.random.per_mille(500) {
            (text, "'Bad'")
        } else {
            ("'Bad'", text)
        };
        let sql = format!(
            "BEGIN; {first} \
             INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, version, payload) \
             VALUES ('{id}', 'order', 'undecodable-{number}', {event_type}, 2, \
                 jsonb_build_object('t', 'undecodable-{number}-2', 'text', {payload})); \
             INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             SELECT 'invoice', 'beside-{number}', 'Good', i, jsonb_build_object('t', 'beside-{number}') \
             FROM generate_series(1, 20) i; COMMIT; {later}",
            first = of_undecodable_key(number, &[1]),
            later = of_undecodable_key(number, &[3, 4]),
        );
        execute(&client, &sql).await
    }

    /// Commits a row that ends the session of every relay that reads it.
    pub(crate) async fn write_too_long(&mut self) -> Result<(), String> {
        self.streams().await?;
        let client = self.database.connect().await?;
        let column = "ALTER TABLE outbox.events ADD COLUMN IF NOT EXISTS scan bytea";
        alter(&client, column).await?;
        execute(&client, TOO_LONG).await
    }
}

/// The id of a row that PostgreSQL cannot send in the stream.
pub(crate) fn undecodable_id(number: u64) -> String {
    format!("bad00000-0000-4000-8001-{number:012x}")
}

/// SQL that inserts rows with these versions. Their key is the key of an undecodable row, whose version is 2.
fn of_undecodable_key(number: u64, versions: &[u64]) -> String {
    let rows = versions.iter().map(|version| {
        format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             VALUES ('order', 'undecodable-{number}', 'Good', {version}, \
                 jsonb_build_object('t', 'undecodable-{number}-{version}'));"
        )
    });
    rows.collect()
}

/// Runs `sql`. Retries until the locks that it needs are available.
async fn alter(client: &Client, sql: &str) -> Result<(), String> {
    execute(client, SESSION).await?;
    let deadline = Instant::now() + LIMIT;
    while let Err(error) = execute(client, sql).await {
        execute(client, "ROLLBACK").await?;
        not_after(deadline, &error)?;
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}
