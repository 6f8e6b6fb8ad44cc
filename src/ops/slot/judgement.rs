//! Decides the state of the slot and its relay from everything that a command has read. Does no IO.

use std::time::Duration;

use slot_manager::health::{self, Observation, RecordedPosition, Thresholds, Viewer};
use slot_manager::{DatabaseOrigin, Slot, SlotName};

use super::{PublicationStatus, QuarantineStatus};
use crate::condition::{self, StateFacts, Verdict};
use crate::error::Error;
use crate::ops::pending::PendingEvents;
use crate::store::capture_record::{self as captures, CaptureRecord};
use crate::store::relay_row::shown::RelayRow;

/// Everything that a command has read about the slot and its relay.
#[derive(Clone, Copy)]
pub(super) struct CommandFacts<'a> {
    pub(super) slot: Option<&'a Slot>,
    pub(super) origin: DatabaseOrigin,
    pub(super) relay: Option<&'a RelayRow>,
    pub(super) records: &'a [CaptureRecord],
    pub(super) pending: Option<PendingEvents>,
    pub(super) publication: &'a PublicationStatus,
    pub(super) quarantine: Option<&'a QuarantineStatus>,
    /// The error with which a relay refuses records of a later state of the server; `None` if it does not.
    pub(super) foreign: Option<&'a Error>,
}

impl CommandFacts<'_> {
    /// Returns the verdict, and whether the condition that the relay last wrote into its row still holds.
    pub(super) fn judge(&self, name: &SlotName, thresholds: &Thresholds) -> (Verdict, bool) {
        let Self { slot, relay, .. } = *self;
        let recorded = match relay {
            Some(relay) if relay.has_confirmed() => relay.position(),
            _ => RecordedPosition::unused(self.origin, captures::since_lsn(self.records, name)),
        };
        let lacks_row = relay.is_none() && has_moved(slot, recorded.as_ref());
        let is_read = slot.is_some_and(health::is_read_by_relay);
        let limit = age_limit(slot, thresholds);
        let observation = Observation {
            slot,
            viewer: Viewer::Outside,
            time_lag: self
                .pending
                .and_then(|pending| pending.oldest_against(limit)),
            origin: self.origin,
            // If there is no row and a relay reads the slot, leave out the recorded position. Otherwise the
            // slot could count as recreated, although the relay has already checked the slot.
            recorded: recorded.as_ref().filter(|_| !(lacks_row && is_read)),
        };
        let health = health::judge(&observation, thresholds);
        let fault = self.publication.problems.first();
        let facts = StateFacts {
            health: Some(&health),
            condition: relay.and_then(|relay| relay.condition.as_ref()),
            condition_age: relay.map_or_else(Default::default, |relay| relay.condition_age),
            is_recovering: relay.is_some_and(|relay| relay.recovering.is_some()),
            is_opening: is_opening(slot, relay),
            lag_bytes: slot.and_then(|slot| slot.lag_bytes),
            oldest: self.pending.and_then(|pending| Some(pending.oldest?.age)),
            publication: fault.map(|fault| (fault.what.as_str(), fault.remedy.as_str())),
            has_quarantine: self
                .quarantine
                .is_some_and(|quarantine| !quarantine.keys.is_empty()),
            lacks_row,
            foreign_records: self.foreign.map(|error| (error.what(), error.hint_text())),
        };
        let holds = facts
            .condition
            .is_some_and(|said| condition::speaks(said, &facts));
        (condition::decide(facts), holds)
    }
}

/// Returns the limit for [`PendingEvents::oldest_against`]. The limit matters only if the known age of the oldest event
/// is a lower bound. If this bound reaches the limit, it counts as the age. Otherwise the age counts as unknown.
///
/// Usually the limit is `warn_lag` or `error_lag`, whichever is smaller.
///
/// If no relay has read the slot for `error_lag` or longer, the limit is `error_lag`, so that the verdict is an error:
///
/// - A bound of at least `error_lag` is an error by itself.
/// - Below `error_lag`, the age counts as unknown. [`health::judge`] then uses the time for which no relay has read the
///   slot, and reports an error. If a bound above `warn_lag` counted as the age, the verdict would be only a warning.
fn age_limit(slot: Option<&Slot>, thresholds: &Thresholds) -> Duration {
    let error_lag = thresholds.error_lag.unwrap_or(thresholds.warn_lag);
    let unread = slot.filter(|slot| !health::is_read_by_relay(slot));
    let unread_for = unread.and_then(|slot| slot.inactive_for);
    if unread_for.is_some_and(|unread_for| unread_for >= error_lag) {
        error_lag
    } else {
        error_lag.min(thresholds.warn_lag)
    }
}

/// Whether the relay that holds the slot is still opening its session. The row in `outbox.relay` then names
/// an earlier relay, because a relay writes its name into the row just before its session begins.
fn is_opening(slot: Option<&Slot>, relay: Option<&RelayRow>) -> bool {
    let holder = slot.and_then(|slot| slot.holder.as_ref());
    let name = holder.and_then(|holder| holder.application_name.as_deref());
    relay
        .zip(name)
        .is_some_and(|(relay, name)| !relay.is_of(name))
}

/// Whether the slot's confirmed position is past the position at which capturing began.
fn has_moved(slot: Option<&Slot>, began: Option<&RecordedPosition>) -> bool {
    let found = slot.and_then(|slot| slot.confirmed_flush_lsn);
    let began = began.and_then(|began| began.confirmed_lsn);
    found.zip(began).is_some_and(|(found, began)| found > began)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::pending::EventAge;
    use crate::recovery::slot_verdict::tests::slot;

    /// `error_lag` is one hour. The oldest counted event is 10 minutes old. This age is a lower bound, because only a
    /// part of the table was read.
    ///
    /// - If nobody has read the slot for two hours, the oldest event may also have waited longer than one hour. So its
    ///   age counts as unknown.
    /// - If nobody has read the slot for 30 minutes, the lower bound counts as the age.
    #[test]
    fn a_lower_bound_of_the_age_does_not_hide_that_the_slot_is_unread_for_long() {
        let minutes = |n: u64| Duration::from_secs(n * 60);
        let thresholds = Thresholds {
            warn_lag: minutes(5),
            error_lag: Some(minutes(60)),
            ..Thresholds::default()
        };
        let unread = |n| Slot {
            inactive_for: Some(minutes(n)),
            ..slot(500)
        };
        let pending = PendingEvents {
            events: 200_000,
            oldest: Some(EventAge::by_commit(minutes(10))),
            is_lower_bound: true,
        };
        let age = |slot: &Slot| pending.oldest_against(age_limit(Some(slot), &thresholds));
        assert_eq!(age(&unread(120)), None);
        assert_eq!(age(&unread(30)), Some(minutes(10)));
    }
}
