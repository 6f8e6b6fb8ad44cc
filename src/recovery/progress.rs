//! Records the progress of a recovery, if published events may lack a record. If the recovery is interrupted,
//! the next recovery does not publish the resolved rows again.
//!
//! The recovery reads each table in the order of `seq`, and numbers the events with ordinals. From time to time it
//! makes a note: the `seq` of the row that it has just read, and the ordinal of the next event. The events of all
//! rows below this `seq` have lower ordinals. Once all events with lower ordinals have an outcome, this module
//! records in `outbox.capture` that the rows below this `seq` are resolved. An event that waits for its outcome, for
//! example because its topic is missing, holds back the progress.
//!
//! If every event has a record, the records themselves are the progress.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use slot_manager::SlotName;

use crate::capture::claim::Captured;
use crate::capture::shape;
use crate::error::Result;
use crate::mapping::TableSettings;
use crate::postgres::Sql;
use crate::store::capture_record::recovery_progress;
use crate::throttled_log::ThrottledLog;

/// Time between two writes. After an interruption, the next recovery publishes again the rows that were resolved
/// after the last write.
const INTERVAL: Duration = Duration::from_secs(1);
/// Minimum number of events between two notes of a table, until the queue of notes is full.
const DISTANCE: u32 = 256;
/// Maximum number of notes in the queue. When the queue is full, every second note is dropped and the
/// distance is doubled, so the memory stays bounded however long an event waits for its outcome.
const MAX_NOTES: usize = 1_024;

/// The progress of the reading at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ReadingNote {
    /// The ordinal of the next event. All events of the rows that were read have lower ordinals.
    ordinal: u32,
    /// The index of the table in the settings.
    table: usize,
    /// All rows of the table up to this `seq` are read. `None` if the table has no indexed `seq` and all its
    /// rows are read.
    seq: Option<i64>,
    /// Whether all rows of the table are read.
    is_last: bool,
}

/// The notes of a recovery, in the order of reading.
#[derive(Debug)]
struct NoteQueue {
    notes: VecDeque<ReadingNote>,
    /// Minimum number of events between two notes of a table.
    distance: u32,
}

/// The notes of a recovery. The task that reads the tables adds notes, and the writer takes them.
#[derive(Debug, Clone)]
pub(super) struct ReadingNotes(Arc<Mutex<NoteQueue>>);

impl ReadingNotes {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(NoteQueue {
            notes: VecDeque::new(),
            distance: DISTANCE,
        })))
    }

    /// Notes that the recovery has read all rows of a table below `seq`. The events of these rows have an ordinal
    /// below `ordinal`. Does nothing if too few events have followed the last note of the same table.
    pub(super) fn reads(&self, ordinal: u32, table: usize, seq: i64) {
        let mut queue = self.lock();
        let distance = queue.distance;
        let last = queue.notes.back();
        let is_due =
            last.is_none_or(|last| last.table != table || ordinal >= last.ordinal + distance);
        if let Some(seq) = seq.checked_sub(1)
            && is_due
        {
            let seq = Some(seq);
            queue.push(ReadingNote {
                ordinal,
                table,
                seq,
                is_last: false,
            });
        }
    }

    /// Notes that the recovery has read all rows of a table, up to `seq`. Their events have an ordinal below `ordinal`.
    pub(super) fn has_read(&self, ordinal: u32, table: usize, seq: Option<i64>) {
        self.lock().push(ReadingNote {
            ordinal,
            table,
            seq,
            is_last: true,
        });
    }

    /// Takes the notes whose events are all resolved, because their ordinals are below `resolved_below`.
    /// Returns only the last of these notes for each table, because it includes the earlier ones.
    fn take_reached(&self, resolved_below: u32) -> Vec<ReadingNote> {
        let mut queue = self.lock();
        let mut reached: Vec<ReadingNote> = Vec::new();
        while let Some(note) = queue
            .notes
            .pop_front_if(|note| note.ordinal <= resolved_below)
        {
            reached.retain(|earlier| earlier.table != note.table);
            reached.push(note);
        }
        if queue.notes.is_empty() {
            queue.distance = DISTANCE;
        }
        reached
    }

    /// Puts a note back, because it could not be written.
    fn put_back(&self, note: ReadingNote) {
        self.lock().notes.push_front(note);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, NoteQueue> {
        self.0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl NoteQueue {
    fn push(&mut self, note: ReadingNote) {
        if self.notes.len() >= MAX_NOTES {
            let mut n = 0;
            self.notes.retain(|note| {
                n += 1;
                n % 2 == 1 || note.is_last
            });
            self.distance = self.distance.saturating_mul(2);
        }
        self.notes.push_back(note);
    }
}

/// Writes the progress of one recovery.
#[derive(Debug)]
pub(super) struct ProgressWriter {
    pub(super) notes: ReadingNotes,
    pub(super) slot: SlotName,
    pub(super) walsender: i32,
    pub(super) tables: Vec<TableSettings>,
    /// The shape and the capture record of each of `tables`, from before the recovery read the tables.
    pub(super) captured: Vec<Captured>,
    /// All transactions below this id had ended before the recovery read the tables.
    pub(super) below: u64,
}

impl ProgressWriter {
    /// Writes the progress again and again. `resolved_below` returns an ordinal; all events with lower ordinals are
    /// resolved. The recovery does not need the progress, so an error is only logged. If the connection is lost, the
    /// recovery itself notices.
    pub(super) async fn run(
        &self,
        sql: &Sql,
        resolved_below: impl Fn() -> u32,
    ) -> std::convert::Infallible {
        let mut log = ThrottledLog::default();
        loop {
            tokio::time::sleep(INTERVAL).await;
            for note in self.notes.take_reached(resolved_below()) {
                let Err(error) = self.write(sql, note).await else {
                    continue;
                };
                self.notes.put_back(note);
                if let Some(since_last) = log.due(error.code()) {
                    tracing::warn!(
                        code = %error.code(), hint = error.hint_text(), since_last,
                        "cannot record how far the recovery has got, so an interrupted recovery may repeat \
                         more rows: {error}"
                    );
                }
            }
        }
    }

    async fn write(&self, sql: &Sql, note: ReadingNote) -> Result<()> {
        let captured = &self.captured[note.table];
        // Record progress only for the partitions that the table has now. If a partition was detached in the
        // meantime, the recovery might not have read its rows.
        let Some(now) = shape::read(sql, &self.tables[note.table]).await? else {
            return Ok(());
        };
        // Record no progress if the recovery may have missed rows: the table was rewritten during a scan by ctid,
        // or a partition was detached and attached again. The recovery itself notices a rewrite only at the end of
        // the table.
        if now.was_rewritten_since(&captured.shape) || now.was_attached_again_since(&captured.shape)
        {
            return Ok(());
        }
        let leaves: Vec<u32> = now.leaves().collect();
        let Some(progress) = captured.recovery_progress_at(self.below, note.seq, &leaves) else {
            return Ok(());
        };
        let (reader, identity) = ((&self.slot, self.walsender), &captured.record.identity);
        recovery_progress::write(sql, reader, identity, &progress).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_note_whose_events_are_resolved_counts() {
        let notes = ReadingNotes::new();
        notes.reads(1, 0, 10);
        notes.reads(2, 0, 11);
        notes.reads(1 + DISTANCE, 0, 500);
        notes.has_read(400, 0, Some(900));
        notes.reads(400, 1, 7);
        assert_eq!(notes.take_reached(0), []);
        let at = |ordinal, table, seq, is_last| ReadingNote {
            ordinal,
            table,
            seq: Some(seq),
            is_last,
        };
        assert_eq!(notes.take_reached(DISTANCE), [at(1, 0, 9, false)]);
        assert_eq!(
            notes.take_reached(400),
            [at(400, 0, 900, true), at(400, 1, 6, false)]
        );
        assert_eq!(notes.take_reached(u32::MAX), []);
    }

    /// The recovery reads ten million rows before the event with the ordinal 5,000,000 gets an outcome. Until then no note
    /// is taken from the queue, so the queue exceeds its limit and drops notes. The dropped ones are evenly spread, so
    /// there still is a note shortly before this event.
    #[test]
    fn the_number_of_notes_is_bounded_and_they_stay_evenly_spread() {
        let notes = ReadingNotes::new();
        for ordinal in 1..10_000_000 {
            notes.reads(ordinal, 0, i64::from(ordinal));
        }
        assert!(notes.lock().notes.len() <= MAX_NOTES);
        let reached = notes.take_reached(5_000_000);
        let seq = reached[0].seq.unwrap();
        assert!((4_950_000..5_000_000).contains(&seq), "{seq}");
    }
}
