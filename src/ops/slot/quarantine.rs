//! Counts the events that wait in quarantine, and lists the keys that they block.

use serde::Serialize;

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::store::dispatch::quarantined;

/// Maximum number of blocked keys that the status names.
const KEYS_NAMED: usize = 5;

/// The events that wait in quarantine.
#[derive(Debug, Serialize)]
pub(crate) struct QuarantineStatus {
    /// Bad events and the events behind them, counted up to a million.
    pub(crate) events: u64,
    /// The first blocked keys.
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
}

/// Reads the quarantine. Returns `None` if the relay's tables do not exist or this role may not read them.
///
/// # Errors
/// Errors of a statement.
pub(super) async fn read(sql: &Sql) -> Result<Option<QuarantineStatus>> {
    let looking = async {
        let events = quarantined::count(sql).await?;
        let keys = if events == 0 {
            Vec::new()
        } else {
            quarantined::first_keys(sql, KEYS_NAMED).await?
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
            });
            Ok(Some(QuarantineStatus {
                events: events.unsigned_abs(),
                keys: keys.collect(),
            }))
        }
        Err(error) if [Code::SchemaMissing, Code::PrivilegeMissing].contains(&error.code()) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
