//! Finds the events of a replay: one walk over the outbox tables, or a look-up of one id.

use decoder::Lsn;
use serde::Serialize;
use slot_manager::quoted_literal;

use super::{OnReplayStep, ReplayCriteria, ReplayStep, read_time};
use crate::capture::claim;
use crate::capture::table::{TableReader, altered_since};
use crate::error::{Code, Error, Result};
use crate::ops::event::find;
use crate::ops::since::SinceTime;
use crate::ops::walk::{self, TableWalk, WalkAction};
use crate::postgres::PatientSql;
use crate::settings::Settings;
use crate::store::dispatch::history::RecordPlace;
use crate::store::dispatch::pruning::GO;
use crate::store::replay::{self, RECORD_TO_REPLAY};

/// Rows in a page.
const PAGE_ROWS: u32 = 5_000;

/// What was selected, or would be; its JSON form, on which programs depend.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ReplaySelection {
    /// False if it was stopped before the end.
    pub(crate) finished: bool,
    /// Events that match and were published.
    pub(crate) events: u64,
    /// The earliest time of these, RFC 3339.
    pub(crate) oldest: Option<String>,
    /// Names of the first ones.
    pub(crate) first_ids: Vec<String>,
    /// Events that match and are in quarantine, so that they are not replayed.
    pub(crate) in_quarantine: u64,
}

/// Selects events for the replay `name`, or only counts them without one.
pub(super) async fn run(
    sql: &PatientSql,
    settings: &Settings,
    criteria: &ReplayCriteria,
    until: Lsn,
    name: Option<&str>,
    on_step: &mut OnReplayStep<'_>,
) -> Result<ReplaySelection> {
    match &criteria.id {
        Some(id) => one(sql, settings, id, name).await,
        None => several(sql, settings, criteria, until, name, on_step).await,
    }
}

/// Selects all published events with this id: several tables may have one with the same number.
async fn one(
    sql: &PatientSql,
    settings: &Settings,
    id: &str,
    name: Option<&str>,
) -> Result<ReplaySelection> {
    let mut found = ReplaySelection {
        finished: true,
        ..ReplaySelection::default()
    };
    for event in find::find(sql, settings, id).await? {
        let (Some(_), Some(record)) = (&event.row, &event.record) else {
            continue;
        };
        if record.state == "published" {
            found.events += 1;
            found.oldest = Some(record.committed_at.clone());
            found.first_ids.push(event.event_id.clone());
            if let Some(name) = name {
                let group = (
                    event.topic.unwrap_or_default(),
                    event.ordering_key.unwrap_or_default(),
                );
                let commit: Lsn = record.commit_lsn.parse().map_err(|e| {
                    Error::new(Code::Internal, "cannot read a position").caused_by(e)
                })?;
                let place = RecordPlace {
                    commit: commit.as_u64(),
                    ordinal: record.ordinal,
                };
                replay::select_one(sql, name, &group, place).await?;
            }
        } else if ["quarantined", "released"].contains(&record.state.as_str()) {
            found.in_quarantine += 1;
        }
    }
    Ok(found)
}

async fn several(
    sql: &PatientSql,
    settings: &Settings,
    criteria: &ReplayCriteria,
    until: Lsn,
    name: Option<&str>,
    on_step: &mut OnReplayStep<'_>,
) -> Result<ReplaySelection> {
    walk::prepare(sql).await?;
    let since = match &criteria.since {
        Some(time) => Some(read_time(time)?.resolve(sql).await?),
        None => None,
    };
    let before = match &criteria.until {
        Some(time) => Some(read_time(time)?.resolve(sql).await?),
        None => None,
    };
    let verdict = verdict_sql(criteria, since.as_ref(), before.as_ref(), until)?;
    let action = name.map_or(WalkAction::Look, |name| {
        WalkAction::Insert(replay::select_sql(name))
    });
    let captured = claim::known(sql, &settings.slot, &settings.tables).await?;
    let mut found = ReplaySelection::default();
    let mut looked_at = 0;
    for (table, captured) in settings.tables.iter().zip(&captured) {
        // The topics of the rows do not matter here.
        let project = settings.project().unwrap_or("none");
        let reader = TableReader::resolve(sql, table, project, captured).await?;
        let mut walk = TableWalk::new(
            captured,
            &reader,
            PAGE_ROWS,
            verdict.clone(),
            action.clone(),
        )
        .with_record(RECORD_TO_REPLAY);
        if let Some(since) = &since
            && let Some(seq) = since.first_seq(sql, captured, &reader).await?
        {
            walk.skip_to_seq(seq);
        }
        while let Some(page) = walk.next(sql).await.map_err(altered_since)? {
            looked_at += page.rows;
            found.in_quarantine += page.count("quarantined");
            found.events += page.count(GO);
            for group in page.groups.into_iter().filter(|group| group.verdict == GO) {
                found.oldest = match (found.oldest.take(), group.oldest) {
                    (Some(a), Some(b)) => Some(a.min(b)),
                    (a, b) => a.or(b),
                };
                let room = walk::NAMED.saturating_sub(found.first_ids.len());
                found.first_ids.extend(group.names.into_iter().take(room));
            }
            let step = ReplayStep::Selecting {
                looked_at,
                selected: found.events,
            };
            if !on_step(&step) {
                return Ok(found);
            }
        }
    }
    found.finished = true;
    Ok(found)
}

/// The verdict on a row with its record.
fn verdict_sql(
    criteria: &ReplayCriteria,
    since: Option<&SinceTime>,
    before: Option<&SinceTime>,
    until: Lsn,
) -> Result<String> {
    let mut which = vec![format!("r.commit_lsn < '{until}'::pg_lsn")];
    if let Some(key) = &criteria.key {
        which.push(format!("r.ordering_key = {}", quoted_literal(key)));
    }
    if let Some(topic) = &criteria.topic {
        let topic = quoted_literal(topic);
        which.push(format!(
            "(r.topic = {topic} or split_part(r.topic, '/', 4) = {topic})"
        ));
    }
    if let Some(since) = since {
        which.push(format!("r.committed_at >= {}", since.sql()));
    }
    if let Some(before) = before {
        which.push(format!("r.committed_at < {}", before.sql()));
    }
    for (text, comparison) in [(&criteria.from_lsn, ">="), (&criteria.to_lsn, "<=")] {
        if let Some(text) = text {
            let lsn: Lsn = text.parse().map_err(|e| {
                Error::new(
                    Code::SettingInvalid,
                    format!("`{text}` is not a position in the log"),
                )
                .hint("write it as PostgreSQL does, such as 16/B374D848")
                .caused_by(e)
            })?;
            which.push(format!("r.commit_lsn {comparison} '{lsn}'::pg_lsn"));
        }
    }
    Ok(format!(
        "case when r.records = 0 or not ({}) then 'other' \
             when r.state in ('quarantined', 'released') then 'quarantined' \
             when r.state = 'published' then '{GO}' else 'discarded' end",
        which.join(" and ")
    ))
}
