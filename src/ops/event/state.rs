//! Decides and explains the state of an event, without IO.

use serde::Serialize;

use crate::store::dispatch::history::EventOutcome;
use crate::store::relay_row::RecordKeeping;

/// The state of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum EventState {
    Published,
    /// The event has no record, but the slot has passed it. Published events may lack a record, so the event
    /// counts as published.
    PublishedWithoutRecord,
    Quarantined,
    /// An operator has released the event, from quarantine or for a replay, and the relay has not published
    /// it yet.
    Released,
    Discarded,
    /// The event has no record yet.
    Waiting,
    /// The event has no record: either it waits, or it was published a moment ago.
    WaitingOrPublished,
    /// The slot has passed the event, but the event has no record.
    Missing,
    /// The event was committed before the capture of its table began, so it is never published.
    NotCaptured,
}

/// The facts about the row of an event without a record.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnrecordedFacts {
    /// Whether the relay has to publish the event.
    pub(super) is_ours: bool,
    /// Whether the slot has passed the event.
    pub(super) is_passed: bool,
    /// Whether the event may have been published without a record.
    pub(super) may_lack_record: bool,
    pub(super) records: RecordKeeping,
}

/// The beginning of `EventReport::meaning` for an event in quarantine whose row was not found, if some former tables
/// could not be searched. The names of these tables and the remedies follow.
pub(super) const NOT_SEARCHED: &str = "in quarantine, and its row is in no table that could be searched. The row may \
    be in a former table, such as a detached partition. To release the event, let the relay read this table: ";

impl EventState {
    /// Returns the state that a record shows.
    pub(super) fn recorded(state: &str) -> Self {
        match state {
            "quarantined" => Self::Quarantined,
            "released" => Self::Released,
            "discarded" => Self::Discarded,
            _ => Self::Published,
        }
    }

    /// Returns the state of an event without a record.
    pub(super) fn unrecorded(facts: UnrecordedFacts) -> Self {
        match facts {
            UnrecordedFacts { is_ours: false, .. } => Self::NotCaptured,
            UnrecordedFacts {
                is_passed: true,
                may_lack_record: true,
                ..
            } => Self::PublishedWithoutRecord,
            UnrecordedFacts {
                is_passed: true, ..
            } => Self::Missing,
            UnrecordedFacts { records, .. } if records.may_lack_records() => {
                Self::WaitingOrPublished
            }
            UnrecordedFacts { .. } => Self::Waiting,
        }
    }

    /// Whether the relay may still publish the event by itself.
    pub(super) fn waits(self) -> bool {
        matches!(
            self,
            Self::Waiting | Self::WaitingOrPublished | Self::Missing
        )
    }

    /// Returns the name that the JSON form uses.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Published => "published",
            Self::PublishedWithoutRecord => "published-without-record",
            Self::Quarantined => "quarantined",
            Self::Released => "released",
            Self::Discarded => "discarded",
            Self::Waiting => "waiting",
            Self::WaitingOrPublished => "waiting-or-published",
            Self::Missing => "missing",
            Self::NotCaptured => "not-captured",
        }
    }

    /// Explains the state in a sentence, and says what to do.
    pub(super) fn meaning(
        self,
        record: Option<&EventOutcome>,
        message: Option<&str>,
        has_row: bool,
    ) -> String {
        let at = record.map_or("", |record| record.recorded_at.as_str());
        match self {
            Self::Published => {
                let message = message.map_or(String::new(), |id| format!(" as message {id}"));
                let took = record.map_or(String::new(), |record| {
                    format!(", {} after its commit", took(record.took_ms))
                });
                let gone = if has_row {
                    ""
                } else {
                    "; its row is not in the outbox any longer"
                };
                format!("published{message} at {at}{took}{gone}")
            }
            Self::PublishedWithoutRecord => "no record is kept of published events with dispatch = \
                exceptions: the slot has passed this one, so it was published"
                .to_owned(),
            Self::Quarantined if !has_row => format!(
                "in quarantine since {at}, and its row is found neither in the table nor in a former table: it \
                 was deleted, or its id could not be read. Without the row it cannot be published: insert it \
                 again as a new event, if its consumers need it, and `postrider quarantine discard` this one"
            ),
            Self::Quarantined => format!(
                "in quarantine since {at}, so it is not published: correct the cause, then \
                 `postrider quarantine release`, or `discard` it"
            ),
            Self::Released if message.is_some() => "published \
                before, and an operator has asked to publish it again: a running relay publishes it within \
                seconds, a stopped one at its next start"
                .to_owned(),
            Self::Released => "released from quarantine: a running relay publishes it within seconds, \
                a stopped one at its next start"
                .to_owned(),
            Self::Discarded => {
                format!("discarded by an operator at {at}: it is never published")
            }
            Self::Waiting => "waits: the relay has not recorded it yet (`postrider status` says why). \
                After a crash between publishing and recording it is sent once more"
                .to_owned(),
            Self::WaitingOrPublished => "waits, or was published a moment ago: with dispatch = \
                exceptions published events have no record, and the slot has not passed this one yet"
                .to_owned(),
            Self::Missing => "the slot has passed it, but it has no record: a running relay finds such \
                rows and publishes them within minutes; `postrider audit` counts them"
                .to_owned(),
            Self::NotCaptured => "committed before capturing began, so the relay never publishes it. To \
                publish it, insert it again as a new event"
                .to_owned(),
        }
    }
}

fn took(millis: f64) -> String {
    // The clocks of two machines may differ, so the time may be negative.
    let millis = millis.max(0.0);
    if millis < 10_000.0 {
        format!("{millis:.0} ms")
    } else {
        format!("{:.0} s", millis / 1_000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::relay_row::record_keeping::tests::PARTIAL;

    #[test]
    fn a_row_without_a_record_waits_until_the_slot_has_passed_it() {
        let facts = UnrecordedFacts {
            is_ours: true,
            is_passed: false,
            may_lack_record: false,
            records: RecordKeeping::COMPLETE,
        };
        let state = EventState::unrecorded;
        assert_eq!(state(facts), EventState::Waiting);
        let passed = UnrecordedFacts {
            is_passed: true,
            ..facts
        };
        assert_eq!(state(passed), EventState::Missing);
        let without = UnrecordedFacts {
            may_lack_record: true,
            records: PARTIAL,
            ..facts
        };
        assert_eq!(state(without), EventState::WaitingOrPublished);
        let both = UnrecordedFacts {
            is_passed: true,
            ..without
        };
        assert_eq!(state(both), EventState::PublishedWithoutRecord);
        let old = UnrecordedFacts {
            is_ours: false,
            ..both
        };
        assert_eq!(state(old), EventState::NotCaptured);
    }
}
