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
    /// Whether the event first arrived while its key was being released. No attempt to publish such an
    /// event has failed yet.
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

    /// Whether this event first arrived while its key was being released.
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
