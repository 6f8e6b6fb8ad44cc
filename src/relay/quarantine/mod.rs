//! What is set aside, which keys are blocked by it, and how they are released: a state machine
//! without IO.
//!
//! Under `quarantine_key` a bad event blocks its key: what waits behind it and all that comes
//! later is recorded as quarantined, too, so that the order of the key is kept. Events *before*
//! the bad one are not concerned, also when they come again after a restart.
//!
//! A release goes by these steps, for one group (a topic and ordering key):
//!
//! 1. *Begun.* What comes from now on is recorded as released. When all that was recorded before
//!    is durable, every row of the group is marked as released: a restart goes on from here.
//! 2. *Paging.* Rows are read in order, page by page, and go into their lane.
//! 3. *Handover*, once a page came back empty: what comes from now on is held in memory. When all
//!    that was recorded before is durable, and a page that was asked for after that is empty, what
//!    is held goes into the lane, behind everything released, and the key is not blocked any more.
//! 4. *Ended* when the outcome of all that was released is durable.
//!
//! If an event fails again, the release *failed*: the key stays blocked and all its rows go back
//! into quarantine. Groups that block nothing (unordered events, other policies) have no first and
//! third step, and one that fails again concerns itself alone.
//!
//! The steps of a release are in `releases`. Not here: the table (`dispatch::quarantined`), and
//! reading what is released (`releaser`).

mod dead_letter;
mod releaser;
mod releases;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::dispatch::{Outcome, Record};
use crate::error::{Code, Error, Result};
use crate::lanes::{Event, EventRef, Group};
use crate::map::OrderingKey;
use crate::settings::OnBadEvent;

pub(super) use dead_letter::{Letter, letter};
pub(super) use releaser::{Ask, Found, Releaser};

/// Keys that may be blocked at once, or events that may be set aside in one session where they
/// block nothing. So many are no single bad events: something is wrong with all of them, and a
/// person must look before all traffic is in quarantine. With keys of usual length 100,000 take
/// about 20 MB.
pub(super) const MAX_BLOCKED: usize = 100_000;

/// Rows of a group that are on their way at once.
pub(super) const PAGE: usize = 100;

/// Releases that may go forward at once. Those that wait for Pub/Sub do not count: they ask
/// nothing of the table, and their events are in the budget of memory like all others.
const MAX_RELEASES: usize = 256;

/// Where an event stands in the log: commit LSN and ordinal.
pub(super) type Place = (u64, u32);

/// The place of an event.
pub(super) fn place(origin: &EventRef) -> Place {
    (origin.commit.lsn().as_u64(), origin.ordinal)
}

/// A key that is blocked.
#[derive(Debug)]
struct Blocked {
    /// The first event in quarantine. Earlier ones are not concerned.
    since: Place,
    /// What is recorded for the events behind it.
    waits: Arc<str>,
    /// The last record of the key that was handed to the writer.
    last_record: u64,
    /// Bad events whose dead letter is on its way: not recorded yet.
    letters: u32,
}

#[derive(Debug)]
enum Stage {
    /// Waits until records up to this one are durable, then for the mark.
    Begun(u64),
    Paging,
    /// Events that came since, in order.
    Handover(Vec<Event>),
    Ended,
    Failed,
}

#[derive(Debug)]
struct Release {
    stage: Stage,
    /// The last row that was read.
    after: Place,
    /// Records that were durable when the last page was asked for.
    asked_at: u64,
    /// Pages count that were asked for with so many durable records: a bad event with a dead
    /// letter is recorded later than those behind it, and must not be passed over.
    asks_from: u64,
    /// Events in lanes.
    in_lanes: usize,
    /// The last record of an event of it that was handed to the writer.
    last_record: u64,
}

impl Release {
    /// Whether it has ended and only the records of its last outcomes are to come.
    fn has_left_lanes(&self) -> bool {
        matches!(self.stage, Stage::Ended) && self.in_lanes == 0
    }
}

/// What is to be asked of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Command {
    /// Mark all quarantined rows of the group as released.
    Mark(Group),
    /// Read rows that are released, from beyond this place on.
    Page(Group, Place),
    /// Mark all released rows of the group as quarantined.
    SendBack(Group),
}

/// What becomes of an event that arrives.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// Into its lane.
    Open,
    /// Into quarantine, for this reason.
    Quarantined(Arc<str>),
    /// Into quarantine, behind what is being released.
    Released(Arc<str>),
    /// Held in memory until its key is not blocked any more.
    Held,
}

/// The quarantine of one session.
#[derive(Debug)]
pub(super) struct Quarantine {
    policy: OnBadEvent,
    blocked: HashMap<Group, Blocked>,
    releases: HashMap<Group, Release>,
    /// The same groups, in turn, without those that have ended.
    turns: VecDeque<Group>,
    /// Releases that have ended and whose last outcome is being recorded, in that order.
    leaving: VecDeque<Group>,
    /// Released events in lanes: from which group, and their bytes.
    in_lanes: HashMap<Place, (Group, usize)>,
    bytes_in_lanes: usize,
    /// Records handed to the writer, and those of them that are durable.
    handed: u64,
    durable: u64,
    /// Bad events that block nothing, of which some may have left the quarantine since.
    unblocking: usize,
    /// How many of them are in the table for sure that is being counted.
    counting: Option<usize>,
}

impl Quarantine {
    pub(super) fn new(policy: OnBadEvent) -> Self {
        Self {
            policy,
            blocked: HashMap::new(),
            releases: HashMap::new(),
            turns: VecDeque::new(),
            leaving: VecDeque::new(),
            in_lanes: HashMap::new(),
            bytes_in_lanes: 0,
            handed: 0,
            durable: 0,
            unblocking: 0,
            counting: None,
        }
    }

    pub(super) fn policy(&self) -> OnBadEvent {
        self.policy
    }

    /// Keys that are blocked.
    pub(super) fn blocked(&self) -> usize {
        self.blocked.len()
    }

    /// Whether a bad event of this group blocks those behind it.
    pub(super) fn blocks(&self, group: &Group) -> bool {
        self.policy == OnBadEvent::QuarantineKey && group.is_ordered()
    }

    /// Says what becomes of an event that arrives.
    pub(super) fn admit(
        &self,
        topic: &Arc<str>,
        ordering_key: &OrderingKey,
        at: Place,
    ) -> Admission {
        if self.blocked.is_empty() || ordering_key.is_unordered() {
            return Admission::Open;
        }
        let group = Group {
            topic: topic.clone(),
            ordering_key: ordering_key.clone(),
        };
        let Some(blocked) = self.blocked.get(&group).filter(|by| at >= by.since) else {
            return Admission::Open;
        };
        match self.releases.get(&group).map(|release| &release.stage) {
            Some(Stage::Begun(_) | Stage::Paging) => Admission::Released(blocked.waits.clone()),
            Some(Stage::Handover(_)) => Admission::Held,
            Some(Stage::Ended | Stage::Failed) | None => {
                Admission::Quarantined(blocked.waits.clone())
            }
        }
    }

    /// A bad event is to be set aside; says whether its key is newly blocked.
    ///
    /// # Errors
    /// `quarantine-full`.
    pub(super) fn set_aside(&mut self, group: &Group, origin: &EventRef) -> Result<bool> {
        if !self.blocks(group) {
            self.unblocking += 1;
            return match self.unblocking > MAX_BLOCKED {
                true => Err(full()),
                false => Ok(false),
            };
        }
        if let Some(blocked) = self.blocked.get_mut(group) {
            blocked.since = blocked.since.min(place(origin));
            return Ok(false);
        }
        if self.blocked.len() >= MAX_BLOCKED {
            return Err(full());
        }
        self.block(group.clone(), place(origin), &origin.event_id.shown());
        Ok(true)
    }

    /// The group from which a released event in a lane was read.
    pub(super) fn source(&self, at: Place) -> Option<Group> {
        self.in_lanes.get(&at).map(|(group, _)| group.clone())
    }

    /// Blocks a key by the event `first`, as it is shown, which stands at `since`. Each row behind it
    /// names it.
    pub(super) fn block(&mut self, group: Group, since: Place, first: &str) {
        let blocked = Blocked {
            since,
            waits: format!("waits for event {first} in quarantine").into(),
            last_record: 0,
            letters: 0,
        };
        self.blocked.insert(group, blocked);
    }

    /// A record is handed to the writer.
    pub(super) fn handed(&mut self, record: &Record) {
        self.handed += 1;
        if let Some(topic) = &record.topic
            && matches!(
                record.outcome,
                Outcome::Quarantined(_) | Outcome::Released(_)
            )
        {
            let group = Group {
                topic: topic.clone(),
                ordering_key: record.ordering_key.clone(),
            };
            if let Some(blocked) = self.blocked.get_mut(&group) {
                blocked.last_record = self.handed;
            }
        }
        if !self.in_lanes.is_empty() {
            for event in &record.events {
                self.left_lane(place(event));
            }
        }
    }

    /// What is recorded for the events behind a blocked key's bad one.
    pub(super) fn waits_for(&self, group: &Group) -> Arc<str> {
        let blocked = self.blocked.get(group);
        blocked.map_or_else(|| "waits in quarantine".into(), |by| by.waits.clone())
    }

    /// So many more records are durable.
    pub(super) fn durable(&mut self, records: u64) {
        self.durable += records;
        while let Some(group) = self.leaving.front() {
            let release = self.releases.get(group);
            let ended = release.filter(|release| release.has_left_lanes());
            if ended.is_some_and(|release| release.last_record > self.durable) {
                break;
            }
            if ended.is_some() {
                self.releases.remove(group);
            }
            self.leaving.pop_front();
        }
    }

    /// Whether everything that was handed to the writer is durable.
    pub(super) fn is_settled(&self) -> bool {
        self.durable == self.handed
    }

    /// The rows in quarantine are about to be counted, and no dead letter is on its way.
    pub(super) fn counting(&mut self) {
        // What is not durable yet is not among them.
        self.counting = self.is_settled().then_some(self.unblocking);
    }

    /// So many rows are in quarantine: what was set aside before and is more than that has left.
    pub(super) fn counted(&mut self, rows: usize) {
        if let Some(before) = self.counting.take() {
            self.unblocking -= before.saturating_sub(rows);
        }
    }

    /// A dead letter of the group is on its way: its event is recorded when it has ended.
    pub(super) fn letter_sent(&mut self, group: &Group) {
        if let Some(blocked) = self.blocked.get_mut(group) {
            blocked.letters += 1;
            if let Some(release) = self.releases.get_mut(group) {
                release.asks_from = u64::MAX;
            }
        }
    }

    /// The letter has come to its end, and its event was handed to the writer just now.
    pub(super) fn letter_ended(&mut self, group: &Group) {
        if let Some(blocked) = self.blocked.get_mut(group) {
            blocked.letters = blocked.letters.saturating_sub(1);
            if let Some(release) = self.releases.get_mut(group)
                && blocked.letters == 0
            {
                release.asks_from = self.handed;
            }
        }
    }
}

fn full() -> Error {
    Error::new(
        Code::QuarantineFull,
        format!("more than {MAX_BLOCKED} keys or events are in quarantine"),
    )
}

#[cfg(test)]
mod tests;
