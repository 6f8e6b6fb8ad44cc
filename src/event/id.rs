//! Defines the id of an event.

use std::fmt;

use printable::printable;
use uuid::Uuid;

/// Maximum length, in characters, of an event id in a log line, in an error, or in the recorded reason of an event
/// that waits behind this event.
pub(crate) const SHOWN_CHARS: usize = 128;

/// Length of a uuid as text.
pub(crate) const UUID_CHARS: usize = uuid::fmt::Hyphenated::LENGTH;

/// The identity of an event, as the dispatch table records it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EventId {
    /// The 16 bytes of the uuid, in the same order as its text form.
    pub uuid: [u8; 16],
    /// `schema.table:id` when the id is not a uuid, otherwise `None`.
    pub source_id: Option<Box<str>>,
}

impl EventId {
    /// The uuid as text, as in the attribute `event_id`.
    pub(crate) fn uuid_text<'b>(&self, buffer: &'b mut [u8; UUID_CHARS]) -> &'b str {
        Uuid::from_bytes(self.uuid)
            .hyphenated()
            .encode_lower(buffer)
    }

    /// The id as text, shortened and escaped for display.
    pub(crate) fn shown(&self) -> String {
        let start: String = self.to_string().chars().take(SHOWN_CHARS).collect();
        printable(&start).into_owned()
    }

    /// Length in bytes of `source_id`, which has no upper bound. 0 if the id is a uuid, because an event with such an
    /// id has no `source_id`.
    pub(crate) fn text_bytes(&self) -> usize {
        self.source_id.as_deref().map_or(0, str::len)
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source_id {
            Some(source_id) => f.write_str(source_id),
            None => Uuid::from_bytes(self.uuid).fmt(f),
        }
    }
}
