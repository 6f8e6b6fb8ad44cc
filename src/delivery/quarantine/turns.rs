//! Keeps the releases of one session, and decides which of them may query the table next.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::keys::BlockedKeys;
use super::release::{Release, Stage};
use super::{PAGE, QuarantineQuery};
use crate::event::{Event, Group, OrderingKey};

/// Maximum number of releases that read pages at once. A release with a whole page of events in lanes does
/// not count, because it needs no query now, and its events count against the budget of bytes in flight.
pub(super) const MAX_RELEASES: usize = 256;

/// The releases, by group.
#[derive(Debug, Default)]
pub(crate) struct ReleaseTurns {
    pub(super) by_group: HashMap<Group, Release>,
    /// The groups with a release that has not ended, in the order in which they take turns.
    turns: VecDeque<Group>,
    /// Releases that have ended but whose last outcomes might not be durable yet, oldest first.
    leaving: VecDeque<Group>,
}

impl ReleaseTurns {
    /// Whether another release may begin.
    pub(super) fn have_room(&self) -> bool {
        let goes_forward = |group: &&Group| {
            let release = self.by_group.get(*group);
            release.is_some_and(|release| release.in_lanes < PAGE)
        };
        self.turns.iter().filter(goes_forward).count() < MAX_RELEASES
    }

    pub(super) fn add(&mut self, group: Group, release: Release) {
        self.by_group.insert(group.clone(), release);
        self.turns.push_back(group);
    }

    /// Whether a release of the group is under way.
    pub(crate) fn is_releasing(&self, group: &Group) -> bool {
        let release = self.by_group.get(group);
        release.is_some_and(Release::is_releasing)
    }

    /// Returns the next query on the table, if one is due. `durable` is the number of durable records. The
    /// releases take turns.
    pub(super) fn command(&mut self, keys: &BlockedKeys, durable: u64) -> Option<QuarantineQuery> {
        for _ in 0..self.turns.len() {
            let group = self.turns.pop_front()?;
            self.turns.push_back(group.clone());
            let blocked = keys.by_group.get(&group);
            let release = self.by_group.get_mut(&group);
            let command = release.and_then(|release| release.command(&group, blocked, durable));
            if command.is_some() {
                return command;
            }
        }
        None
    }

    /// Notes that all rows of the group are marked as released.
    pub(crate) fn marked(&mut self, group: &Group) {
        self.begun(group, Stage::Paging);
    }

    /// Fails a release whose released events all belong to a replay, although an event in quarantine blocks the key.
    /// This event came into quarantine after the replay had begun. The next step of the release would also release the
    /// event in quarantine, but no operator has asked for that.
    pub(crate) fn only_replayed(&mut self, group: &Group) {
        self.begun(group, Stage::Failed);
    }

    fn begun(&mut self, group: &Group, next: Stage) {
        if let Some(release) = self.by_group.get_mut(group)
            && matches!(release.stage, Stage::Begun(_))
        {
            release.stage = next;
        }
    }

    /// Holds an event for which [`admit`](super::Quarantine::admit) has returned `Held`.
    pub(crate) fn hold(&mut self, topic: Arc<str>, ordering_key: OrderingKey, event: Event) {
        let group = Group {
            topic,
            ordering_key,
        };
        if let Some(Stage::Handover(held)) = self.by_group.get_mut(&group).map(|r| &mut r.stage) {
            held.push(event);
        }
    }

    /// The events that are held in memory.
    pub(crate) fn held(&self) -> impl Iterator<Item = &Event> {
        let stages = self.by_group.values().map(|release| &release.stage);
        stages.flat_map(|stage| match stage {
            Stage::Handover(held) => held.as_slice(),
            Stage::Begun(_) | Stage::Paging | Stage::Ended | Stage::Failed => &[],
        })
    }

    /// Takes all held events out of memory. Returns the events of each group, and why they wait. The caller records
    /// the events as released, for this reason. The releases of these groups go back to the stage `Paging`, and read
    /// the events from the table later.
    pub(super) fn unhold(&mut self, keys: &BlockedKeys) -> Vec<(Group, Arc<str>, Vec<Event>)> {
        let mut all = Vec::new();
        for (group, release) in &mut self.by_group {
            if let Stage::Handover(held) = &mut release.stage
                && let Some(blocked) = keys.by_group.get(group)
                && !held.is_empty()
            {
                all.push((group.clone(), blocked.waits.clone(), std::mem::take(held)));
                release.stage = Stage::Paging;
            }
        }
        all
    }

    /// Notes that an event of the group has left its lane. `handed` is the number of records given to the
    /// writer so far.
    pub(super) fn left_lane(&mut self, group: &Group, handed: u64) {
        if let Some(release) = self.by_group.get_mut(group) {
            release.in_lanes -= 1;
            release.last_record = handed;
            if release.has_left_lanes() {
                self.leaving.push_back(group.clone());
            }
        }
    }

    /// Fails a release. Returns the events that it held in memory.
    pub(super) fn fail(&mut self, group: &Group) -> Vec<Event> {
        let Some(release) = self.by_group.get_mut(group) else {
            return Vec::new();
        };
        match std::mem::replace(&mut release.stage, Stage::Failed) {
            Stage::Handover(held) => held,
            Stage::Ended => {
                self.turns.push_back(group.clone());
                Vec::new()
            }
            Stage::Begun(_) | Stage::Paging | Stage::Failed => Vec::new(),
        }
    }

    /// Forgets a failed release. Its rows are now marked as quarantined, or as published if they were being replayed.
    pub(crate) fn sent_back(&mut self, group: &Group) {
        let release = self.by_group.get(group);
        if release.is_some_and(|release| matches!(release.stage, Stage::Failed)) {
            self.by_group.remove(group);
            self.turns.retain(|other| other != group);
        }
    }

    /// Notes that a release has ended: it needs no more turns, and is forgotten when its last outcomes are
    /// durable.
    pub(super) fn ended(&mut self, group: &Group, durable: u64) {
        self.turns.retain(|other| other != group);
        let release = self.by_group.get(group);
        if release.is_some_and(Release::has_left_lanes) {
            self.leaving.push_back(group.clone());
            self.forget_recorded(durable);
        }
    }

    /// Forgets the releases that have ended and whose outcomes are durable.
    pub(super) fn forget_recorded(&mut self, durable: u64) {
        while let Some(group) = self.leaving.front() {
            let release = self.by_group.get(group);
            let ended = release.filter(|release| release.has_left_lanes());
            if ended.is_some_and(|release| release.last_record > durable) {
                break;
            }
            if ended.is_some() {
                self.by_group.remove(group);
            }
            self.leaving.pop_front();
        }
    }
}
