//! The states of blocked keys and of releases.

use std::sync::Arc;

use super::{EventPlace, QuarantineQuery};
use crate::event::{Event, Group};

/// A blocked key.
#[derive(Debug)]
pub(super) struct BlockedState {
    /// Whether no event of the key is in quarantine: it is blocked only until its release has ended.
    pub(super) for_release: bool,
    /// The first event in quarantine. Earlier events are not affected.
    pub(super) since: EventPlace,
    /// The reason that is recorded for the events behind it.
    pub(super) waits: Arc<str>,
    /// The number of the last record of this key that the writer was given.
    pub(super) last_record: u64,
    /// Bad events whose dead letter is in flight: they are not recorded yet.
    pub(super) letters: u32,
}

impl BlockedState {
    pub(super) fn new(since: EventPlace, waits: Arc<str>) -> Self {
        Self {
            for_release: false,
            since,
            waits,
            last_record: 0,
            letters: 0,
        }
    }
}

#[derive(Debug)]
pub(super) enum Stage {
    /// Waits until records up to this number are durable, and then until the rows are marked.
    Begun(u64),
    Paging,
    /// Holds the events that arrived after the handover began, in order.
    Handover(Vec<Event>),
    Ended,
    Failed,
}

/// A page that was requested.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PageState {
    /// None of its rows has arrived.
    Asked,
    Wanted,
    /// Its rows are dropped: it may have skipped others.
    Stale,
}

/// A released event in a lane.
#[derive(Debug)]
pub(crate) struct InLane {
    /// The group from which it was read.
    pub(crate) group: Group,
    pub(crate) bytes: usize,
    /// Whether it arrived while its key was being released, so that it was never refused.
    pub(crate) is_new: bool,
}

#[derive(Debug)]
pub(super) struct Release {
    pub(super) stage: Stage,
    /// The place of the last row read.
    pub(super) after: EventPlace,
    pub(super) page: PageState,
    /// How many records were durable when the last page was requested.
    pub(super) asked_at: u64,
    /// Only pages requested when at least this many records were durable count. A bad event with a
    /// dead letter is recorded later than the events behind it, and no page may skip it.
    pub(super) asks_from: u64,
    /// How many of its events are in lanes.
    pub(super) in_lanes: usize,
    /// The number of the last record of one of its events that the writer was given.
    pub(super) last_record: u64,
}

impl Release {
    /// Whether all events that were read have a durable outcome. Then every row that is still released was
    /// released later, by another replay, and may precede the rows already read.
    pub(super) fn is_idle(&self, durable: u64) -> bool {
        self.in_lanes == 0 && durable >= self.last_record
    }

    /// The question for the next page.
    pub(super) fn page(&mut self, group: &Group, durable: u64) -> QuarantineQuery {
        self.asked_at = durable;
        self.page = PageState::Asked;
        QuarantineQuery::Page(group.clone(), self.after)
    }

    /// Whether it has ended, except that its last outcomes may not be durable yet.
    pub(super) fn has_left_lanes(&self) -> bool {
        matches!(self.stage, Stage::Ended) && self.in_lanes == 0
    }
}

/// A key that is no longer blocked.
#[derive(Debug)]
pub(crate) struct Unblocked {
    /// Its events that were held in memory, in order.
    pub(crate) held: Vec<Event>,
    /// Whether an event in quarantine had blocked it, not only a release.
    pub(crate) was_in_quarantine: bool,
}
