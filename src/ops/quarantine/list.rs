//! Lists the keys with events in quarantine, each with its first event and the error of that event.

use serde::Serialize;

use super::seconds;
use super::select::{self, QuarantineSelection};
use crate::error::Result;
use crate::postgres::Sql;
use crate::store::dispatch::quarantine_commands::{self, QuarantinedKey};

/// A key with events in quarantine.
#[derive(Debug, Serialize)]
pub(crate) struct ListedKey {
    pub(crate) topic: Option<String>,
    pub(crate) ordering_key: Option<String>,
    pub(crate) events: i64,
    /// How many of these events are released but not published yet.
    pub(crate) released: i64,
    /// The first event, under a name that the other commands accept.
    pub(crate) first_event: String,
    /// Time since the commit of the first event, in whole seconds.
    pub(crate) since_seconds: u64,
    pub(crate) error: Option<String>,
}

/// The output of `quarantine list --json`; programs depend on it.
#[derive(Debug, Serialize)]
pub(crate) struct QuarantineListing {
    pub(crate) keys: Vec<ListedKey>,
    /// Number of all selected keys, including those beyond `limit`.
    pub(crate) total_keys: i64,
    /// Number of events of all selected keys.
    pub(crate) total_events: i64,
}

/// Lists up to `limit` of the selected keys, the longest-waiting key first.
///
/// # Errors
/// Database errors.
pub(crate) async fn list(
    sql: &Sql,
    selection: QuarantineSelection<'_>,
    limit: i64,
) -> Result<QuarantineListing> {
    let keys = quarantine_commands::keys(sql, &selection.filter(), limit).await?;
    Ok(QuarantineListing {
        total_keys: keys.first().map_or(0, |key| key.total_keys),
        total_events: keys.first().map_or(0, |key| key.total_events),
        keys: keys.into_iter().map(listed).collect(),
    })
}

fn listed(key: QuarantinedKey) -> ListedKey {
    ListedKey {
        first_event: select::name(key.source_id.as_deref(), key.uuid),
        topic: key.topic,
        ordering_key: key.ordering_key,
        events: key.events,
        released: key.released,
        since_seconds: seconds(key.age_seconds),
        error: key.error,
    }
}
