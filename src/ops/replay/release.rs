//! Releases the selected events to the relay, key by key, as fast as it publishes them.

use std::time::{Duration, Instant};

use super::{OnReplayStep, ReplayReport, ReplayStep};
use crate::error::Result;
use crate::postgres::Sql;
use crate::store::replay::{self, ReplayCounts, ReplayGroup};

/// Events that the relay has not published yet, above which no more are released.
const RELEASED_AT_ONCE: u64 = 2_000;

/// Events without a key that are released together.
const UNORDERED_AT_ONCE: i64 = 500;

/// Between two looks at how far the relay is.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// Without progress for so long, the command says so.
const STALLED: Duration = Duration::from_secs(10);

/// Rounds over all keys, [`ROUND_PAUSE`] apart, in which none could be released, before the command gives
/// up: a key may be busy with another replay for a moment.
const FRUITLESS_ROUNDS: u32 = 10;
const ROUND_PAUSE: Duration = Duration::from_secs(1);

/// How far the release is.
struct Releasing<'a> {
    sql: &'a Sql,
    name: &'a str,
    /// Selected events that are not released.
    selected: u64,
    /// Released events without an outcome.
    released: u64,
    counts: ReplayCounts,
    looked: Instant,
    /// When the relay last made progress.
    progressed: Instant,
}

impl<'a> Releasing<'a> {
    async fn begin(sql: &'a Sql, name: &'a str) -> Result<Self> {
        let counts = replay::settle(sql, name).await?;
        let (selected, released) = replay::count_waiting(sql, name).await?;
        Ok(Self {
            sql,
            name,
            selected,
            released,
            counts,
            looked: Instant::now(),
            progressed: Instant::now(),
        })
    }

    /// Looks how far the relay is.
    async fn look(&mut self) -> Result<()> {
        let counts = replay::settle(self.sql, self.name).await?;
        self.released = replay::count_released(self.sql, self.name).await?;
        if counts != self.counts || self.released == 0 {
            self.progressed = Instant::now();
        }
        self.counts = counts;
        self.looked = Instant::now();
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
            stalled: self.progressed.elapsed() >= STALLED,
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

    /// Releases the events of a group. Returns how many it picked from the selection.
    async fn release(&mut self, group: &ReplayGroup) -> Result<u64> {
        let (picked, released) =
            replay::release(self.sql, self.name, group, UNORDERED_AT_ONCE).await?;
        self.selected = self.selected.saturating_sub(picked);
        self.released += released;
        Ok(picked)
    }
}

/// The report of a replay that was stopped before all its events were selected.
pub(super) async fn stopped(sql: &Sql, name: &str) -> Result<ReplayReport> {
    Ok(Releasing::begin(sql, name).await?.report(false))
}

/// Releases all selected events, and waits until the relay has published them.
pub(super) async fn run(
    sql: &Sql,
    name: &str,
    rate: u32,
    on_step: &mut OnReplayStep<'_>,
) -> Result<ReplayReport> {
    let mut releasing = Releasing::begin(sql, name).await?;
    let mut after: Option<ReplayGroup> = None;
    let (mut picked_in_round, mut fruitless) = (0, 0);
    let mut due = Instant::now();
    loop {
        if releasing.looked.elapsed() >= LOOK_INTERVAL {
            releasing.look().await?;
        }
        if !on_step(&releasing.step()) {
            return Ok(releasing.report(false));
        }
        let early = due.saturating_duration_since(Instant::now());
        if releasing.released >= RELEASED_AT_ONCE || !early.is_zero() {
            let at_most = if early.is_zero() {
                LOOK_INTERVAL
            } else {
                early
            };
            tokio::time::sleep(at_most.min(LOOK_INTERVAL)).await;
            continue;
        }
        match replay::next_group(sql, name, after.as_ref()).await? {
            Some(group) => {
                let picked = releasing.release(&group).await?;
                picked_in_round += picked;
                let is_whole = !group.1.is_empty() || picked == 0;
                if is_whole {
                    after = Some(group);
                }
                let seconds = picked as f64 / f64::from(rate.max(1));
                due = Instant::now() + Duration::from_secs_f64(seconds);
            }
            None if after.is_some() && (picked_in_round > 0 || fruitless < FRUITLESS_ROUNDS) => {
                fruitless = if picked_in_round > 0 {
                    0
                } else {
                    fruitless + 1
                };
                picked_in_round = 0;
                after = None;
                let pause = if fruitless > 0 {
                    ROUND_PAUSE
                } else {
                    LOOK_INTERVAL
                };
                tokio::time::sleep(pause).await;
            }
            None if releasing.released > 0 => tokio::time::sleep(LOOK_INTERVAL).await,
            None => break,
        }
    }
    let (selected, released) = replay::count_waiting(sql, name).await?;
    (releasing.selected, releasing.released) = (selected, released);
    let finished = releasing.waiting() == 0;
    if finished {
        replay::end(sql, name).await?;
    }
    Ok(releasing.report(finished))
}
