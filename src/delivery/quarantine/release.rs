//! The state machine that releases one group. The header of the parent module describes the steps.

use super::keys::BlockedState;
use super::{PAGE, QuarantineQuery};
use crate::event::{Event, EventPosition, Group};

#[derive(Debug)]
pub(super) enum Stage {
    /// Waits until all records up to this number are durable. Then waits until the rows of the group are marked
    /// as released.
    Begun(u64),
    Paging,
    /// Holds the events that arrived after the handover began, in commit order.
    Handover(Vec<Event>),
    Ended,
    Failed,
}

/// How to treat the rows of the page that was requested last.
#[derive(Debug, PartialEq, Eq)]
enum PageState {
    /// Not decided: none of the page's rows has arrived.
    Asked,
    /// Put the events of the page's rows into their lane.
    Wanted,
    /// Drop the rows, because a later replay may have released rows that come before them. The next page starts over.
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
    /// The release uses a page only if at least this many records were durable when the page was requested. An older
    /// page may have the rows of later events but not yet the row of an earlier event. The release would then skip the
    /// earlier event. This happens because the relay records the events behind a bad event at once, but the bad event
    /// only when its dead letter is stored or refused.
    pub(super) asks_from: u64,
    /// How many events of the release are in lanes.
    pub(super) in_lanes: usize,
    /// The number of the last record with an event of the release. All records of the session are numbered in
    /// the order in which the writer got them.
    pub(super) last_record: u64,
}

impl Release {
    /// Begins the release of a group. `blocked` is `None` if the group is not blocked. `handed` is the number
    /// of records that were given to the writer so far.
    pub(super) fn new(blocked: Option<&BlockedState>, handed: u64) -> Self {
        Self {
            stage: match blocked {
                Some(blocked) if !blocked.for_release => Stage::Begun(handed),
                // Only this release blocks the key. No event of the key is in quarantine, and all rows to release are
                // marked as released already, usually by a replay. So begin with the handover.
                Some(_) => Stage::Handover(Vec::new()),
                None => Stage::Paging,
            },
            after: EventPosition::default(),
            asked_at: 0,
            page: PageState::Asked,
            asks_from: match blocked {
                Some(blocked) if blocked.letters > 0 => u64::MAX,
                // Wait until every record of this key is durable, so that no page misses an event that
                // was recorded before the release.
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

    /// Returns the next query on the table, if one is due. `durable` is the number of durable records.
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

    /// Returns the query for the next page.
    fn page(&mut self, group: &Group, durable: u64) -> QuarantineQuery {
        self.asked_at = durable;
        self.page = PageState::Asked;
        QuarantineQuery::Page(group.clone(), self.after)
    }

    /// Whether all events that were read have a durable outcome. If so, the next page starts from the
    /// beginning, because a later replay may have released rows that come before the rows already read.
    fn is_idle(&self, durable: u64) -> bool {
        self.in_lanes == 0 && durable >= self.last_record
    }

    /// Notes that a row of a page was read. Returns whether the caller should publish the row's event.
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

    /// Whether the release has ended and none of its events is in a lane. The release is not forgotten yet,
    /// because the last outcomes might not be durable.
    pub(super) fn has_left_lanes(&self) -> bool {
        matches!(self.stage, Stage::Ended) && self.in_lanes == 0
    }
}
