//! Releases the selected events to the relay, key by key. The release is no faster than the relay publishes
//! the events, and no faster than the rate that the operator has chosen.

use std::time::{Duration, Instant};

use super::{OnReplayStep, ReplayReport, ReplayStep, ReplayWait};
use crate::error::Result;
use crate::event::EventPosition;
use crate::postgres::Sql;
use crate::store::replay::{self, ReplayCounts, ReplayGroup};

/// The command releases no further key while at least this many released events have no outcome. The number
/// can exceed this limit, because all events of a key are released at once.
const RELEASED_AT_ONCE: u64 = 2_000;

/// Poll interval for the relay's progress.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// After this long without progress, the command reports that the relay has stalled.
const STALLED: Duration = Duration::from_secs(10);

/// The command gives up after more than this many fruitless rounds in a row. A round visits every key that is
/// left. A round is fruitless if no event leaves the selection, and the relay has no released event to publish that
/// could free a key: no event of this replay, and no event of the remaining keys that somebody else has released.
/// One fruitless round is not enough to give up, because another replay may hold a key for a moment.
const FRUITLESS_ROUNDS: u32 = 10;
/// Pause after a fruitless round.
const ROUND_PAUSE: Duration = Duration::from_secs(1);

/// The progress of the release.
struct Releasing<'a> {
    sql: &'a Sql,
    name: &'a str,
    /// Selected events that are not released yet.
    selected: u64,
    /// Released events without an outcome.
    released: u64,
    counts: ReplayCounts,
    /// When the outcomes were last polled.
    settled_at: Instant,
    /// The next poll continues after this record; `None` means at the beginning.
    settle_after: Option<EventPosition>,
    /// When the relay last made progress, or had no released event to publish.
    progressed: Instant,
    /// The releases for which the remaining events wait: the names of the other replays that have released
    /// events of the same keys. `None` stands for a release from quarantine.
    waits_for: Vec<Option<String>>,
}

impl<'a> Releasing<'a> {
    async fn begin(sql: &'a Sql, name: &'a str) -> Result<Self> {
        let (selected, released) = replay::count_waiting(sql, name).await?;
        let mut releasing = Self {
            sql,
            name,
            selected,
            released,
            counts: ReplayCounts::default(),
            settled_at: Instant::now(),
            settle_after: None,
            progressed: Instant::now(),
            waits_for: Vec::new(),
        };
        releasing.settle().await?;
        Ok(releasing)
    }

    /// Polls the outcomes of released events.
    async fn settle(&mut self) -> Result<()> {
        let found = replay::settle(self.sql, self.name, self.settle_after).await?;
        self.released = self.released.saturating_sub(found.settled);
        self.counts = found.counts;
        self.settle_after = found.next;
        self.settled_at = Instant::now();
        if found.settled > 0 || self.released == 0 {
            self.progressed = Instant::now();
        }
        Ok(())
    }

    fn waiting(&self) -> u64 {
        self.selected + self.released
    }

    fn step(&self) -> ReplayStep {
        let ReplayCounts {
            sent, quarantined, ..
        } = self.counts;
        ReplayStep::Sending {
            sent,
            of: sent + quarantined + self.waiting(),
            wait: if !self.waits_for.is_empty() {
                ReplayWait::Others(self.waits_for.clone())
            } else if self.progressed.elapsed() >= STALLED {
                ReplayWait::Relay
            } else {
                ReplayWait::None
            },
        }
    }

    fn report(&self, finished: bool) -> ReplayReport {
        ReplayReport {
            name: self.name.to_owned(),
            finished,
            sent: self.counts.sent,
            quarantined: self.counts.quarantined,
            not_sent: self.counts.not_sent,
            waiting: self.waiting(),
        }
    }

    /// Releases the selected events of a topic and key. Returns how many events left the selection. This
    /// number includes events that could not be released, because their state is no longer `published`.
    async fn release(&mut self, group: &ReplayGroup) -> Result<u64> {
        let (left, released) = replay::release(self.sql, self.name, group).await?;
        self.selected = self.selected.saturating_sub(left);
        if left > 0 {
            self.waits_for.clear();
        }
        self.released += released;
        if released > 0 {
            self.progressed = Instant::now();
        }
        Ok(left)
    }
}

/// Returns the report of a replay that was stopped before all its events were selected.
pub(super) async fn stopped(sql: &Sql, name: &str) -> Result<ReplayReport> {
    Ok(Releasing::begin(sql, name).await?.report(false))
}

/// Releases all selected events, and waits until all of them have an outcome. Returns earlier if `on_step`
/// stops the replay, or after too many fruitless rounds ([`FRUITLESS_ROUNDS`]).
pub(super) async fn run(
    sql: &Sql,
    name: &str,
    rate: u32,
    on_step: &mut OnReplayStep<'_>,
) -> Result<ReplayReport> {
    let mut releasing = Releasing::begin(sql, name).await?;
    let mut after: Option<ReplayGroup> = None;
    let (mut in_round, mut fruitless) = (0, 0);
    let mut due = Instant::now();
    loop {
        if releasing.settled_at.elapsed() >= POLL_INTERVAL {
            releasing.settle().await?;
        }
        if !on_step(&releasing.step()) {
            return Ok(releasing.report(false));
        }
        let early = due.saturating_duration_since(Instant::now());
        if releasing.released >= RELEASED_AT_ONCE || !early.is_zero() {
            let at_most = if early.is_zero() {
                POLL_INTERVAL
            } else {
                early
            };
            tokio::time::sleep(at_most.min(POLL_INTERVAL)).await;
            continue;
        }
        if let Some(group) = replay::next_group(sql, name, after.as_ref()).await? {
            let left = releasing.release(&group).await?;
            in_round += left;
            // A key is done, because all its events are released at once. Events without a key are released in
            // portions, so they are done only once a portion is empty.
            if !group.1.is_empty() || left == 0 {
                after = Some(group);
            }
            due = Instant::now() + Duration::from_secs_f64(left as f64 / f64::from(rate.max(1)));
            continue;
        }
        if releasing.waiting() == 0 {
            break;
        }
        // The round over all keys is complete. A key that was busy may be free in the next round.
        let has_progress = in_round > 0 || releasing.released > 0;
        releasing.waits_for = if has_progress {
            Vec::new()
        } else {
            replay::released_by_others(sql, name).await?
        };
        fruitless = if has_progress || !releasing.waits_for.is_empty() {
            0
        } else {
            fruitless + 1
        };
        if fruitless > FRUITLESS_ROUNDS {
            break;
        }
        tokio::time::sleep(if fruitless > 0 {
            ROUND_PAUSE
        } else {
            POLL_INTERVAL
        })
        .await;
        (in_round, after) = (0, None);
    }
    (releasing.selected, releasing.released) = replay::count_waiting(sql, name).await?;
    let finished = releasing.waiting() == 0;
    if finished {
        replay::end(sql, name).await?;
    }
    Ok(releasing.report(finished))
}
