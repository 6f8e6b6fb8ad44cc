//! Knows which published events have a record (a row in `outbox.dispatch`). Other modules use the methods here instead
//! of reading the setting `dispatch`. Only pruning still reads the setting itself (`ops::prune::proof`).
//!
//! The setting `dispatch` decides which events a session records. With `full`, the session records each event that it
//! publishes. With `exceptions`, it records only events that are set aside, and resolves a published event at once,
//! without a record (`delivery::outcomes`).
//!
//! An operator may change the setting from `exceptions` to `full`. The events that earlier sessions published still
//! have no record. So `outbox.relay` keeps the mode `exceptions` until an audit or a recovery has raised the floors
//! above these events.
//!
//! If `outbox.relay` or the setting says `exceptions`, a missing record does not show whether an event was published.
//! The following parts of the relay then work differently:
//!
//! - After a crash, the relay publishes all events after the slot's position again, except quarantined, released and
//!   discarded events (`store::dispatch`).
//! - A recovery publishes every row that is not below the floor of its table, because only the floor proves that a row
//!   is resolved (`recovery`).
//! - An audit raises the floors, but compares no rows (`audit`).
//! - A session recovers after a change of the publication, or if the slot may have been replaced
//!   (`recovery::slot_verdict`).
//! - Commands cannot distinguish waiting events from published ones (`ops`).

use serde::{Serialize, Serializer};

use super::EarlierSession;
use crate::settings::Dispatch;

/// Which published events have a record: in this session (`now`), and in earlier sessions (`earlier`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordKeeping {
    now: Dispatch,
    /// The mode that `outbox.relay` remembers. `Exceptions` if events above the floors may have been
    /// published without a record.
    earlier: Dispatch,
}

impl RecordKeeping {
    /// Every published event has a record.
    pub(crate) const COMPLETE: Self = Self {
        now: Dispatch::Full,
        earlier: Dispatch::Full,
    };

    /// Returns the record keeping of a session with this setting. `row` is the relay's row as an earlier
    /// session left it. Without a row, nothing was published earlier.
    pub(crate) fn of(setting: Dispatch, row: Option<&EarlierSession>) -> Self {
        Self {
            now: setting,
            earlier: row.map_or(setting, |row| row.dispatch),
        }
    }

    /// Returns the record keeping that `outbox.relay` remembers, for commands that do not know the setting.
    pub(super) fn recorded(word: &str) -> Self {
        let earlier = mode(word);
        Self {
            now: earlier,
            earlier,
        }
    }

    /// Replaces the mode of earlier sessions by `word`, which was just read from `outbox.relay`. The mode of this
    /// session stays.
    pub(super) fn after(self, word: &str) -> Self {
        Self {
            earlier: mode(word),
            ..self
        }
    }

    /// Returns the record keeping without the mode of earlier sessions. There are two callers, which write the mode of
    /// this session to `outbox.relay`:
    ///
    /// - The end of an audit or a recovery. All events that earlier sessions published are now below the floors, so
    ///   nobody needs their records.
    /// - The beginning of a session ([`take`](super::take)). Its statement keeps `exceptions` in the row if this
    ///   session has the mode `full`, so the mode of the earlier sessions is not forgotten.
    pub(crate) fn without_earlier(self) -> Self {
        Self {
            earlier: self.now,
            ..self
        }
    }

    /// Whether this session writes a record for each event that it publishes.
    pub(crate) fn records_published(self) -> bool {
        self.now == Dispatch::Full
    }

    /// Whether events above the floors have been or will be published without a record. If so, a missing
    /// record proves nothing.
    pub(crate) fn may_lack_records(self) -> bool {
        self.now == Dispatch::Exceptions || self.earlier == Dispatch::Exceptions
    }

    /// Whether this session records every event, but earlier sessions did not. The records are complete
    /// again once every event without a record is below the floors.
    pub(crate) fn becomes_complete(self) -> bool {
        self.records_published() && self.may_lack_records()
    }

    /// Whether the relay publishes events with a `published` record again after a crash. If records may be missing,
    /// the relay repeats the published events that have no record. The repeated events of a key must be complete and
    /// in order, so the relay also repeats the events that have a record.
    pub(crate) fn repeats_published(self) -> bool {
        self.may_lack_records()
    }

    /// Whether each change of the publication must leave a trace in the catalogue. It must if this session
    /// records no published events, because then only the trace shows that the stream may have left out events.
    pub(crate) fn needs_traces(self) -> bool {
        !self.records_published()
    }

    /// Returns the mode that the relay writes to `outbox.relay`, and that commands write to their JSON output:
    /// `exceptions` as long as published events may lack a record, otherwise `full`.
    pub(crate) fn name(self) -> &'static str {
        if self.may_lack_records() {
            Dispatch::Exceptions.name()
        } else {
            Dispatch::Full.name()
        }
    }
}

impl Serialize for RecordKeeping {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Reads a mode from `outbox.relay`. An unknown word, which a later version may have written, is treated
/// as `exceptions`, because in that mode the relay does not rely on records being complete.
pub(super) fn mode(word: &str) -> Dispatch {
    Dispatch::named(word).unwrap_or(Dispatch::Exceptions)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The record keeping of sessions that record no published event.
    pub(crate) const PARTIAL: RecordKeeping = RecordKeeping {
        now: Dispatch::Exceptions,
        earlier: Dispatch::Exceptions,
    };

    fn switched(now: Dispatch, earlier: &str) -> RecordKeeping {
        RecordKeeping::of(now, None).after(earlier)
    }

    #[test]
    fn records_are_complete_only_if_all_sessions_record_everything() {
        use Dispatch::{Exceptions, Full};
        assert_eq!(switched(Full, "full"), RecordKeeping::COMPLETE);
        assert!(!switched(Full, "full").may_lack_records());
        for lacking in [
            switched(Full, "exceptions"),
            switched(Exceptions, "full"),
            switched(Exceptions, "exceptions"),
            switched(Full, "a word of a later version"),
        ] {
            assert!(lacking.may_lack_records(), "{lacking:?}");
            assert_eq!(lacking.name(), "exceptions");
        }
    }

    #[test]
    fn after_a_switch_to_full_the_records_become_complete_above_the_floors() {
        let switched = switched(Dispatch::Full, "exceptions");
        assert!(switched.records_published());
        assert!(switched.becomes_complete());
        assert!(!switched.needs_traces());
        assert_eq!(switched.without_earlier(), RecordKeeping::COMPLETE);
        assert!(!RecordKeeping::COMPLETE.becomes_complete());
    }

    #[test]
    fn with_exceptions_the_records_stay_incomplete() {
        let switched = switched(Dispatch::Exceptions, "full");
        assert!(!switched.becomes_complete());
        assert!(switched.needs_traces());
        assert_eq!(switched.without_earlier(), PARTIAL);
    }
}
