//! Finds the events of a replay: by one walk over the records, or by the id of one event.

use decoder::Lsn;
use replication::CommitLsn;
use serde::Serialize;

use super::{OnReplayStep, ReplayCriteria, ReplayStep, read_time};
use crate::error::{Code, Error, Result};
use crate::event::EventPosition;
use crate::ops::LOCK_TIMEOUT;
use crate::ops::event::{EventQuery, find};
use crate::postgres::{Sql, limiting_lock_waits};
use crate::settings::Settings;
use crate::store::dispatch::history::RecordFilter;
use crate::store::replay::{self, SelectionPage};

/// Number of records in a page.
const PAGE_RECORDS: i64 = 5_000;

/// Maximum number of event ids in the result.
const SHOWN: usize = 10;

/// The events that a replay has selected, or would select. Programs depend on the JSON form.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ReplaySelection {
    /// False if the selection was stopped before its end.
    pub(crate) finished: bool,
    /// Events that match and were published, also if another replay is about to publish them again.
    pub(crate) events: u64,
    /// Commit time of the earliest of these events, RFC 3339.
    pub(crate) oldest: Option<String>,
    /// The uuids of the first of these events.
    pub(crate) first_ids: Vec<String>,
    /// Events that match but are not selected, because they are in quarantine, or were released from there.
    pub(crate) in_quarantine: u64,
}

/// The criteria as conditions on records.
#[derive(Debug)]
pub(super) struct Conditions {
    filter: RecordFilter,
    /// Only records committed before this time, an SQL expression.
    before: Option<String>,
    /// The first commit position that can match.
    from: u64,
    /// The last commit position that can match.
    to: Option<Lsn>,
}

/// Checks the criteria, and turns them into conditions on records.
///
/// # Errors
/// `setting-invalid` for a time or position that does not exist; database errors.
pub(super) async fn conditions(sql: &Sql, criteria: &ReplayCriteria) -> Result<Conditions> {
    let since = criteria.since.as_deref().map(read_time).transpose()?;
    let query = EventQuery {
        key: criteria.key.as_deref(),
        topic: criteria.topic.as_deref(),
        since: since.as_ref(),
    };
    let filter = query.filter(sql).await?;
    let before = match &criteria.until {
        Some(until) => Some(read_time(until)?.resolve(sql).await?.sql().to_owned()),
        None => None,
    };
    let from_lsn = criteria.from_lsn.as_deref().map(position).transpose()?;
    let since_lsn = filter.since.as_ref().map_or(0, |(lsn, _)| u64::from(*lsn));
    Ok(Conditions {
        from: from_lsn.map_or(0, Lsn::as_u64).max(since_lsn),
        to: criteria.to_lsn.as_deref().map(position).transpose()?,
        filter,
        before,
    })
}

fn position(text: &str) -> Result<Lsn> {
    text.parse().map_err(|e| {
        let what = format!("`{text}` is not a position in the WAL");
        Error::new(Code::SettingInvalid, what)
            .hint("write it as PostgreSQL does, such as 16/B374D848")
            .caused_by(e)
    })
}

/// Selects the events for the replay `name`. If `name` is `None`, only counts them.
pub(super) async fn run(
    sql: &Sql,
    settings: &Settings,
    criteria: &ReplayCriteria,
    until: Lsn,
    name: Option<&str>,
    on_step: &mut OnReplayStep<'_>,
) -> Result<ReplaySelection> {
    match &criteria.id {
        Some(id) => one(sql, settings, id, name).await,
        None => several(sql, criteria, until, name, on_step).await,
    }
}

fn earliest(one: Option<String>, other: Option<String>) -> Option<String> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// Selects all published events with this id whose rows still exist. There can be several, because the
/// same number may be an id in several tables.
async fn one(
    sql: &Sql,
    settings: &Settings,
    id: &str,
    name: Option<&str>,
) -> Result<ReplaySelection> {
    let mut found = ReplaySelection {
        finished: true,
        ..ReplaySelection::default()
    };
    let finding = find::find(sql, settings, id);
    for event in limiting_lock_waits(sql, LOCK_TIMEOUT, finding).await? {
        let (Some(_), Some(record)) = (&event.row, &event.record) else {
            continue;
        };
        // A replay has released this event, and has not published it again yet.
        let is_replayed = record.state == "released" && event.message_id.is_some();
        if record.state == "published" || is_replayed {
            found.events += 1;
            found.oldest = earliest(found.oldest.take(), Some(record.committed_at.clone()));
            found.first_ids.push(event.event_id.clone());
            if let Some(name) = name {
                let group = (
                    event.topic.unwrap_or_default(),
                    event.ordering_key.unwrap_or_default(),
                );
                replay::select_one(sql, name, &group, record.position).await?;
            }
        } else if ["quarantined", "released"].contains(&record.state.as_str()) {
            found.in_quarantine += 1;
        }
    }
    Ok(found)
}

async fn several(
    sql: &Sql,
    criteria: &ReplayCriteria,
    until: Lsn,
    name: Option<&str>,
    on_step: &mut OnReplayStep<'_>,
) -> Result<ReplaySelection> {
    let conditions = conditions(sql, criteria).await?;
    let after_last = conditions
        .to
        .map(|to| Lsn::new(to.as_u64().saturating_add(1)));
    let mut page = SelectionPage {
        // Begin before the first record of the commit position `from`.
        after: EventPosition {
            commit: CommitLsn::new(Lsn::new(conditions.from)),
            ordinal: 0,
        },
        until: after_last.map_or(until, |last| last.min(until)),
        records: PAGE_RECORDS,
        filter: &conditions.filter,
        before: conditions.before.as_deref(),
    };
    let mut found = ReplaySelection::default();
    let mut examined = 0;
    while let Some(selected) = replay::select(sql, name, &page).await? {
        page.after = selected.last;
        examined += selected.records;
        found.events += selected.selected;
        found.in_quarantine += selected.in_quarantine;
        found.oldest = earliest(found.oldest.take(), selected.oldest);
        let room = SHOWN.saturating_sub(found.first_ids.len());
        found
            .first_ids
            .extend(selected.first_ids.into_iter().take(room));
        let step = ReplayStep::Selecting {
            examined,
            selected: found.events,
        };
        if !on_step(&step) {
            return Ok(found);
        }
    }
    found.finished = true;
    Ok(found)
}
