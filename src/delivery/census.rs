//! Lists the event ids of all events in memory that have no durable outcome yet. The auditor asks for this list: a
//! row whose event is in the list is not missing, although it has no record.
//!
//! An event in memory is in one of three places:
//!
//! 1. It waits: in a lane, or while its key is being released. A census lists these events when it begins.
//! 2. It is in a request in flight. A census waits for the answers to these requests. If an attempt has failed, the
//!    census lists the events of its request, because they wait again.
//! 3. The writer has its record. A census waits until these records are durable.
//!
//! So the list has every event that has been unresolved since the census began, and perhaps events that were resolved
//! meanwhile. A census delays no event.

use tokio::sync::oneshot;

use super::Delivery;
use crate::capture::from_table::UnresolvedIds;
use crate::event::Event;
use crate::lanes::Request;

/// A census that waits for answers and records.
#[derive(Debug)]
pub(super) struct Census {
    ids: UnresolvedIds,
    /// Number of attempts that had been started when the census began.
    started: u64,
    /// Number of these attempts that are still in flight.
    in_flight: usize,
    /// Number of records that must be durable before the census ends. `None` while attempts are in flight.
    records: Option<u64>,
    answer: oneshot::Sender<UnresolvedIds>,
}

impl Census {
    fn add<'a>(&mut self, events: impl IntoIterator<Item = &'a Event>) {
        let ids = events.into_iter().map(|event| event.origin.event_id.uuid);
        self.ids.extend(ids);
    }

    /// Notes the answer to the attempt with this number.
    pub(super) fn answered(&mut self, number: u64, request: &Request, has_failed: bool) {
        if number >= self.started {
            return;
        }
        self.in_flight -= 1;
        if has_failed {
            self.add(&request.events);
        }
    }
}

impl Delivery {
    /// Begins a census, and answers when it ends. `others` are the ids of unresolved events that have not entered the
    /// delivery yet. Replaces an earlier census.
    pub(crate) fn begin_census(
        &mut self,
        others: UnresolvedIds,
        answer: oneshot::Sender<UnresolvedIds>,
    ) {
        let mut census = Census {
            ids: others,
            started: self.attempts.started(),
            in_flight: self.attempts.in_flight(),
            records: None,
            answer,
        };
        census.add(self.lanes.events());
        census.add(self.outcomes.quarantine.releases.held());
        self.census = Some(census);
        self.finish_census();
    }

    /// Sends the answer and ends the census, if two conditions hold:
    ///
    /// - Every attempt that was in flight when the census began has been answered.
    /// - The writer has made durable every record that it had received when the last of these answers was handled.
    pub(super) fn finish_census(&mut self) {
        let quarantine = &self.outcomes.quarantine;
        let ended = self.census.take_if(|census| {
            if census.in_flight > 0 {
                return false;
            }
            let handed = quarantine.records_handed();
            quarantine.are_durable(*census.records.get_or_insert(handed))
        });
        if let Some(census) = ended {
            // If the auditor has ended, nobody needs the answer.
            let _ = census.answer.send(census.ids);
        }
    }
}
