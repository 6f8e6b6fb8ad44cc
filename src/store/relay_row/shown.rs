//! Reads the relay's row for commands, whose role might not be allowed to read it.

use std::time::Duration;

use decoder::Lsn;
use serde::Serialize;
use slot_manager::health::RecordedPosition;
use slot_manager::{DatabaseOrigin, SlotName};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::PgLsn;

use super::RecordKeeping;
use crate::condition::{Condition, PruneRun};
use crate::error::Result;
use crate::postgres::Sql;

/// Age from which a condition counts as out of date. The relay writes a lasting condition about every 30
/// seconds, so at this age two writes are missing.
const SHOWN_FOR: Duration = Duration::from_secs(75);

/// Reads the columns of migrations 15 and 17 through JSON, so that the query also works without these
/// migrations.
const RELAY: &str = "\
    select instance, to_char(since at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'), \
           system_identifier, confirmed_lsn, confirmed_is_final, recovering, dispatch, database_oid, \
           to_jsonb(relay) ->> 'condition', \
           extract(epoch from clock_timestamp() - (to_jsonb(relay) ->> 'condition_at')::timestamptz)::float8, \
           to_jsonb(relay) ->> 'pruning', \
           extract(epoch from clock_timestamp() - (to_jsonb(relay) ->> 'pruned_at')::timestamptz)::float8, \
           extract(epoch from clock_timestamp() - updated_at)::float8 \
    from outbox.relay where slot = $1";

/// The relay's row in `outbox.relay`, as `slot show` shows it.
#[derive(Debug, Serialize)]
pub(crate) struct RelayRow {
    pub(crate) instance: String,
    /// In RFC 3339, UTC.
    pub(crate) since: String,
    pub(crate) system_identifier: String,
    #[serde(skip)]
    database_oid: Option<u32>,
    #[serde(skip)]
    confirmed_lsn: Option<Lsn>,
    #[serde(skip)]
    confirmed_is_final: bool,
    /// Why a recovery is pending or running; `None` if there is none.
    pub(crate) recovering: Option<String>,
    /// Which events get a row in `outbox.dispatch`: `full` or `exceptions`. After a change to `full`,
    /// this stays `exceptions` until an audit or a recovery has resolved all events without a row.
    #[serde(rename = "dispatch")]
    pub(crate) records: RecordKeeping,
    /// Why delivery is held up or late, or which check the relay cannot make. `None` if the relay has reported nothing
    /// within the last 75 seconds.
    pub(crate) condition: Option<Condition>,
    /// How long ago the relay wrote the condition; zero if there is none.
    #[serde(skip)]
    pub(crate) condition_age: Duration,
    /// How long ago the row was last updated, for example with the confirmed position.
    #[serde(skip)]
    pub(crate) updated_ago: Duration,
    /// How the relay's last pruning run ended. `None` if no run has ended since the relay began to
    /// serve the slot.
    pub(crate) pruning: Option<ShownPruning>,
}

/// A pruning run of the relay.
#[derive(Debug, Serialize)]
pub(crate) struct ShownPruning {
    pub(crate) ended_seconds_ago: f64,
    #[serde(flatten)]
    pub(crate) run: PruneRun,
}

/// Reads the relay's row. Returns `None` if there is no row, or if the relay's tables do not exist.
///
/// # Errors
/// Database errors, such as `privilege-missing`, because without the row a command cannot say whether the relay
/// delivers.
pub(crate) async fn read(sql: &Sql, slot: &SlotName) -> Result<Option<RelayRow>> {
    match sql.query_opt(RELAY, &[&slot.as_str()]).await {
        Ok(row) => Ok(row.map(|row| {
            let confirmed: Option<PgLsn> = row.get(3);
            let ago = |column| {
                let seconds: Option<f64> = row.get(column);
                Duration::try_from_secs_f64(seconds.unwrap_or_default()).unwrap_or_default()
            };
            RelayRow {
                instance: row.get(0),
                since: row.get(1),
                system_identifier: row.get(2),
                database_oid: row.get(7),
                confirmed_lsn: confirmed.map(|lsn| Lsn::new(lsn.into())),
                confirmed_is_final: row.get(4),
                recovering: row.get(5),
                records: RecordKeeping::recorded(row.get(6)),
                condition: said(row.get(8), row.get(9)),
                condition_age: ago(9),
                updated_ago: ago(12),
                pruning: pruned(row.get(10), row.get(11)),
            }
        })),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns the condition that a relay last wrote, however long ago. `None` if the row has none. The ages in the
/// condition are as of now.
///
/// # Errors
/// Database errors.
pub(crate) async fn last_condition(sql: &Sql, slot: &SlotName) -> Result<Option<Condition>> {
    const STATEMENT: &str = "\
        select to_jsonb(relay) ->> 'condition', \
               extract(epoch from clock_timestamp() \
                   - (to_jsonb(relay) ->> 'condition_at')::timestamptz)::float8 \
        from outbox.relay where slot = $1";
    let row = sql.query_opt(STATEMENT, &[&slot.as_str()]).await?;
    Ok(row.and_then(|row| condition(row.get(0), row.get(1))))
}

/// Returns the condition that the relay wrote `seconds_ago`, or `None` if the condition is out of date.
fn said(json: Option<&str>, seconds_ago: Option<f64>) -> Option<Condition> {
    let ago = seconds_ago.filter(|ago| *ago < SHOWN_FOR.as_secs_f64());
    condition(json, ago)
}

/// Returns the condition that the relay wrote `seconds_ago`, with its ages as of now.
fn condition(json: Option<&str>, seconds_ago: Option<f64>) -> Option<Condition> {
    let mut condition: Condition = serde_json::from_str(json?).ok()?;
    let ago = seconds_ago?;
    condition.for_seconds += ago;
    let left = condition.caught_up_in_seconds;
    condition.caught_up_in_seconds = left.map(|seconds| (seconds - ago).max(1.0));
    // Zero means that no event is pending, so do not add the elapsed time: show no age.
    let oldest = condition.oldest_seconds.filter(|age| *age > 0.0);
    condition.oldest_seconds = oldest.map(|age| age + ago);
    for topic in &mut condition.topics {
        topic.for_seconds += ago;
        topic.oldest_seconds = topic.oldest_seconds.map(|age| age + ago);
        for key in &mut topic.keys {
            key.oldest_seconds += ago;
        }
    }
    Some(condition)
}

fn pruned(json: Option<&str>, seconds_ago: Option<f64>) -> Option<ShownPruning> {
    Some(ShownPruning {
        ended_seconds_ago: seconds_ago?,
        run: serde_json::from_str(json?).ok()?,
    })
}

impl RelayRow {
    /// Whether the row belongs to the relay whose session has this `application_name`. Compares only the end
    /// of the name, because PostgreSQL replaces some characters of a host name.
    pub(crate) fn is_of(&self, application_name: &str) -> bool {
        let end = self.instance.rsplit('/').next().unwrap_or_default();
        application_name.rsplit('/').next() == Some(end)
    }

    /// Whether a relay has served the slot.
    pub(crate) fn has_confirmed(&self) -> bool {
        self.confirmed_lsn.is_some()
    }

    /// Returns the columns from which the slot's health is judged.
    pub(crate) fn position(&self) -> Option<RecordedPosition> {
        Some(RecordedPosition {
            origin: DatabaseOrigin {
                system_identifier: self.system_identifier.parse().ok()?,
                database_oid: self.database_oid,
            },
            confirmed_lsn: self.confirmed_lsn,
            is_final: self.confirmed_is_final,
        })
    }
}

/// Returns the last position that a relay on this slot has confirmed. If a position is recorded but the slot no
/// longer exists, the stream may have missed events. Returns `None` if no relay has used the slot, if the relay's
/// tables do not exist, or if this role has no privilege to read them.
///
/// # Errors
/// Database errors.
pub(crate) async fn served_before(sql: &Sql, slot: &SlotName) -> Result<Option<Lsn>> {
    const STATEMENT: &str = "select confirmed_lsn from outbox.relay where slot = $1";
    match sql.query_opt(STATEMENT, &[&slot.as_str()]).await {
        Ok(row) => {
            let confirmed: Option<PgLsn> = row.and_then(|row| row.get(0));
            Ok(confirmed.map(|lsn| Lsn::new(lsn.into())))
        }
        Err(error) if not_to_be_read(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Lists the slots that have a row in `outbox.relay`.
///
/// # Errors
/// Database errors.
pub(crate) async fn served_slots(sql: &Sql) -> Result<Vec<String>> {
    let rows = sql.query("select slot from outbox.relay", &[]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Whether a statement failed because the relay's tables do not exist, or because this role has no privilege
/// to read them.
fn not_to_be_read(error: &tokio_postgres::Error) -> bool {
    is_absent(error) || error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE)
}

/// Whether a statement failed because the relay's tables do not exist.
fn is_absent(error: &tokio_postgres::Error) -> bool {
    let states = [
        SqlState::UNDEFINED_TABLE,
        SqlState::INVALID_SCHEMA_NAME,
        SqlState::UNDEFINED_COLUMN,
    ];
    error.code().is_some_and(|code| states.contains(code))
}
