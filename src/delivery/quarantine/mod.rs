//! Decides which events are set aside, which keys they block, and how they are released. The
//! quarantine is a state machine without IO.
//!
//! Under the policy `quarantine_key` a bad event blocks its key, to keep the order of the key. The relay records the
//! events that wait behind the bad event, and all later events of the key, as quarantined too. Events *before* the bad
//! event are not affected, even when PostgreSQL sends them again after a restart.
//!
//! A release handles one group (a topic and ordering key). It publishes the released rows of the group, and after them
//! the new events of the key. If an event in quarantine blocks the key, the release has these steps:
//!
//! 1. *Begun.* The relay records new events of the key as released. Once all earlier records are durable, the relay
//!    marks every row of the group as released. After a restart the release continues from here.
//! 2. *Paging.* The relay reads the released rows page by page, in commit order, and puts their events into their lane.
//!    It still records new events as released. The step ends with an empty page.
//! 3. *Handover.* From now on, the relay holds new events in memory. Once all earlier records are durable, the relay
//!    reads the remaining pages. After an empty page, the relay puts the held events into the lane, behind all released
//!    events, and unblocks the key.
//! 4. *Ended.* The relay forgets the release once the outcome of every released event is durable.
//!
//! A release does not always go forward:
//!
//! - If memory has no room for the held events of step 3, the relay records them as released, and goes back to step 2.
//! - If an event fails again, the release has *failed*: the key stays blocked, and all its rows go back into
//!   quarantine. Under the other policies, an event that fails again affects only itself.
//!
//! If no event in quarantine blocks the key, the release is shorter:
//!
//! - A *replay* publishes events again that were published before. The replay itself blocks the key, under every
//!   policy, so that no new event comes between the replayed events. The release begins with step 3.
//! - The relay may record a new event as released because the event's message is no longer in memory
//!   (`take_without_message`). The event blocks its key like a replay, and its release begins with step 3.
//! - If nothing blocks the key, the release has only step 2. Events without an ordering key block nothing, and under
//!   the other policies a bad event blocks nothing.
//!
//! [`Quarantine`] has these parts: `keys` knows which keys are blocked, and `in_lanes` knows the released
//! events that are in lanes. `release` is the state machine of one release. `turns` holds all releases, and
//! decides which one may query the table next. An operation on one part is a method of that part. Not here:
//! the table (`dispatch::quarantined`), and reading released rows (`releaser`).

mod dead_letter;
mod former_tables;
mod in_lanes;
mod keys;
mod release;
mod releaser;
mod turns;

use std::sync::Arc;

use crate::error::{Code, Error, Result};
use crate::event::{Event, EventPosition, EventRef, Group, OrderingKey, Standing};
use crate::settings::OnBadEvent;
use crate::store::dispatch::quarantined::MAX_BLOCKED;
use crate::store::dispatch::{Outcome, Record};

pub(crate) use dead_letter::{DeadLetters, Letter, letter};
pub(crate) use in_lanes::InLane;
use in_lanes::ReleasedInLanes;
use keys::BlockedKeys;
use release::{Release, Stage};
pub(crate) use releaser::{QuarantineAnswer, Releaser, ReleaserRequest};
use turns::ReleaseTurns;

/// Maximum number of rows of a page. A release that already has this many events in lanes requests no further page, so
/// that its events do not fill memory.
pub(crate) const PAGE: usize = 100;

/// A statement on `outbox.dispatch` that the release of a group needs next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum QuarantineQuery {
    /// Mark all quarantined rows of the group as released.
    Mark(Group),
    /// Read a page of released rows after this position.
    Page(Group, EventPosition),
    /// Mark all released rows of the group as quarantined, or as published if they were being replayed.
    SendBack(Group),
}

/// How to handle an event that arrives.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Put the event into its lane.
    Open,
    /// Record the event as quarantined, for this reason.
    Quarantined(Arc<str>),
    /// Record the event as released. Earlier events of its key are being released, and are published first.
    Released(Arc<str>),
    /// Hold the event in memory until its key is no longer blocked.
    Held,
}

/// A key that is no longer blocked.
#[derive(Debug)]
pub(crate) struct Unblocked {
    /// The key's events that were held in memory, in commit order.
    pub(crate) held: Vec<Event>,
    /// True if an event in quarantine had blocked the key. False if only a release had blocked it.
    pub(crate) was_in_quarantine: bool,
}

/// The quarantine of one session.
#[derive(Debug)]
pub(crate) struct Quarantine {
    pub(crate) keys: BlockedKeys,
    pub(crate) releases: ReleaseTurns,
    pub(crate) in_lanes: ReleasedInLanes,
    /// Number of records that were given to the writer so far.
    handed: u64,
    /// Number of these records that are durable.
    durable: u64,
    /// Number of bad events that were set aside without blocking a key. Some of them may have left the
    /// quarantine since, so each count of the rows corrects this number.
    unblocking: usize,
    /// Value of `unblocking` when the current count of the rows began. `None` if no count is under way,
    /// or if some records were not durable when the count began.
    counting: Option<usize>,
}

impl Quarantine {
    pub(crate) fn new(policy: OnBadEvent) -> Self {
        Self {
            keys: BlockedKeys::new(policy),
            releases: ReleaseTurns::default(),
            in_lanes: ReleasedInLanes::default(),
            handed: 0,
            durable: 0,
            unblocking: 0,
            counting: None,
        }
    }

    /// Decides what to do with an event that arrives.
    pub(crate) fn admit(
        &self,
        topic: &Arc<str>,
        ordering_key: &OrderingKey,
        at: EventPosition,
    ) -> Admission {
        if self.keys.by_group.is_empty() || ordering_key.is_unordered() {
            return Admission::Open;
        }
        let group = Group {
            topic: topic.clone(),
            ordering_key: ordering_key.clone(),
        };
        let blocked = self.keys.by_group.get(&group);
        let Some(blocked) = blocked.filter(|by| at >= by.since) else {
            return Admission::Open;
        };
        let release = self.releases.by_group.get(&group);
        match release.map(|release| &release.stage) {
            Some(Stage::Begun(_) | Stage::Paging) => Admission::Released(blocked.waits.clone()),
            Some(Stage::Handover(_)) => Admission::Held,
            // The release of this key has not begun yet. The event must wait behind the released events, so record it
            // as released too.
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
        if self.keys.blocks(group) {
            return self.keys.block_behind(group, origin);
        }
        self.unblocking += 1;
        if self.unblocking > MAX_BLOCKED {
            return Err(full());
        }
        Ok(false)
    }

    /// Whether the relay stops if this event is bad. Under the policy `halt`, two kinds of events stop the relay:
    ///
    /// - an event without a dispatch row;
    /// - an event that the relay itself has recorded as released ([`InLane::is_new`]).
    ///
    /// No other event stops the relay: it was published before, or an operator has released it.
    pub(crate) fn halts_on(&self, origin: &EventRef) -> bool {
        self.keys.policy() == OnBadEvent::Halt
            && (origin.standing == Standing::New || self.in_lanes.is_new(origin.position))
    }

    /// Counts a record that was just given to the dispatch writer.
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
            if let Some(blocked) = self.keys.by_group.get_mut(&group) {
                blocked.last_record = self.handed;
            }
        }
        if !self.in_lanes.is_empty() {
            for event in &record.events {
                self.left_lane(event.position);
            }
        }
    }

    /// Notes that `records` more records are durable.
    pub(crate) fn durable(&mut self, records: u64) {
        self.durable += records;
        self.releases.forget_recorded(self.durable);
    }

    /// Number of records that were given to the writer so far.
    pub(crate) fn records_handed(&self) -> u64 {
        self.handed
    }

    /// Whether the first `records` records that the writer was given are durable.
    pub(crate) fn are_durable(&self, records: u64) -> bool {
        self.durable >= records
    }

    /// Whether all records that the writer was given are durable.
    pub(crate) fn is_settled(&self) -> bool {
        self.durable == self.handed
    }

    /// Whether this session knows of an event in quarantine.
    pub(crate) fn is_any(&self) -> bool {
        self.unblocking > 0 || self.keys.count() > 0
    }

    /// Notes that the rows in quarantine are about to be counted. The caller makes sure that no dead letter
    /// is in flight: the event of such a letter has no row yet, so the count would miss it.
    pub(crate) fn counting(&mut self) {
        // If some records are not durable yet, the count misses them, so `counted` must not use it.
        self.counting = self.is_settled().then_some(self.unblocking);
    }

    /// Lowers `unblocking` if a count shows that it is too high. `rows` is the number of events that the count has
    /// found in quarantine.
    ///
    /// The count finds every event that is still in quarantine. So if `unblocking` was higher than `rows` when the
    /// count began, at least the difference has left the quarantine. Subtracts the difference.
    pub(crate) fn counted(&mut self, rows: usize) {
        if let Some(before) = self.counting.take() {
            self.unblocking -= before.saturating_sub(rows);
        }
    }

    /// Notes that a dead letter of the group was sent. Its event is recorded once the letter is
    /// stored or refused.
    pub(crate) fn letter_sent(&mut self, group: &Group) {
        if let Some(blocked) = self.keys.by_group.get_mut(group) {
            blocked.letters += 1;
            if let Some(release) = self.releases.by_group.get_mut(group) {
                release.asks_from = u64::MAX;
            }
        }
    }

    /// Notes that a dead letter of the group was stored or refused, and that the writer was just given the
    /// record of its event.
    pub(crate) fn letter_ended(&mut self, group: &Group) {
        if let Some(blocked) = self.keys.by_group.get_mut(group) {
            blocked.letters = blocked.letters.saturating_sub(1);
            if let Some(release) = self.releases.by_group.get_mut(group)
                && blocked.letters == 0
            {
                release.asks_from = self.handed;
            }
        }
    }

    /// Begins the release of a group whose events an operator has released or replayed. Does nothing if a
    /// release of the group is under way, or if there is no room for another release.
    pub(crate) fn release(&mut self, group: Group, is_replay: bool) {
        if self.releases.by_group.contains_key(&group) || !self.releases.have_room() {
            return;
        }
        if is_replay && group.is_ordered() {
            self.keys
                .block_for_release(group.clone(), EventPosition::default());
        }
        let release = Release::new(self.keys.by_group.get(&group), self.handed);
        self.releases.add(group, release);
    }

    /// Returns the next query on the table, if one is due.
    pub(crate) fn command(&mut self) -> Option<QuarantineQuery> {
        self.releases.command(&self.keys, self.durable)
    }

    /// Notes that a query of [`Self::command`] has read a row. Returns whether the caller should publish the
    /// row's event.
    pub(crate) fn read(&mut self, group: &Group, at: EventPosition) -> bool {
        let release = self.releases.by_group.get_mut(group);
        release.is_some_and(|release| release.read(at, self.durable))
    }

    /// Notes that the event of a row goes into its lane.
    pub(crate) fn goes_to_lane(&mut self, at: EventPosition, lane: InLane) {
        if let Some(release) = self.releases.by_group.get_mut(&lane.group) {
            release.in_lanes += 1;
            self.in_lanes.add(at, lane);
        }
    }

    /// Notes that the page has ended after `rows` rows. Returns the held events if the end of this page
    /// unblocks the key.
    pub(crate) fn page_ended(&mut self, group: &Group, rows: usize) -> Option<Unblocked> {
        let release = self.releases.by_group.get_mut(group)?;
        let held = release.page_ended(rows, self.keys.by_group.get(group))?;
        self.releases.ended(group, self.durable);
        let blocked = self.keys.by_group.remove(group)?;
        Some(Unblocked {
            held,
            was_in_quarantine: !blocked.for_release,
        })
    }

    /// Takes all held events out of memory. The caller records them as released.
    pub(crate) fn unhold(&mut self) -> Vec<(Group, Arc<str>, Vec<Event>)> {
        self.releases.unhold(&self.keys)
    }

    /// Notes that a released event has left its lane: the writer was just given its outcome, or the event
    /// was dropped. Returns the group of the row from which the event was read.
    pub(crate) fn left_lane(&mut self, at: EventPosition) -> Option<Group> {
        let group = self.in_lanes.remove(at)?;
        self.releases.left_lane(&group, self.handed);
        Some(group)
    }

    /// Fails the release of the group, because one of its events is bad. Returns the held events, which
    /// must be recorded as quarantined.
    pub(crate) fn fail(&mut self, group: &Group) -> Vec<Event> {
        let is_released = self.releases.by_group.contains_key(group) && self.keys.blocks(group);
        let blocked = self.keys.by_group.get_mut(group);
        let Some(blocked) = blocked.filter(|_| is_released) else {
            return Vec::new();
        };
        blocked.for_release = false;
        self.releases.fail(group)
    }

    /// Returns up to `limit` blocked keys, after skipping the first `skip`. Considers only keys that are
    /// not being released and whose records are all durable. Also returns how many records are durable
    /// now.
    pub(crate) fn settled(&self, skip: usize, limit: usize) -> (Vec<Group>, u64) {
        let settled = self.keys.by_group.iter().filter(|(group, blocked)| {
            blocked.is_recorded(self.durable) && !self.releases.by_group.contains_key(group)
        });
        let groups = settled
            .skip(skip)
            .take(limit)
            .map(|(group, _)| group.clone());
        (groups.collect(), self.durable)
    }

    /// Unblocks a key that has no row left in the table. `durable` is the number of records that were durable
    /// when the table was read. Returns false if the key stays blocked, because it has newer records or is
    /// being released.
    pub(crate) fn vanished(&mut self, group: &Group, durable: u64) -> bool {
        let blocked = self.keys.by_group.get(group);
        blocked.is_some_and(|blocked| blocked.is_recorded(durable))
            && !self.releases.by_group.contains_key(group)
            && self.keys.by_group.remove(group).is_some()
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
