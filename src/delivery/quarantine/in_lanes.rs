//! Keeps track of the released events in lanes, and of the bytes that they take from the budget.

use std::collections::HashMap;

use crate::event::{EventPosition, Group};

/// A released event in a lane.
#[derive(Debug)]
pub(crate) struct InLane {
    /// The group of the row from which the event was read. With new settings, the event itself may
    /// belong to another group.
    pub(crate) group: Group,
    pub(crate) bytes: usize,
    /// Whether the event first arrived while its key was being released. Such an event was never
    /// refused.
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

    /// The group of the row from which this released event was read.
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

    /// Removes an event. Returns the group of the row from which the event was read.
    pub(super) fn remove(&mut self, at: EventPosition) -> Option<Group> {
        let InLane { group, bytes, .. } = self.events.remove(&at)?;
        self.bytes -= bytes;
        Some(group)
    }
}
