//! Counts the events that wait in quarantine, and lists the keys that they block.

use serde::Serialize;

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::store::dispatch::quarantined::{self, COUNTED_PER_KEY};

/// Maximum number of blocked keys that the status names.
const KEYS_NAMED: i64 = 5;

/// The events that wait in quarantine.
#[derive(Debug, Serialize)]
pub(crate) struct QuarantineStatus {
    /// Bad events and the events behind them, counted up to a million.
    pub(crate) events: u64,
    /// At most 5 blocked keys: those whose first event is oldest. Only the first 1,000 keys by name are
    /// compared.
    pub(crate) keys: Vec<BlockedKeyStatus>,
}

/// A key whose events wait in quarantine.
#[derive(Debug, Serialize)]
pub(crate) struct BlockedKeyStatus {
    pub(crate) topic: String,
    pub(crate) ordering_key: String,
    pub(crate) first_event: String,
    /// Why the first event is in quarantine.
    pub(crate) error: Option<String>,
    /// The key's events in quarantine, counted up to 1,000.
    pub(crate) events: u64,
    /// How long ago the first event was committed.
    pub(crate) oldest_seconds: f64,
}

impl BlockedKeyStatus {
    /// Whether the key may have more events than were counted.
    pub(crate) fn has_more(&self) -> bool {
        self.events >= COUNTED_PER_KEY.unsigned_abs()
    }
}

/// Reads the quarantine. Returns `None` if the relay's tables cannot be read now: they do not exist or are locked, this
/// role lacks the privilege to read them, or the disk is full.
///
/// # Errors
/// Database errors.
pub(super) async fn read(sql: &Sql) -> Result<Option<QuarantineStatus>> {
    let looking = async {
        let events = quarantined::count(sql).await?;
        let keys = if events == 0 {
            Vec::new()
        } else {
            quarantined::oldest_keys(sql, KEYS_NAMED).await?
        };
        Ok::<_, Error>((events, keys))
    };
    match looking.await {
        Ok((events, keys)) => {
            let keys = keys.iter().map(|key| BlockedKeyStatus {
                topic: key.group.topic.to_string(),
                ordering_key: key.group.ordering_key.to_string(),
                first_event: key.first.shown(),
                error: key.error.clone(),
                events: key.events.unsigned_abs(),
                oldest_seconds: key.oldest_seconds,
            });
            Ok(Some(QuarantineStatus {
                events: events.unsigned_abs(),
                keys: keys.collect(),
            }))
        }
        Err(error) if is_not_readable(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_not_readable(error: &Error) -> bool {
    let codes = [
        Code::SchemaMissing,
        Code::PrivilegeMissing,
        Code::PostgresTimeout,
        Code::DiskFull,
    ];
    codes.contains(&error.code())
}
