//! Finds out whether a walsender waits for the standby servers of `synchronized_standby_slots`
//! (PostgreSQL 17 and newer).

use std::fmt;

use decoder::Lsn;
use tokio_postgres::types::{PgLsn, Type};
use tokio_postgres::{Client, Row};

use crate::slot::get;
use crate::{SlotError, query, sql};

/// The state of a walsender at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WalsenderWait {
    /// The position up to which the walsender has read the WAL (`sent_lsn`). It does not change while the
    /// walsender waits for standby servers.
    pub sent: Lsn,
    /// True if the walsender waits for the standby servers, false if it waits for something else, `None` if it
    /// is awake. A walsender that waits for standby servers wakes up again and again, so `None` does not prove
    /// that it can continue.
    pub is_for_standbys: Option<bool>,
    /// The slots that have not received all WAL.
    pub behind: Vec<SlotBehind>,
}

/// A slot in `synchronized_standby_slots` that has not received all WAL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotBehind {
    /// The name of the slot.
    pub name: String,
    /// The reason why the slot is behind.
    pub why: SlotBehindReason,
}

/// Why a slot in `synchronized_standby_slots` has not received all WAL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotBehindReason {
    /// There is no such slot.
    Missing,
    /// PostgreSQL has invalidated the slot.
    Invalid,
    /// The slot is a logical slot, so it belongs to no standby server.
    Logical,
    /// Nobody reads the slot.
    Unread,
    /// A standby server reads the slot, but has not received all WAL.
    Late,
}

impl fmt::Display for SlotBehind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match self.why {
            SlotBehindReason::Missing => write!(f, "slot {name} does not exist"),
            SlotBehindReason::Invalid => write!(f, "slot {name} is invalidated"),
            SlotBehindReason::Logical => write!(f, "slot {name} is a logical slot"),
            SlotBehindReason::Unread => write!(f, "nobody reads slot {name}"),
            SlotBehindReason::Late => write!(f, "the standby server of slot {name} is behind"),
        }
    }
}

/// Finds out what the walsender with this pid waits for, and which slots are behind. `None` if there is no such
/// walsender.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn walsender_wait(
    client: &Client,
    walsender: i32,
) -> Result<Option<WalsenderWait>, SlotError> {
    let action = "finding out what the walsender waits for";
    let parameters = [(&walsender as _, Type::INT4)];
    let rows = query::all(client, action, sql::activity::WALSENDER_WAIT, &parameters).await?;
    let Some(first) = rows.first() else {
        return Ok(None);
    };
    let sent: Option<PgLsn> = get(first, "sent_lsn")?;
    let behind = rows.iter().filter_map(|row| behind(row).transpose());
    Ok(Some(WalsenderWait {
        sent: Lsn::new(sent.map_or(0, u64::from)),
        is_for_standbys: get(first, "is_for_standbys")?,
        behind: behind.collect::<Result<_, _>>()?,
    }))
}

fn behind(row: &Row) -> Result<Option<SlotBehind>, SlotError> {
    let name: Option<String> = get(row, "name")?;
    let Some(name) = name else { return Ok(None) };
    let is = |column: &str| get::<bool>(row, column);
    let why = if is("is_missing")? {
        SlotBehindReason::Missing
    } else if is("is_logical")? {
        SlotBehindReason::Logical
    } else if is("is_invalid")? {
        SlotBehindReason::Invalid
    } else if is("is_read")? {
        SlotBehindReason::Late
    } else {
        SlotBehindReason::Unread
    };
    Ok(Some(SlotBehind { name, why }))
}
