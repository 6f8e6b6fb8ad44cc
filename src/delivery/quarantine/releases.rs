//! The steps of a release: see the header of the parent module.

use std::sync::Arc;

use super::{
    BlockedState, EventPlace, InLane, MAX_RELEASES, PAGE, PageState, Quarantine, QuarantineQuery,
    Release, Stage, Unblocked,
};
use crate::event::{Event, Group, OrderingKey};

impl Quarantine {
    /// An operator has released or replayed events of this group.
    pub(crate) fn release(&mut self, group: Group, is_replay: bool) {
        let goes_forward = |group: &&Group| {
            let release = self.releases.get(*group);
            release.is_some_and(|release| release.in_lanes < PAGE)
        };
        if self.releases.contains_key(&group)
            || self.turns.iter().filter(goes_forward).count() >= MAX_RELEASES
        {
            return;
        }
        if is_replay && group.is_ordered() {
            self.block_for_release(group.clone(), (0, 0));
        }
        let blocked = self.blocked.get(&group);
        let stage = match blocked {
            Some(blocked) if !blocked.for_release => Stage::Begun(self.handed),
            // All its released rows are in the table, so new events need not be recorded.
            Some(_) => Stage::Handover(Vec::new()),
            None => Stage::Paging,
        };
        let asks_from = match blocked {
            Some(blocked) if blocked.letters > 0 => u64::MAX,
            // No page may miss an event that was recorded before the release, as after a restart.
            Some(blocked) => blocked.last_record,
            None => 0,
        };
        let release = Release {
            stage,
            after: (0, 0),
            asked_at: 0,
            page: PageState::Asked,
            asks_from,
            in_lanes: 0,
            last_record: 0,
        };
        self.releases.insert(group.clone(), release);
        self.turns.push_back(group);
    }

    /// Whether the released events in lanes take `room` bytes or more, so that the rest of the budget
    /// must be left to others.
    pub(crate) fn crowds_lanes(&self, room: usize) -> bool {
        self.bytes_in_lanes >= room
    }

    /// Whether a release of the group is under way.
    pub(crate) fn is_releasing(&self, group: &Group) -> bool {
        self.releases.get(group).is_some_and(|release| {
            matches!(
                release.stage,
                Stage::Begun(_) | Stage::Paging | Stage::Handover(_)
            )
        })
    }

    /// The next question to the table, if one is due.
    pub(crate) fn command(&mut self) -> Option<QuarantineQuery> {
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

    fn command_for(&mut self, group: &Group) -> Option<QuarantineQuery> {
        let blocked = self.blocked.get(group);
        let last_record = blocked.map_or(0, |by| by.last_record);
        let release = self.releases.get_mut(group)?;
        if blocked.is_some_and(|by| by.letters > 0) {
            return None;
        }
        let room = release.in_lanes < PAGE && self.durable >= release.asks_from;
        let all_durable = self.durable >= last_record.max(release.last_record);
        if release.is_idle(self.durable) {
            release.after = (0, 0);
        }
        match &release.stage {
            Stage::Begun(at) if self.durable >= *at => Some(QuarantineQuery::Mark(group.clone())),
            Stage::Paging if room => Some(release.page(group, self.durable)),
            Stage::Handover(_) if room && self.durable >= last_record => {
                Some(release.page(group, self.durable))
            }
            Stage::Failed if all_durable && release.in_lanes == 0 => {
                Some(QuarantineQuery::SendBack(group.clone()))
            }
            Stage::Begun(_) | Stage::Paging | Stage::Handover(_) | Stage::Ended | Stage::Failed => {
                None
            }
        }
    }

    /// All rows of the group are marked as released.
    pub(crate) fn marked(&mut self, group: &Group) {
        if let Some(release) = self.releases.get_mut(group)
            && matches!(release.stage, Stage::Begun(_))
        {
            release.stage = Stage::Paging;
        }
    }

    /// None of the released events of the group was ever in quarantine: they are replayed. Its bad event
    /// came later, so the replay is given up.
    pub(crate) fn only_replayed(&mut self, group: &Group) {
        if let Some(release) = self.releases.get_mut(group)
            && matches!(release.stage, Stage::Begun(_))
        {
            release.stage = Stage::Failed;
        }
    }

    /// A row of a page was read. Returns whether its event is still wanted.
    pub(crate) fn read(&mut self, group: &Group, at: EventPlace) -> bool {
        let Some(release) = self.releases.get_mut(group) else {
            return false;
        };
        if release.page == PageState::Asked {
            let may_skip_rows = release.after != (0, 0) && release.is_idle(self.durable);
            release.page = if may_skip_rows {
                PageState::Stale
            } else {
                PageState::Wanted
            };
        }
        let wanted = matches!(release.stage, Stage::Paging | Stage::Handover(_))
            && release.asked_at >= release.asks_from
            && release.page == PageState::Wanted;
        if wanted {
            release.after = at;
        }
        wanted
    }

    /// The event of a row goes into its lane.
    pub(crate) fn goes_to_lane(&mut self, at: EventPlace, lane: InLane) {
        if let Some(release) = self.releases.get_mut(&lane.group) {
            release.in_lanes += 1;
            self.bytes_in_lanes += lane.bytes;
            self.in_lanes.insert(at, lane);
        }
    }

    /// The page has ended after `rows` rows. Returns the held events if this unblocks the key.
    pub(crate) fn page_ended(&mut self, group: &Group, rows: usize) -> Option<Unblocked> {
        let release = self.releases.get_mut(group)?;
        if rows > 0 || release.asked_at < release.asks_from {
            return None;
        }
        let last_record = self.blocked.get(group).map(|by| by.last_record);
        match (&mut release.stage, last_record) {
            (Stage::Paging, Some(_)) => release.stage = Stage::Handover(Vec::new()),
            (Stage::Handover(held), Some(last)) if release.asked_at >= last => {
                let held = std::mem::take(held);
                release.stage = Stage::Ended;
                let blocked = self.blocked.remove(group);
                self.ended(group);
                return Some(Unblocked {
                    held,
                    was_in_quarantine: blocked.is_some_and(|by| !by.for_release),
                });
            }
            (Stage::Paging | Stage::Handover(_), None) => {
                release.stage = Stage::Ended;
                self.ended(group);
            }
            (Stage::Handover(_), Some(_)) | (Stage::Begun(_) | Stage::Ended | Stage::Failed, _) => {
            }
        }
        None
    }

    /// A release has ended: it needs no more turns, and is forgotten when its last outcomes are
    /// durable.
    fn ended(&mut self, group: &Group) {
        self.turns.retain(|other| other != group);
        if self
            .releases
            .get(group)
            .is_some_and(Release::has_left_lanes)
        {
            self.leaving.push_back(group.clone());
            self.durable(0);
        }
    }

    fn forget(&mut self, group: &Group) {
        self.releases.remove(group);
        self.turns.retain(|other| other != group);
    }

    /// Holds an event for which [`admit`](Self::admit) has returned `Held`.
    pub(crate) fn hold(&mut self, topic: Arc<str>, ordering_key: OrderingKey, event: Event) {
        let group = Group {
            topic,
            ordering_key,
        };
        if let Some(Stage::Handover(held)) = self.releases.get_mut(&group).map(|r| &mut r.stage) {
            held.push(event);
        }
    }

    /// Takes all held events out of memory, to be recorded as released. Their groups continue page by
    /// page.
    pub(crate) fn unhold(&mut self) -> Vec<(Group, Arc<str>, Vec<Event>)> {
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

    /// A released event has left its lane: the writer was just given its outcome, or the event was
    /// dropped. Returns the group from which it was read.
    pub(crate) fn left_lane(&mut self, at: EventPlace) -> Option<Group> {
        let InLane { group, bytes, .. } = self.in_lanes.remove(&at)?;
        self.bytes_in_lanes -= bytes;
        if let Some(release) = self.releases.get_mut(&group) {
            release.in_lanes -= 1;
            release.last_record = self.handed;
            if release.has_left_lanes() {
                self.leaving.push_back(group.clone());
            }
        }
        Some(group)
    }

    /// A released event of the group has failed again, or an event before it. Returns the held
    /// events, which must be recorded as quarantined.
    pub(crate) fn fail(&mut self, group: &Group) -> Vec<Event> {
        if !self.blocks(group) {
            return Vec::new();
        }
        let (Some(blocked), Some(release)) =
            (self.blocked.get_mut(group), self.releases.get_mut(group))
        else {
            return Vec::new();
        };
        blocked.for_release = false;
        match std::mem::replace(&mut release.stage, Stage::Failed) {
            Stage::Handover(held) => held,
            Stage::Ended => {
                self.turns.push_back(group.clone());
                Vec::new()
            }
            Stage::Begun(_) | Stage::Paging | Stage::Failed => Vec::new(),
        }
    }

    /// All released rows of a failed group are quarantined again.
    pub(crate) fn sent_back(&mut self, group: &Group) {
        if self
            .releases
            .get(group)
            .is_some_and(|release| matches!(release.stage, Stage::Failed))
        {
            self.forget(group);
        }
    }

    /// Blocked keys that are not being released and whose records are all durable: up to `limit` of
    /// them, after the first `skip`. Also returns how many records were durable at this moment.
    pub(crate) fn settled(&self, skip: usize, limit: usize) -> (Vec<Group>, u64) {
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

    /// The table had no row of this blocked key left when `durable` records were durable. Returns
    /// whether this unblocks the key.
    pub(crate) fn vanished(&mut self, group: &Group, durable: u64) -> bool {
        let unchanged =
            |blocked: &BlockedState| blocked.letters == 0 && blocked.last_record <= durable;
        self.blocked.get(group).is_some_and(unchanged)
            && !self.releases.contains_key(group)
            && self.blocked.remove(group).is_some()
    }
}
