//! Finds, creates, drops and advances slots, and waits until a slot in use is free.

use std::time::{Duration, Instant};

use decoder::Lsn;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{PgLsn, Type};
use tokio_postgres::{Client, SimpleQueryMessage};

use crate::slot::get;
use crate::{Slot, SlotError, SlotName, WalStatus, query, retention, sql};

/// How often to check whether a slot in use is free. This delays a takeover by half a second at most, and two
/// small catalogue queries a second cost almost nothing.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The options of a new slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CreateOptions {
    /// Whether the server synchronises the slot to standby servers (PostgreSQL 17 and newer).
    pub failover: bool,
}

/// Lists the slots of the whole cluster, sorted by name.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn list(client: &Client) -> Result<Vec<Slot>, SlotError> {
    read(client, None).await
}

/// Finds the slot of this name, of any kind.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn find(client: &Client, name: &SlotName) -> Result<Option<Slot>, SlotError> {
    Ok(read(client, Some(name.as_str())).await?.pop())
}

async fn read(client: &Client, name: Option<&str>) -> Result<Vec<Slot>, SlotError> {
    let action = "reading pg_replication_slots";
    let rows = query::all(client, action, sql::SLOTS, &[(&name, Type::TEXT)]).await?;
    rows.iter().map(Slot::from_row).collect()
}

/// Returns the slot's confirmed position if the server process `reader` reads from the slot, otherwise
/// `None`. Also returns `None` if the slot was dropped and created again, because `reader` does not read from
/// the new slot.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn confirmed_by_reader(
    client: &Client,
    name: &SlotName,
    reader: i32,
) -> Result<Option<Lsn>, SlotError> {
    let action = "asking who reads from the slot";
    let parameters = [
        (&name.as_str() as _, Type::TEXT),
        (&reader as _, Type::INT4),
    ];
    let statement = sql::activity::CONFIRMED_BY_READER;
    let Some(row) = query::first(client, action, statement, &parameters).await? else {
        return Ok(None);
    };
    let confirmed: Option<PgLsn> = get(&row, "confirmed_flush_lsn")?;
    Ok(confirmed.map(|lsn| Lsn::new(lsn.into())))
}

/// Terminates the session that reads from the slot. Returns whether there was such a session.
///
/// # Errors
/// [`SlotError::Database`], with SQLSTATE 42501 when our role has no right to terminate that session.
pub async fn end_reader(client: &Client, name: &SlotName) -> Result<bool, SlotError> {
    let action = "ending the session that reads from the slot";
    let parameters = [(&name.as_str() as _, Type::TEXT)];
    let row = query::first(client, action, sql::activity::END_READER, &parameters).await?;
    Ok(row.is_some())
}

/// Creates a `pgoutput` slot and returns its consistent point. Every transaction that commits after
/// this point will be streamed.
///
/// Create the publication before the slot. PostgreSQL cannot stream rows that are inserted after the slot was
/// created but before the publication was.
///
/// PostgreSQL first waits until all transactions that are running now have ended, but at most `timeout`.
/// Dropping the future does not stop this wait.
///
/// # Errors
/// [`SlotError::CreationBlocked`] after `timeout`, with the transactions that blocked the creation. No slot
/// is left behind.
/// Also [`SlotError::SlotExists`], [`SlotError::NoSlotLeft`], [`SlotError::NoReplicationRight`],
/// [`SlotError::WalLevel`], [`SlotError::FailoverUnsupported`], [`SlotError::Database`].
pub async fn create(
    client: &Client,
    name: &SlotName,
    options: CreateOptions,
    timeout: Duration,
) -> Result<Lsn, SlotError> {
    let statement = sql::create_slot(name, options.failover, timeout);
    let messages = match client.simple_query(&statement).await {
        Ok(messages) => messages,
        Err(error) => return Err(creation_error(client, name, timeout, error).await),
    };
    let lsn = messages.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    let lsn = lsn.expect("invariant: a function that succeeded returns its row");
    Ok(lsn.parse().expect("invariant: pg_lsn prints as an LSN"))
}

async fn creation_error(
    client: &Client,
    name: &SlotName,
    timeout: Duration,
    source: tokio_postgres::Error,
) -> SlotError {
    let Some(code) = source.code().cloned() else {
        return SlotError::database("creating a replication slot")(source);
    };
    if code == SqlState::QUERY_CANCELED || code == SqlState::LOCK_NOT_AVAILABLE {
        return match retention::blockers_of_creation(client).await {
            Ok(blockers) => SlotError::CreationBlocked {
                slot: name.clone(),
                timeout,
                blockers,
            },
            Err(error) => error,
        };
    }
    if code == SqlState::UNDEFINED_FUNCTION {
        return SlotError::FailoverUnsupported;
    }
    if code == SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE {
        // This SQLSTATE can mean that `wal_level` is too low, but it has other causes too. So read the setting.
        let row = client.query_typed(sql::WAL_LEVEL, &[]).await.ok();
        let level: Option<String> = row.and_then(|rows| rows.first()?.try_get(0).ok());
        if let Some(wal_level) = level.filter(|level| level != "logical") {
            return SlotError::WalLevel { wal_level };
        }
    }
    refused(name, "creating a replication slot", source)
}

/// Maps a refused statement to an error. The callers handle their own special cases before this call.
fn refused(name: &SlotName, action: &'static str, source: tokio_postgres::Error) -> SlotError {
    let slot = name.clone();
    match source.code() {
        Some(code) if *code == SqlState::DUPLICATE_OBJECT => SlotError::SlotExists { slot },
        Some(code) if *code == SqlState::UNDEFINED_OBJECT => SlotError::SlotMissing { slot },
        Some(code) if *code == SqlState::CONFIGURATION_LIMIT_EXCEEDED => {
            SlotError::NoSlotLeft { slot }
        }
        Some(code) if *code == SqlState::INSUFFICIENT_PRIVILEGE => {
            SlotError::NoReplicationRight { slot }
        }
        _ => SlotError::database(action)(source),
    }
}

/// Drops a slot. PostgreSQL then removes the WAL that it kept for the slot, so nothing can restore the slot.
///
/// # Errors
/// [`SlotError::SlotMissing`], [`SlotError::SlotInUse`], a slot that is not ours
/// ([`Slot::require_ours`]), [`SlotError::NoReplicationRight`], [`SlotError::Database`].
pub async fn drop(client: &Client, name: &SlotName) -> Result<(), SlotError> {
    free_and_ours(client, name).await?;
    match client
        .query_typed(sql::DROP_SLOT, &[(&name.as_str(), Type::TEXT)])
        .await
    {
        Ok(_) => Ok(()),
        Err(source) => {
            Err(changed_meanwhile(client, name, "dropping a replication slot", source).await)
        }
    }
}

/// Moves the confirmed position forward to `to`, or to the end of the WAL if that is earlier, and
/// returns the new position. The slot **never streams** the changes before that position.
///
/// The server decodes all WAL up to the new position, so a long distance takes a long time.
///
/// # Errors
/// [`SlotError::Backwards`], [`SlotError::SlotLost`], and the errors of [`drop`](fn@drop).
pub async fn advance(client: &Client, name: &SlotName, to: Lsn) -> Result<Lsn, SlotError> {
    can_advance(client, name, to).await?;
    let target = PgLsn::from(to.as_u64());
    let rows = client
        .query_typed(
            sql::ADVANCE_SLOT,
            &[(&name.as_str(), Type::TEXT), (&target, Type::PG_LSN)],
        )
        .await;
    match rows {
        Ok(rows) => {
            let row = rows
                .first()
                .expect("invariant: a function that succeeded returns its row");
            let reached: PgLsn = get(row, "end_lsn")?;
            Ok(Lsn::new(reached.into()))
        }
        Err(source) => {
            Err(changed_meanwhile(client, name, "advancing a replication slot", source).await)
        }
    }
}

/// Checks that the slot can be advanced to this position now.
///
/// # Errors
/// The same as [`advance`].
pub async fn can_advance(client: &Client, name: &SlotName, to: Lsn) -> Result<(), SlotError> {
    let slot = free_and_ours(client, name).await?;
    if slot.wal_status == Some(WalStatus::Lost) || slot.invalidation_reason.is_some() {
        let reason = slot
            .invalidation_reason
            .unwrap_or_else(|| "wal_status lost".to_owned());
        return Err(SlotError::SlotLost {
            slot: name.clone(),
            reason,
        });
    }
    let confirmed = slot.confirmed_flush_lsn.unwrap_or_default();
    if to < confirmed {
        return Err(SlotError::Backwards {
            slot: name.clone(),
            confirmed,
            to,
        });
    }
    Ok(())
}

async fn free_and_ours(client: &Client, name: &SlotName) -> Result<Slot, SlotError> {
    let Some(slot) = find(client, name).await? else {
        return Err(SlotError::SlotMissing { slot: name.clone() });
    };
    slot.require_ours()?;
    if slot.active {
        return Err(SlotError::SlotInUse {
            slot: name.clone(),
            holder: slot.holder.map(Box::new),
        });
    }
    Ok(slot)
}

/// Returns the error for a statement that failed although the check just before it passed. Usually another
/// session has started to read from the slot in the meantime.
async fn changed_meanwhile(
    client: &Client,
    name: &SlotName,
    action: &'static str,
    source: tokio_postgres::Error,
) -> SlotError {
    if source.code() != Some(&SqlState::OBJECT_IN_USE) {
        return refused(name, action, source);
    }
    let holder = find(client, name)
        .await
        .ok()
        .flatten()
        .and_then(|slot| slot.holder)
        .map(Box::new);
    SlotError::SlotInUse {
        slot: name.clone(),
        holder,
    }
}

/// Waits until no session reads from the slot, and returns the free slot. Without a `deadline` the wait is
/// unlimited. Dropping the future ends the wait.
///
/// While a session reads from the slot, calls `observe` about twice a second with the present state of the slot. A
/// waiting relay uses these calls to show its status, and to log when the holder changes.
///
/// The free slot is not reserved for the caller. If another session takes it first, starting the stream fails with
/// SQLSTATE 55006.
///
/// # Errors
/// - [`SlotError::StillHeld`] if a session still reads from the slot at the deadline.
/// - [`SlotError::SlotMissing`] if the slot does not exist.
/// - The errors of [`Slot::require_ours`].
/// - [`SlotError::Database`].
pub async fn wait_until_free(
    client: &Client,
    name: &SlotName,
    deadline: Option<Instant>,
    mut observe: impl FnMut(&Slot),
) -> Result<Slot, SlotError> {
    let began = Instant::now();
    loop {
        let Some(slot) = find(client, name).await? else {
            return Err(SlotError::SlotMissing { slot: name.clone() });
        };
        slot.require_ours()?;
        let Some(holder) = &slot.holder else {
            return Ok(slot);
        };
        observe(&slot);
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            let (slot, holder) = (name.clone(), Box::new(holder.clone()));
            return Err(SlotError::StillHeld {
                slot,
                holder,
                waited: began.elapsed(),
            });
        }
        tokio::time::sleep(left.unwrap_or(POLL_INTERVAL).min(POLL_INTERVAL)).await;
    }
}
