//! Keeps track of the released events that are in lanes, and of the bytes of the budget that they use.

use std::collections::HashMap;

use crate::event::{EventPosition, Group};

/// A released event in a lane.
#[derive(Debug)]
pub(crate) struct InLane {
    /// The group of the event's dispatch row. If the settings have changed, the event itself may belong
    /// to another group.
    pub(crate) group: Group,
    pub(crate) bytes: usize,
    /// Whether the relay itself has recorded the event as released, with the reason `BEHIND_A_RELEASE`. It does so if
    /// only a release blocked the key when the event arrived (`BlockedState::for_release`), or if the event's message
    /// was no longer in memory (`take_without_message`) and no event in quarantine blocked the key.
    pub(crate) is_new: bool,
}

/// The released events in lanes.
#[derive(Debug, Default)]
pub(crate) struct ReleasedInLanes {
    events: HashMap<EventPosition, InLane>,
    bytes: usize,
}

impl ReleasedInLanes {
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Bytes of all released events in lanes, as the budget counts them.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The group of the dispatch row of this released event.
    pub(crate) fn source(&self, at: EventPosition) -> Option<Group> {
        self.events.get(&at).map(|lane| lane.group.clone())
    }

    /// Whether the event is in a lane, and [`InLane::is_new`] is set.
    pub(super) fn is_new(&self, at: EventPosition) -> bool {
        self.events.get(&at).is_some_and(|lane| lane.is_new)
    }

    pub(super) fn add(&mut self, at: EventPosition, lane: InLane) {
        self.bytes += lane.bytes;
        self.events.insert(at, lane);
    }

    /// Removes an event. Returns the group of its dispatch row.
    pub(super) fn remove(&mut self, at: EventPosition) -> Option<Group> {
        let InLane { group, bytes, .. } = self.events.remove(&at)?;
        self.bytes -= bytes;
        Some(group)
    }
}
