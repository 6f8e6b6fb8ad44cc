//! Publishes events again, through the relay that holds the slot.
//!
//! A replay has two steps, and each can be stopped and resumed:
//!
//! 1. *Select*: one walk over the records stores which published events match.
//! 2. *Release*: key by key, the command marks the records of the selected events as `released`, all
//!    events of a key in one transaction. The relay publishes them like events released from quarantine:
//!    in order, and before any newer event of their key. So replayed and new events of a key are never
//!    mixed. The command limits the number of events released at once, and the rate.
//!
//! Each message carries the name of the replay in the attribute `replay`. An event that Pub/Sub refuses goes
//! into quarantine, like any other. The relay does not send an event whose row is gone, and sets the event's
//! record to `published` again. The reasons are in docs/adr/0034-replay.md.

mod release;
mod select;

use std::time::{Duration, Instant};

use decoder::Lsn;
use serde::{Deserialize, Serialize};
use slot_manager::{SlotName, activity, cluster};

pub(crate) use crate::store::replay::ReplayRow;
pub(crate) use select::ReplaySelection;

use super::progress;
use super::since::Since;
use crate::error::{Code, Error, Result};
use crate::mapping::fnv1a_64;
use crate::postgres::{Sql, require_primary};
use crate::settings::Settings;
use crate::store::relay_row;
use crate::store::replay;

/// The conditions that an event must meet to be replayed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReplayCriteria {
    /// The id of one event, in any form that `postrider event` accepts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<String>,
    /// The topic's full name or short name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) topic: Option<String>,
    /// Committed at this time or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) since: Option<String>,
    /// Committed before this time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) until: Option<String>,
    /// The first commit position, inclusive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) from_lsn: Option<String>,
    /// The last commit position, inclusive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) to_lsn: Option<String>,
}

/// Maximum time to wait for the records of the events that were committed before the replay. A relay that keeps up
/// needs less than two seconds. After the maximum time the replay begins in any case. Otherwise an event that waits for
/// a missing topic could delay the replay for long, because the slot confirms no position after such an event.
const RECORDED_WAIT: Duration = Duration::from_secs(5);

/// The progress of a replay.
#[derive(Debug)]
pub(crate) enum ReplayStep {
    /// Some events that were committed before the replay may have no record yet.
    Unrecorded,
    /// The numbers of records read and of events selected so far.
    Selecting { examined: u64, selected: u64 },
    /// The relay has published `sent` of the `of` selected events again.
    Sending {
        sent: u64,
        of: u64,
        wait: ReplayWait,
    },
}

/// The reason why a replay waits.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReplayWait {
    /// The replay makes progress.
    None,
    /// The relay has published no released event for a while.
    Relay,
    /// The remaining keys have events that were released earlier, by another replay, or from quarantine by an
    /// operator. The relay publishes these events first. The list names the replays; `None` stands for a
    /// release from quarantine.
    Others(Vec<Option<String>>),
}

/// A function that receives the progress of the replay. It returns false to stop the replay.
pub(crate) type OnReplayStep<'a> = dyn FnMut(&ReplayStep) -> bool + 'a;

/// The result of a replay. Programs depend on the JSON form.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ReplayReport {
    pub(crate) name: String,
    /// False if the replay was stopped. Also false if events are left, because their keys have events in
    /// quarantine or in another replay.
    pub(crate) finished: bool,
    /// Events of this replay that the relay has published again, since the replay began.
    pub(crate) sent: u64,
    /// Replayed events that Pub/Sub has refused. They are in quarantine.
    pub(crate) quarantined: u64,
    /// Events that were not sent: their record is no longer `published`, their row is gone, or they are
    /// behind a refused event of their key.
    pub(crate) not_sent: u64,
    /// Events that still have to be sent.
    pub(crate) waiting: u64,
}

/// Counts what a replay would publish, and changes nothing.
///
/// # Errors
/// `setting-invalid` if a condition makes no sense, or if the relay keeps no records of published
/// events; database errors.
pub(crate) async fn preview(
    sql: &Sql,
    settings: &Settings,
    criteria: &ReplayCriteria,
    on_step: &mut OnReplayStep<'_>,
) -> Result<ReplaySelection> {
    check_records(sql, settings).await?;
    let until = cluster::wal_end(sql).await?;
    select::run(sql, settings, criteria, until, None, on_step).await
}

/// Stores a new replay, which [`run`] carries out. Without a name, the current time becomes its name.
///
/// # Errors
/// The errors of [`preview`]; `setting-invalid` when the name is taken. After an error nothing is
/// stored.
pub(crate) async fn begin(
    sql: &Sql,
    settings: &Settings,
    name: Option<&str>,
    criteria: &ReplayCriteria,
) -> Result<ReplayRow> {
    check_records(sql, settings).await?;
    let name = match name {
        Some(name) => name.to_owned(),
        None => {
            let time = "select to_char(clock_timestamp() at time zone 'UTC', 'YYYYMMDD\"T\"HH24MISSMS\"Z\"')";
            sql.query_one(time, &[]).await?.get(0)
        }
    };
    let mut criteria = criteria.clone();
    // Store durations as absolute times, because "1h ago" would mean another time when the replay is resumed.
    let times = [&mut criteria.since, &mut criteria.until];
    for text in times.into_iter().flatten() {
        *text = read_time(text)?.fixed(sql).await?;
    }
    select::conditions(sql, &criteria).await?;
    let text = serde_json::to_string(&criteria)
        .map_err(|e| Error::new(Code::Internal, "cannot write the criteria").caused_by(e))?;
    let until = cluster::wal_end(sql).await?;
    replay::begin(sql, &name, &text, until).await
}

/// Returns the unfinished replay with this name.
///
/// # Errors
/// `setting-invalid` when it does not exist, or has ended; database errors.
pub(crate) async fn find(sql: &Sql, name: &str) -> Result<ReplayRow> {
    match replay::find(sql, name).await? {
        Some(row) if row.has_ended => {
            let what = format!("the replay {name} has ended");
            Err(Error::new(Code::SettingInvalid, what).hint("start a new one"))
        }
        Some(row) => Ok(row),
        None => {
            let unfinished = replay::unfinished(sql).await?;
            let hint = if unfinished.is_empty() {
                "no replay is unfinished".to_owned()
            } else {
                format!("unfinished replays: {}", unfinished.join(", "))
            };
            let what = format!("there is no replay called {name}");
            Err(Error::new(Code::SettingInvalid, what).hint(hint))
        }
    }
}

/// Carries out a replay, or resumes it.
///
/// # Errors
/// `setting-invalid` when another command is carrying out this replay; database errors. The replay can be
/// resumed after an error.
pub(crate) async fn run(
    sql: &Sql,
    settings: &Settings,
    row: &ReplayRow,
    rate: u32,
    on_step: &mut OnReplayStep<'_>,
) -> Result<ReplayReport> {
    lock(sql, &row.name).await?;
    replay::prepare(sql).await?;
    if !row.is_selected {
        let criteria: ReplayCriteria = serde_json::from_str(&row.criteria).map_err(|e| {
            let what = "cannot read the criteria of the replay";
            Error::new(Code::SettingInvalid, what).caused_by(e)
        })?;
        // Events that are not recorded yet cannot be selected. If the selection read the records meanwhile, it could
        // leave out an event of a key and select a later one.
        let is_one_event = criteria.id.is_some();
        if !is_one_event && !wait_until_recorded(sql, &settings.slot, row.until).await? {
            on_step(&ReplayStep::Unrecorded);
        }
        let name = Some(row.name.as_str());
        let found = select::run(sql, settings, &criteria, row.until, name, on_step).await?;
        if !found.finished {
            return release::stopped(sql, &row.name).await;
        }
        replay::selected(sql, &row.name).await?;
    }
    release::run(sql, &row.name, rate, on_step).await
}

/// Waits up to [`RECORDED_WAIT`] until all events that were committed before `until` are recorded. Returns whether they
/// are. Keeps waiting while no relay reads the slot, because one may start.
async fn wait_until_recorded(sql: &Sql, slot: &SlotName, until: Lsn) -> Result<bool> {
    let began = Instant::now();
    loop {
        let left = RECORDED_WAIT.saturating_sub(began.elapsed());
        let (_, is_recorded) = progress::wait_until_confirmed(sql, slot, until, left).await?;
        if is_recorded || left.is_zero() {
            return Ok(is_recorded);
        }
        tokio::time::sleep(progress::POLL_INTERVAL).await;
    }
}

/// Removes the events from the replay that were not released yet. Then waits until each released event has an
/// outcome. Returns the number of removed events, and the report on the released events.
///
/// # Errors
/// The errors of [`run`].
pub(crate) async fn cancel(
    sql: &Sql,
    row: &ReplayRow,
    on_step: &mut OnReplayStep<'_>,
) -> Result<(u64, ReplayReport)> {
    lock(sql, &row.name).await?;
    replay::prepare(sql).await?;
    let given_up = replay::cancel(sql, &row.name).await?;
    let report = release::run(sql, &row.name, 1, on_step).await?;
    Ok((given_up, report))
}

/// Locks the replay for this command. Refuses a replay that another command is carrying out.
async fn lock(sql: &Sql, name: &str) -> Result<()> {
    if activity::try_advisory_lock(sql, lock_key(name)).await? {
        return Ok(());
    }
    let what = format!("another command carries out the replay {name}");
    Err(Error::new(Code::SettingInvalid, what).hint("wait for it, or stop it first"))
}

fn lock_key(name: &str) -> i64 {
    fnv1a_64(format!("postrider replay {name}").as_bytes()).cast_signed()
}

fn read_time(text: &str) -> Result<Since> {
    text.parse()
        .map_err(|hint: String| Error::new(Code::SettingInvalid, "not a time").hint(hint))
}

async fn check_records(sql: &Sql, settings: &Settings) -> Result<()> {
    require_primary(sql).await?;
    let records = relay_row::read_record_keeping(sql, settings).await?;
    if records.may_lack_records() {
        let what =
            "a replay needs the records of published events, and dispatch = exceptions keeps none";
        return Err(Error::new(Code::SettingInvalid, what).hint(
            "insert the events again under new ids, or set dispatch = full for events from now on",
        ));
    }
    Ok(())
}
