//! Encodes the rows of a batch for PostgreSQL's binary COPY.
//!
//! Rows are written directly from the records into one buffer, without a vector per column, and the
//! server parses no text. Source: PostgreSQL manual, COPY, "Binary Format". Times are microseconds since
//! 2000, WAL positions are unsigned 64-bit numbers, uuids are 16 bytes, all big-endian.

use std::borrow::Cow;
use std::collections::HashSet;

use bytes::{BufMut, Bytes, BytesMut};
use decoder::PgTimestamp;

use super::outcome::Record;
use crate::event::{EventPosition, EventRef, Standing};

/// Which characters the database can store in error texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Storing {
    /// All characters, because the encoding of the database is UTF-8.
    Everything,
    /// Only ASCII; all other characters are escaped. The encoding of the database is not UTF-8, so it lacks some
    /// characters, and an error text may contain any character. Values from rows of this database always fit.
    Ascii,
}

impl Storing {
    pub(super) fn in_encoding(server_encoding: &str) -> Self {
        match server_encoding {
            "UTF8" => Self::Everything,
            _ => Self::Ascii,
        }
    }

    /// Escapes the characters that the database might not be able to store.
    pub(super) fn text(self, text: &str) -> Cow<'_, str> {
        if self == Self::Everything || text.is_ascii() {
            return Cow::Borrowed(text);
        }
        let escaped = |c: char| {
            if c.is_ascii() {
                c.to_string()
            } else {
                c.escape_unicode().to_string()
            }
        };
        Cow::Owned(text.chars().map(escaped).collect())
    }
}

/// The columns are in the order in which [`encode`] writes them.
pub(super) const COPY: &str = "\
    COPY outbox.dispatch (commit_lsn, ordinal, event_id, source_id, topic, ordering_key, \
        message_id, attempts, committed_at, dispatched_at, error, state) \
    FROM STDIN (FORMAT binary)";

const COLUMNS: i16 = 12;

/// Signature, flags, and the length of the header extension, which is 0.
const HEADER: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";
const TRAILER: i16 = -1;
const NULL: i32 = -1;

/// Size in bytes of a typical row, used for the buffer's initial capacity.
const USUAL_ROW: usize = 256;

/// Encodes the rows of all new events in `records`. Leaves out the events whose position is in `there`,
/// because they have a row already. Returns `None` if there is no row to write.
pub(super) fn encode(
    records: &[Record],
    there: &HashSet<EventPosition>,
    storing: Storing,
) -> Option<Bytes> {
    let events: usize = records.iter().map(|record| record.events.len()).sum();
    let mut out = BytesMut::with_capacity(HEADER.len() + events * USUAL_ROW);
    out.put_slice(HEADER);
    for record in records {
        let dispatched_at = PgTimestamp::from(record.at);
        for (n, event) in record.events.iter().enumerate() {
            if event.standing == Standing::New && !there.contains(&event.position) {
                row(&mut out, record, n, event, dispatched_at, storing);
            }
        }
    }
    if out.len() == HEADER.len() {
        return None;
    }
    out.put_i16(TRAILER);
    Some(out.freeze())
}

fn row(
    out: &mut BytesMut,
    record: &Record,
    n: usize,
    event: &EventRef,
    at: PgTimestamp,
    storing: Storing,
) {
    let told = record.outcome.of(n);
    out.put_i16(COLUMNS);
    out.put_i32(8);
    out.put_u64(event.position.commit.lsn().as_u64());
    out.put_i32(4);
    out.put_i32(event.position.ordinal as i32);
    out.put_i32(16);
    out.put_slice(&event.event_id.uuid);
    text(out, event.event_id.source_id.as_deref());
    text(out, record.topic.as_deref());
    text(out, record.key());
    text(out, told.message_id);
    out.put_i32(4);
    out.put_i32(told.attempts(event));
    out.put_i32(8);
    out.put_i64(event.commit_time.as_micros());
    out.put_i32(8);
    out.put_i64(at.as_micros());
    let error = told.error.map(|error| storing.text(error));
    text(out, error.as_deref());
    text(out, Some(told.state));
}

fn text(out: &mut BytesMut, text: Option<&str>) {
    match text {
        Some(text) => {
            // No text is longer than 2 GiB: PostgreSQL limits a value to 1 GiB, and texts from Pub/Sub are
            // short.
            out.put_i32(i32::try_from(text.len()).expect("invariant: a text of an event is short"));
            out.put_slice(text.as_bytes());
        }
        None => out.put_i32(NULL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_that_is_not_utf8_gets_error_texts_in_ascii() {
        let text = "Zeichen \u{20ac} \u{1f600} fehlt";
        assert_eq!(Storing::in_encoding("UTF8").text(text), text);
        let stored = Storing::in_encoding("WIN1252").text(text).into_owned();
        assert_eq!(stored, "Zeichen \\u{20ac} \\u{1f600} fehlt");
        assert_eq!(Storing::Ascii.text("plain"), "plain");
    }
}
