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
//! Not here: the table (`dispatch::quarantined`), and reading what is released (`releaser`).

mod dead_letter;
mod releaser;

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

/// Groups that are released at once.
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
    /// Events in lanes.
    in_lanes: usize,
    /// The last record of an event of it that was handed to the writer.
    last_record: u64,
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
    /// The same groups, in turn.
    turns: VecDeque<Group>,
    /// Released events in lanes.
    in_lanes: HashMap<Place, Group>,
    /// Records handed to the writer, and those of them that are durable.
    handed: u64,
    durable: u64,
    /// Bad events that block nothing.
    unblocking: usize,
}

impl Quarantine {
    pub(super) fn new(policy: OnBadEvent) -> Self {
        Self {
            policy,
            blocked: HashMap::new(),
            releases: HashMap::new(),
            turns: VecDeque::new(),
            in_lanes: HashMap::new(),
            handed: 0,
            durable: 0,
            unblocking: 0,
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
        self.block(group.clone(), place(origin), &origin.event_id.to_string());
        Ok(true)
    }

    /// The group from which a released event in a lane was read.
    pub(super) fn source(&self, at: Place) -> Option<Group> {
        self.in_lanes.get(&at).cloned()
    }

    /// Blocks a key by the event `first`, which stands at `since`.
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
        if self.releases.is_empty() {
            return;
        }
        let durable = self.durable;
        self.releases.retain(|_, release| {
            !(matches!(release.stage, Stage::Ended)
                && release.in_lanes == 0
                && release.last_record <= durable)
        });
        self.turns.retain(|group| self.releases.contains_key(group));
    }

    /// A dead letter of the group is on its way, or has come to its end.
    pub(super) fn letters(&mut self, group: &Group, change: i32) {
        if let Some(blocked) = self.blocked.get_mut(group) {
            blocked.letters = blocked.letters.saturating_add_signed(change);
        }
    }
}

/// Releases.
impl Quarantine {
    /// An operator has asked for events of this group.
    pub(super) fn release(&mut self, group: Group) {
        if self.releases.contains_key(&group) || self.releases.len() >= MAX_RELEASES {
            return;
        }
        let stage = match self.blocked.contains_key(&group) {
            true => Stage::Begun(self.handed),
            false => Stage::Paging,
        };
        let release = Release {
            stage,
            after: (0, 0),
            asked_at: 0,
            in_lanes: 0,
            last_record: 0,
        };
        self.releases.insert(group.clone(), release);
        self.turns.push_back(group);
    }

    /// Whether the group is being released by its key.
    pub(super) fn is_releasing(&self, group: &Group) -> bool {
        self.releases.get(group).is_some_and(|release| {
            matches!(
                release.stage,
                Stage::Begun(_) | Stage::Paging | Stage::Handover(_)
            )
        })
    }

    /// The next thing to ask of the table, if any is due.
    pub(super) fn command(&mut self) -> Option<Command> {
        for _ in 0..self.turns.len() {
            let group = self.turns.pop_front()?;
            self.turns.push_back(group.clone());
            let command = self.command_for(&group);
            if command.is_some() {
                return command;
            }
        }
        None
    }

    fn command_for(&mut self, group: &Group) -> Option<Command> {
        let blocked = self.blocked.get(group);
        let last_record = blocked.map_or(0, |by| by.last_record);
        let release = self.releases.get_mut(group)?;
        if blocked.is_some_and(|by| by.letters > 0) {
            return None;
        }
        let room = release.in_lanes < PAGE;
        let all_durable = self.durable >= last_record.max(release.last_record);
        match &release.stage {
            Stage::Begun(at) if self.durable >= *at => Some(Command::Mark(group.clone())),
            Stage::Paging if room => {
                release.asked_at = self.durable;
                Some(Command::Page(group.clone(), release.after))
            }
            Stage::Handover(_) if room && self.durable >= last_record => {
                release.asked_at = self.durable;
                Some(Command::Page(group.clone(), release.after))
            }
            Stage::Failed if all_durable && release.in_lanes == 0 => {
                Some(Command::SendBack(group.clone()))
            }
            Stage::Begun(_) | Stage::Paging | Stage::Handover(_) | Stage::Ended | Stage::Failed => {
                None
            }
        }
    }

    /// All rows of the group are marked as released.
    pub(super) fn marked(&mut self, group: &Group) {
        if let Some(release) = self.releases.get_mut(group)
            && matches!(release.stage, Stage::Begun(_))
        {
            release.stage = Stage::Paging;
        }
    }

    /// A row of a page has been read. Whether its event is still wanted.
    pub(super) fn read(&mut self, group: &Group, at: Place) -> bool {
        let Some(release) = self.releases.get_mut(group) else {
            return false;
        };
        let wanted = matches!(release.stage, Stage::Paging | Stage::Handover(_));
        if wanted {
            release.after = at;
        }
        wanted
    }

    /// The event of a row goes into its lane.
    pub(super) fn goes_to_lane(&mut self, group: &Group, at: Place) {
        if let Some(release) = self.releases.get_mut(group) {
            release.in_lanes += 1;
            self.in_lanes.insert(at, group.clone());
        }
    }

    /// The page has ended, after so many rows. Gives the events that were held if the key is not
    /// blocked any more by it.
    pub(super) fn page_ended(&mut self, group: &Group, rows: usize) -> Option<Vec<Event>> {
        let release = self.releases.get_mut(group)?;
        if rows > 0 {
            return None;
        }
        let last_record = self.blocked.get(group).map(|by| by.last_record);
        match (&mut release.stage, last_record) {
            (Stage::Paging, Some(_)) => release.stage = Stage::Handover(Vec::new()),
            (Stage::Handover(held), Some(last)) if release.asked_at >= last => {
                let held = std::mem::take(held);
                release.stage = Stage::Ended;
                self.blocked.remove(group);
                self.end_of_idle(group);
                return Some(held);
            }
            (Stage::Paging | Stage::Handover(_), None) => {
                release.stage = Stage::Ended;
                self.end_of_idle(group);
            }
            (Stage::Handover(_), Some(_)) | (Stage::Begun(_) | Stage::Ended | Stage::Failed, _) => {
            }
        }
        None
    }

    /// Forgets a release of which nothing is on its way.
    fn end_of_idle(&mut self, group: &Group) {
        let durable = self.durable;
        let idle = |release: &Release| release.in_lanes == 0 && release.last_record <= durable;
        if self.releases.get(group).is_some_and(idle) {
            self.forget(group);
        }
    }

    fn forget(&mut self, group: &Group) {
        self.releases.remove(group);
        self.turns.retain(|other| other != group);
    }

    /// Holds an event that [`admit`](Self::admit) wants held.
    pub(super) fn hold(&mut self, topic: Arc<str>, ordering_key: OrderingKey, event: Event) {
        let group = Group {
            topic,
            ordering_key,
        };
        if let Some(Stage::Handover(held)) = self.releases.get_mut(&group).map(|r| &mut r.stage) {
            held.push(event);
        }
    }

    /// Takes what is held back out of memory; the groups go on page by page. To be recorded as
    /// released.
    pub(super) fn unhold(&mut self) -> Vec<(Group, Arc<str>, Vec<Event>)> {
        let mut all = Vec::new();
        for (group, release) in &mut self.releases {
            if let Stage::Handover(held) = &mut release.stage
                && let Some(blocked) = self.blocked.get(group)
                && !held.is_empty()
            {
                all.push((group.clone(), blocked.waits.clone(), std::mem::take(held)));
                release.stage = Stage::Paging;
            }
        }
        all
    }

    /// A released event is not in a lane any more: its outcome was handed to the writer just now,
    /// or it was dropped. Gives the group that it was read from.
    pub(super) fn left_lane(&mut self, at: Place) -> Option<Group> {
        let group = self.in_lanes.remove(&at)?;
        if let Some(release) = self.releases.get_mut(&group) {
            release.in_lanes -= 1;
            release.last_record = self.handed;
        }
        Some(group)
    }

    /// A released event of the group failed again, or an event before it. Gives what was held, to
    /// be recorded as quarantined.
    pub(super) fn fail(&mut self, group: &Group) -> Vec<Event> {
        if !self.blocked.contains_key(group) {
            return Vec::new();
        }
        let Some(release) = self.releases.get_mut(group) else {
            return Vec::new();
        };
        match std::mem::replace(&mut release.stage, Stage::Failed) {
            Stage::Handover(held) => held,
            Stage::Begun(_) | Stage::Paging | Stage::Ended | Stage::Failed => Vec::new(),
        }
    }

    /// All released rows of a failed group are quarantined again.
    pub(super) fn sent_back(&mut self, group: &Group) {
        if self
            .releases
            .get(group)
            .is_some_and(|release| matches!(release.stage, Stage::Failed))
        {
            self.forget(group);
        }
    }

    /// Blocked keys whose records are all durable and that are not being released: up to `limit`
    /// of them, beginning after `skip`. With the number of records that were durable by then.
    pub(super) fn settled(&self, skip: usize, limit: usize) -> (Vec<Group>, u64) {
        let settled = self.blocked.iter().filter(|(group, blocked)| {
            blocked.letters == 0
                && blocked.last_record <= self.durable
                && !self.releases.contains_key(group)
        });
        let groups = settled
            .skip(skip)
            .take(limit)
            .map(|(group, _)| group.clone());
        (groups.collect(), self.durable)
    }

    /// The table has no row of this blocked key any more, as of `durable` records. Says whether
    /// it is open by that.
    pub(super) fn vanished(&mut self, group: &Group, durable: u64) -> bool {
        let unchanged = |blocked: &Blocked| blocked.letters == 0 && blocked.last_record <= durable;
        self.blocked.get(group).is_some_and(unchanged)
            && !self.releases.contains_key(group)
            && self.blocked.remove(group).is_some()
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
