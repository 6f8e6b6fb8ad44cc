//! Runs the release of one group, as a state machine. The steps are in the header of the parent
//! module.

use super::keys::BlockedState;
use super::{PAGE, QuarantineQuery};
use crate::event::{Event, EventPosition, Group};

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
enum PageState {
    /// None of the page's rows has arrived.
    Asked,
    /// The events of the page's rows go into their lane.
    Wanted,
    /// The page may have skipped rows, so its rows are dropped.
    Stale,
}

#[derive(Debug)]
pub(super) struct Release {
    pub(super) stage: Stage,
    /// The position of the last row read.
    after: EventPosition,
    page: PageState,
    /// How many records were durable when the last page was requested.
    asked_at: u64,
    /// A page counts only if at least this many records were durable when it was requested. A bad event
    /// with a dead letter is recorded later than the events behind it, and no page may skip it.
    pub(super) asks_from: u64,
    /// How many events of the release are in lanes.
    pub(super) in_lanes: usize,
    /// The number of the last record of the release's events that was handed to the writer.
    pub(super) last_record: u64,
}

impl Release {
    /// Begins the release of a blocked key, or of a group that blocks nothing. `handed` is the
    /// number of records that were handed to the writer so far.
    pub(super) fn new(blocked: Option<&BlockedState>, handed: u64) -> Self {
        Self {
            stage: match blocked {
                Some(blocked) if !blocked.for_release => Stage::Begun(handed),
                // All released rows of the key are in the table, so new events need no record.
                Some(_) => Stage::Handover(Vec::new()),
                None => Stage::Paging,
            },
            after: EventPosition::default(),
            asked_at: 0,
            page: PageState::Asked,
            asks_from: match blocked {
                Some(blocked) if blocked.letters > 0 => u64::MAX,
                // Wait for every record of this key, so that no page misses an event that was recorded before
                // the release.
                Some(blocked) => blocked.last_record,
                None => 0,
            },
            in_lanes: 0,
            last_record: 0,
        }
    }

    /// Whether the release is under way.
    pub(super) fn is_releasing(&self) -> bool {
        matches!(
            self.stage,
            Stage::Begun(_) | Stage::Paging | Stage::Handover(_)
        )
    }

    /// The next query on the table, if one is due while the first `durable` records are durable.
    pub(super) fn command(
        &mut self,
        group: &Group,
        blocked: Option<&BlockedState>,
        durable: u64,
    ) -> Option<QuarantineQuery> {
        if blocked.is_some_and(|by| by.letters > 0) {
            return None;
        }
        let last_record = blocked.map_or(0, |by| by.last_record);
        let room = self.in_lanes < PAGE && durable >= self.asks_from;
        let all_durable = durable >= last_record.max(self.last_record);
        if self.is_idle(durable) {
            self.after = EventPosition::default();
        }
        match &self.stage {
            Stage::Begun(at) if durable >= *at => Some(QuarantineQuery::Mark(group.clone())),
            Stage::Paging if room => Some(self.page(group, durable)),
            Stage::Handover(_) if room && durable >= last_record => Some(self.page(group, durable)),
            Stage::Failed if all_durable && self.in_lanes == 0 => {
                Some(QuarantineQuery::SendBack(group.clone()))
            }
            Stage::Begun(_) | Stage::Paging | Stage::Handover(_) | Stage::Ended | Stage::Failed => {
                None
            }
        }
    }

    /// The query for the next page.
    fn page(&mut self, group: &Group, durable: u64) -> QuarantineQuery {
        self.asked_at = durable;
        self.page = PageState::Asked;
        QuarantineQuery::Page(group.clone(), self.after)
    }

    /// Whether all events that were read have a durable outcome. If so, every row that is still
    /// released was released later, by another replay, and may precede the rows already read.
    fn is_idle(&self, durable: u64) -> bool {
        self.in_lanes == 0 && durable >= self.last_record
    }

    /// Notes that a row of a page was read. Returns whether its event is still wanted.
    pub(super) fn read(&mut self, at: EventPosition, durable: u64) -> bool {
        if self.page == PageState::Asked {
            let may_skip_rows = self.after != EventPosition::default() && self.is_idle(durable);
            self.page = if may_skip_rows {
                PageState::Stale
            } else {
                PageState::Wanted
            };
        }
        let wanted = matches!(self.stage, Stage::Paging | Stage::Handover(_))
            && self.asked_at >= self.asks_from
            && self.page == PageState::Wanted;
        if wanted {
            self.after = at;
        }
        wanted
    }

    /// Notes that the page has ended after `rows` rows. Returns the held events if this ends the release.
    pub(super) fn page_ended(
        &mut self,
        rows: usize,
        blocked: Option<&BlockedState>,
    ) -> Option<Vec<Event>> {
        if rows > 0 || self.asked_at < self.asks_from {
            return None;
        }
        match (&mut self.stage, blocked) {
            (Stage::Paging, Some(_)) => {
                self.stage = Stage::Handover(Vec::new());
                None
            }
            (Stage::Handover(held), by) if by.is_none_or(|by| self.asked_at >= by.last_record) => {
                let held = std::mem::take(held);
                self.stage = Stage::Ended;
                Some(held)
            }
            (Stage::Paging, None) => {
                self.stage = Stage::Ended;
                Some(Vec::new())
            }
            (Stage::Handover(_) | Stage::Begun(_) | Stage::Ended | Stage::Failed, _) => None,
        }
    }

    /// Whether the release has ended and none of its events is in a lane. The last outcomes may not
    /// be durable yet.
    pub(super) fn has_left_lanes(&self) -> bool {
        matches!(self.stage, Stage::Ended) && self.in_lanes == 0
    }
}
