//! The quarantine: which events are set aside, which keys they block, and how they are released. A
//! state machine without IO.
//!
//! Under `quarantine_key` a bad event blocks its key: events that wait behind it, and all that arrive
//! later, are recorded as quarantined too, to keep the order of the key. Events *before* the bad one
//! are not affected, even when they are replayed after a restart.
//!
//! A release handles one group (a topic and ordering key) in these steps:
//!
//! 1. *Begun.* Events that arrive from now on are recorded as released. Once all earlier records are
//!    durable, every row of the group is marked as released. A restart continues from here.
//! 2. *Paging.* Rows are read in order, page by page, and their events go into their lane.
//! 3. *Handover*, once a page was empty. Events that arrive from now on are held in memory. Once all
//!    earlier records are durable, and a page requested after that is empty, the held events go into
//!    the lane, behind everything released, and the key is no longer blocked.
//! 4. *Ended*. The release is forgotten once the outcome of every released event is durable.
//!
//! If an event fails again, the release has *failed*: the key stays blocked, and all its rows go back
//! into quarantine. Under the other policies, such an event affects only itself.
//!
//! A *replay* releases events that were published before, of a key that has none in quarantine. The key
//! is blocked for the time of the release, under every policy, so that no new event comes between the
//! replayed ones. Such a release begins with step 3: new events are held in memory, and recorded only
//! when there is no room for them. Other groups that block nothing (unordered events, other policies)
//! have step 2 alone.
//!
//! The steps of a release are in `releases`. Not here: the table (`dispatch::quarantined`), and
//! reading released rows (`releaser`).

mod dead_letter;
mod releaser;
mod releases;
mod state;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::error::{Code, Error, Result};
use crate::event::{EventRef, Group, OrderingKey, Standing};
use crate::settings::OnBadEvent;
use crate::store::dispatch::quarantined::{BEHIND_A_RELEASE, MAX_BLOCKED};
use crate::store::dispatch::{Outcome, Record};

pub(crate) use dead_letter::{Letter, letter};
pub(crate) use releaser::{Ask, QuarantineAnswer, Releaser};
use state::{BlockedState, PageState, Release, Stage};
pub(crate) use state::{InLane, Unblocked};

/// Rows of a group that are in flight at once.
pub(crate) const PAGE: usize = 100;

/// Releases that may make progress at once. Those that wait for Pub/Sub do not count: they need no
/// queries, and their events are in the budget of bytes in flight like all others.
const MAX_RELEASES: usize = 256;

/// The place of an event in the log: commit LSN and ordinal.
pub(crate) type EventPlace = (u64, u32);

/// The place of this event.
pub(crate) fn place(origin: &EventRef) -> EventPlace {
    (origin.commit.lsn().as_u64(), origin.ordinal)
}

/// A question to the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum QuarantineQuery {
    /// Mark all quarantined rows of the group as released.
    Mark(Group),
    /// Read released rows after this place.
    Page(Group, EventPlace),
    /// Mark all released rows of the group as quarantined.
    SendBack(Group),
}

/// What to do with an event that arrives.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Put it into its lane.
    Open,
    /// Set it aside in quarantine, for this reason.
    Quarantined(Arc<str>),
    /// Set it aside, behind the events of its key that are being released.
    Released(Arc<str>),
    /// Hold it in memory until its key is no longer blocked.
    Held,
}

/// The quarantine of one session.
#[derive(Debug)]
pub(crate) struct Quarantine {
    policy: OnBadEvent,
    blocked: HashMap<Group, BlockedState>,
    releases: HashMap<Group, Release>,
    /// The groups with a release that has not ended, in the order of their turns.
    turns: VecDeque<Group>,
    /// Releases that have ended and whose last outcome is being recorded, in that order.
    leaving: VecDeque<Group>,
    /// Released events in lanes.
    in_lanes: HashMap<EventPlace, InLane>,
    bytes_in_lanes: usize,
    /// How many records the writer was given, and how many of them are durable.
    handed: u64,
    durable: u64,
    /// Bad events that block nothing. Some of them may have left the quarantine since.
    unblocking: usize,
    /// `unblocking` as it was when the rows were last counted, if all of them were durable then.
    counting: Option<usize>,
}

impl Quarantine {
    pub(crate) fn new(policy: OnBadEvent) -> Self {
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

    pub(crate) fn policy(&self) -> OnBadEvent {
        self.policy
    }

    /// The number of keys that are blocked by an event in quarantine.
    pub(crate) fn blocked(&self) -> usize {
        let blocked = self.blocked.values();
        blocked.filter(|blocked| !blocked.for_release).count()
    }

    /// Whether a bad event of this group blocks the events behind it.
    pub(crate) fn blocks(&self, group: &Group) -> bool {
        self.policy == OnBadEvent::QuarantineKey && group.is_ordered()
    }

    /// Decides what to do with an event that arrives.
    pub(crate) fn admit(
        &self,
        topic: &Arc<str>,
        ordering_key: &OrderingKey,
        at: EventPlace,
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
            // Its release begins later in this session.
            None if blocked.for_release => Admission::Released(blocked.waits.clone()),
            Some(Stage::Ended | Stage::Failed) | None => {
                Admission::Quarantined(blocked.waits.clone())
            }
        }
    }

    /// Registers a bad event. Returns whether its key is newly blocked.
    ///
    /// # Errors
    /// `quarantine-full`.
    pub(crate) fn set_aside(&mut self, group: &Group, origin: &EventRef) -> Result<bool> {
        if !self.blocks(group) {
            self.unblocking += 1;
            return if self.unblocking > MAX_BLOCKED {
                Err(full())
            } else {
                Ok(false)
            };
        }
        if let Some(blocked) = self.blocked.get_mut(group) {
            blocked.since = blocked.since.min(place(origin));
            let newly = std::mem::take(&mut blocked.for_release);
            if newly {
                blocked.waits = waits_for(&origin.event_id.shown());
            }
            return Ok(newly);
        }
        if self.blocked.len() >= MAX_BLOCKED {
            return Err(full());
        }
        self.block(group.clone(), place(origin), &origin.event_id.shown());
        Ok(true)
    }

    /// The group from which a released event, now in a lane, was read.
    pub(crate) fn source(&self, at: EventPlace) -> Option<Group> {
        self.in_lanes.get(&at).map(|lane| lane.group.clone())
    }

    /// Whether a bad event ends the relay.
    pub(crate) fn halts_on(&self, origin: &EventRef) -> bool {
        let in_lane = self.in_lanes.get(&place(origin));
        self.policy == OnBadEvent::Halt
            && (origin.standing == Standing::New || in_lane.is_some_and(|lane| lane.is_new))
    }

    /// Blocks a key from the place `since` on, where the event `first` is (its id as shown to
    /// people). The rows of all events behind it name that event.
    pub(crate) fn block(&mut self, group: Group, since: EventPlace, first: &str) {
        self.blocked
            .insert(group, BlockedState::new(since, waits_for(first)));
    }

    /// Blocks a key from the place `since` on, where its first replayed event is, until the release has
    /// ended.
    pub(crate) fn block_for_release(&mut self, group: Group, since: EventPlace) {
        let blocked = BlockedState {
            for_release: true,
            ..BlockedState::new(since, BEHIND_A_RELEASE.into())
        };
        self.blocked.entry(group).or_insert(blocked);
    }

    /// Counts a record that was just handed to the dispatch writer.
    pub(crate) fn handed(&mut self, record: &Record) {
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

    /// The reason that is recorded for events behind a blocked key's bad event.
    pub(crate) fn waits_for(&self, group: &Group) -> Arc<str> {
        let blocked = self.blocked.get(group);
        blocked.map_or_else(|| "waits in quarantine".into(), |by| by.waits.clone())
    }

    /// `records` more records are durable.
    pub(crate) fn durable(&mut self, records: u64) {
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

    /// Whether all records that the writer was given are durable.
    pub(crate) fn is_settled(&self) -> bool {
        self.durable == self.handed
    }

    /// The rows in quarantine are about to be counted, and no dead letter is in flight.
    pub(crate) fn counting(&mut self) {
        // The count misses records that are not durable yet.
        self.counting = self.is_settled().then_some(self.unblocking);
    }

    /// `rows` rows are in quarantine: if more events were set aside before the count, the rest have
    /// left.
    pub(crate) fn counted(&mut self, rows: usize) {
        if let Some(before) = self.counting.take() {
            self.unblocking -= before.saturating_sub(rows);
        }
    }

    /// A dead letter of the group was sent. Its event is recorded when the letter has ended.
    pub(crate) fn letter_sent(&mut self, group: &Group) {
        if let Some(blocked) = self.blocked.get_mut(group) {
            blocked.letters += 1;
            if let Some(release) = self.releases.get_mut(group) {
                release.asks_from = u64::MAX;
            }
        }
    }

    /// A dead letter of the group has ended, and the writer was just given its event.
    pub(crate) fn letter_ended(&mut self, group: &Group) {
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

/// The reason that is recorded for the events behind the event `first`.
fn waits_for(first: &str) -> Arc<str> {
    format!("waits for event {first} in quarantine").into()
}

fn full() -> Error {
    Error::new(
        Code::QuarantineFull,
        format!("more than {MAX_BLOCKED} keys or events are in quarantine"),
    )
}

#[cfg(test)]
mod tests;
