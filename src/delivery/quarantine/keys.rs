//! Keeps track of the blocked keys, and of the first blocked position of each key.

use std::collections::HashMap;
use std::sync::Arc;

use super::full;
use crate::error::Result;
use crate::event::{EventPosition, EventRef, Group};
use crate::settings::OnBadEvent;
use crate::store::dispatch::quarantined::{BEHIND_A_RELEASE, MAX_BLOCKED};

/// A blocked key.
#[derive(Debug)]
pub(super) struct BlockedState {
    /// Whether the key is blocked only until its release ends. Such a key has no event in quarantine.
    pub(super) for_release: bool,
    /// The first blocked position, usually the position of the key's first event in quarantine. Events before
    /// this position are not affected.
    pub(super) since: EventPosition,
    /// The reason that is recorded for the events that wait because the key is blocked.
    pub(super) waits: Arc<str>,
    /// The number of the key's last record. All records of the session are numbered in the order in which the
    /// writer got them.
    pub(super) last_record: u64,
    /// Number of bad events whose dead letter is in flight. These events are not recorded yet.
    pub(super) letters: u32,
}

impl BlockedState {
    fn new(since: EventPosition, waits: Arc<str>) -> Self {
        Self {
            for_release: false,
            since,
            waits,
            last_record: 0,
            letters: 0,
        }
    }

    /// Whether all records of this key are durable. `durable` is the number of durable records of the
    /// session. Returns false while a dead letter of the key is in flight, because the bad event has no
    /// record yet.
    pub(super) fn is_recorded(&self, durable: u64) -> bool {
        self.letters == 0 && self.last_record <= durable
    }
}

/// The blocked keys of one session.
#[derive(Debug)]
pub(crate) struct BlockedKeys {
    policy: OnBadEvent,
    pub(super) by_group: HashMap<Group, BlockedState>,
}

impl BlockedKeys {
    pub(super) fn new(policy: OnBadEvent) -> Self {
        Self {
            policy,
            by_group: HashMap::new(),
        }
    }

    pub(crate) fn policy(&self) -> OnBadEvent {
        self.policy
    }

    /// The number of keys that are blocked by an event in quarantine.
    pub(crate) fn count(&self) -> usize {
        let blocked = self.by_group.values();
        blocked.filter(|blocked| !blocked.for_release).count()
    }

    /// Whether a bad event of this group blocks the later events of the group.
    pub(crate) fn blocks(&self, group: &Group) -> bool {
        self.policy == OnBadEvent::QuarantineKey && group.is_ordered()
    }

    /// Blocks a key from the position `since` on. `first` is the id of the event at that position, in the form
    /// that operators see. The reason in the rows of all later events of the key contains this id.
    pub(crate) fn block(&mut self, group: Group, since: EventPosition, first: &str) {
        self.by_group
            .insert(group, BlockedState::new(since, waits_for(first)));
    }

    /// Blocks a key until its release has ended. Events of the key that arrive with the position `since` or a later
    /// position wait behind the released events. Does nothing if the key is already blocked.
    ///
    /// No released event may be before `since`. Otherwise an event could arrive with a position between the released
    /// event and `since`. It would not wait, and would overtake the released event.
    pub(crate) fn block_for_release(&mut self, group: Group, since: EventPosition) {
        let blocked = BlockedState {
            for_release: true,
            ..BlockedState::new(since, BEHIND_A_RELEASE.into())
        };
        self.by_group.entry(group).or_insert(blocked);
    }

    /// Blocks the key of a bad event. Returns false if an event in quarantine blocked the key already.
    ///
    /// # Errors
    /// `quarantine-full`.
    pub(super) fn block_behind(&mut self, group: &Group, bad: &EventRef) -> Result<bool> {
        if let Some(blocked) = self.by_group.get_mut(group) {
            blocked.since = blocked.since.min(bad.position);
            let newly = std::mem::take(&mut blocked.for_release);
            if newly {
                blocked.waits = waits_for(&bad.event_id.shown());
            }
            return Ok(newly);
        }
        if self.by_group.len() >= MAX_BLOCKED {
            return Err(full());
        }
        self.block(group.clone(), bad.position, &bad.event_id.shown());
        Ok(true)
    }

    /// The reason that is recorded for events that wait behind the bad event of a blocked key.
    pub(crate) fn waits_for(&self, group: &Group) -> Arc<str> {
        let blocked = self.by_group.get(group);
        blocked.map_or_else(|| "waits in quarantine".into(), |by| by.waits.clone())
    }
}

/// The reason that is recorded for events that wait behind the event `first`.
fn waits_for(first: &str) -> Arc<str> {
    format!("waits for event {first} in quarantine").into()
}
