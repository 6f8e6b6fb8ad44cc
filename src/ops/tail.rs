//! Follows outbox.dispatch: returns each record soon after the relay has written it.
//!
//! Records of streamed events do not appear in commit order, because keys do not wait for each other. But the
//! slot confirms a position only when all streamed events before this position are resolved. So each poll
//! reads the records from the confirmed position of the previous poll on, and leaves out the records that
//! were already returned. A poll reads only the newest [`WINDOW`] records, so that memory does not grow while
//! a failing topic holds the confirmed position back.
//!
//! Each poll may use a new connection, so that the command survives a lost connection.
//!
//! Records whose positions may lie before the confirmed position are not returned. These are the records of
//! rows that a recovery or the auditor publishes from their table, and of events that leave quarantine.

use std::collections::{BTreeMap, HashSet};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use decoder::Lsn;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
use prost::Message;
use replication::CommitLsn;
use serde::Serialize;
use slot_manager::slots;

use super::event::EventQuery;
use crate::capture::claim;
use crate::capture::rows;
use crate::capture::table::TableReader;
use crate::error::Result;
use crate::event::{EventId, EventPosition};
use crate::postgres::Sql;
use crate::settings::Settings;
pub(crate) use crate::store::dispatch::history::RecordedRow;
use crate::store::dispatch::history::{self, RecordFilter};
use crate::store::relay_row;

/// Maximum number of records that one poll reads and that the command remembers.
const WINDOW: usize = 10_000;

/// Number of records in a page while catching up from `--since`.
const PAGE: usize = 1_000;

/// The command's position in outbox.dispatch, and the records that it has returned.
pub(crate) struct Tail<'a> {
    settings: &'a Settings,
    query: &'a EventQuery<'a>,
    filter: RecordFilter,
    /// The position of the last record returned, while the command catches up from `--since`;
    /// otherwise `None`.
    catching_up: Option<EventPosition>,
    /// The position at which the next poll starts.
    from: EventPosition,
    /// The known records at or after `from`: the position of each, and the time at which the relay wrote it
    /// (microseconds since 1970). A poll returns a record that is not known, or that the relay has written again at
    /// another time.
    seen: BTreeMap<EventPosition, i64>,
    /// Whether `seen` contains all records that were written before the start. If so, every record that is
    /// not in `seen` is new.
    is_live: bool,
    notes: Vec<&'static str>,
    noted: HashSet<&'static str>,
}

impl<'a> Tail<'a> {
    /// Finds the position to begin at.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn begin(
        sql: &Sql,
        settings: &'a Settings,
        query: &'a EventQuery<'a>,
    ) -> Result<Self> {
        let mut tail = Self {
            settings,
            query,
            filter: query.filter(sql).await?,
            catching_up: None,
            from: EventPosition::default(),
            seen: BTreeMap::new(),
            is_live: false,
            notes: Vec::new(),
            noted: HashSet::new(),
        };
        let records = relay_row::read_record_keeping(sql, settings).await?;
        if records.may_lack_records() {
            tail.note(
                "with dispatch = exceptions published events get no record: of the new events, only \
                 events that were quarantined appear",
            );
        }
        tail.from = match tail.confirmed(sql).await? {
            Some(confirmed) => confirmed,
            None => history::last_position(sql).await?,
        };
        if query.since.is_some() {
            tail.catching_up = Some(EventPosition::default());
        } else {
            tail.poll(sql).await?;
            tail.is_live = true;
        }
        Ok(tail)
    }

    /// Returns the next records in commit order: a page of old records while catching up from
    /// `--since`, otherwise the records written since the previous poll.
    ///
    /// # Errors
    /// Database errors. The next call then returns the records that this call did not return.
    pub(crate) async fn next(&mut self, sql: &Sql) -> Result<Vec<RecordedRow>> {
        if let Some(after) = self.catching_up {
            let page = history::page(sql, &self.filter, after, PAGE).await;
            let page = page.map_err(|error| self.query.took_long(error))?;
            if let Some(last) = page.last() {
                self.catching_up = Some(last.record.position);
                self.seen.extend(
                    page.iter()
                        .map(|row| (row.record.position, row.recorded_micros)),
                );
                self.forget();
                return Ok(page);
            }
            self.catching_up = None;
            self.is_live = true;
        }
        self.poll(sql).await
    }

    /// Returns the new notes for the reader of the output. Each note appears only once.
    pub(crate) fn take_notes(&mut self) -> Vec<&'static str> {
        std::mem::take(&mut self.notes)
    }

    fn note(&mut self, note: &'static str) {
        if self.noted.insert(note) {
            self.notes.push(note);
        }
    }

    async fn confirmed(&mut self, sql: &Sql) -> Result<Option<EventPosition>> {
        let slot = slots::find(sql, &self.settings.slot).await?;
        if slot.is_none() {
            self.note("this server does not have the relay's slot: new records appear only if it is a standby of the relay's server");
        }
        let confirmed = slot.and_then(|slot| slot.confirmed_flush_lsn);
        Ok(confirmed.map(|lsn| EventPosition {
            commit: CommitLsn::new(Lsn::new(lsn.as_u64())),
            ordinal: 0,
        }))
    }

    async fn poll(&mut self, sql: &Sql) -> Result<Vec<RecordedRow>> {
        let confirmed = self.confirmed(sql).await?;
        let found = history::newest_positions(sql, &self.filter, self.from, WINDOW).await?;
        if let Some((oldest, at)) = found.get(WINDOW - 1) {
            self.note(
                "more than 10,000 records wait for the slot to confirm them: only the newest 10,000 are \
                 watched, so late records of older events are not shown",
            );
            if self.is_live && self.seen.get(oldest) != Some(at) {
                self.note("more than 10,000 records have appeared at once: the oldest are skipped");
            }
            self.from = self.from.max(*oldest);
        }
        let is_new = |(position, at): &(EventPosition, i64)| self.seen.get(position) != Some(at);
        let new: Vec<(EventPosition, i64)> = found.into_iter().filter(is_new).collect();
        let positions: Vec<EventPosition> = new.iter().map(|(at, _)| *at).collect();
        let records = if positions.is_empty() {
            Vec::new()
        } else {
            history::at_positions(sql, &positions).await?
        };
        // Mark these records as seen only now. If the connection is lost earlier, the next poll
        // returns the records again.
        self.seen.extend(new);
        self.from = confirmed.max(Some(self.from)).unwrap_or_default();
        self.forget();
        Ok(records)
    }

    /// Forgets records that no later poll reads.
    fn forget(&mut self) {
        self.seen = self.seen.split_off(&self.from);
        while self.seen.len() > WINDOW {
            self.seen.pop_first();
            if let Some((first, _)) = self.seen.first_key_value() {
                self.from = *first;
            }
        }
    }
}

/// The content of a message. Programs depend on its JSON form.
#[derive(Debug, Serialize)]
pub(crate) struct TailedMessage {
    pub(crate) attributes: BTreeMap<String, String>,
    /// The data, if it is UTF-8.
    pub(crate) data: Option<String>,
    /// The data in base64, if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) data_base64: Option<String>,
}

/// A reader that builds messages again from their rows, with the current settings.
pub(crate) struct MessageReader {
    readers: Vec<TableReader>,
}

impl MessageReader {
    /// Reads the columns of the captured tables.
    ///
    /// # Errors
    /// `column-missing` and others if the settings do not fit the tables; database errors.
    pub(crate) async fn open(sql: &Sql, settings: &Settings) -> Result<Self> {
        let captured =
            claim::as_if_claimed(sql, &settings.slot, &settings.tables, settings.start).await?;
        let project = settings.project().unwrap_or("none");
        let mut readers = Vec::new();
        for (table, captured) in settings.tables.iter().zip(&captured) {
            readers.push(TableReader::resolve(sql, table, project, captured).await?);
        }
        Ok(Self { readers })
    }

    /// Returns the message of an event; `None` if its row is gone or cannot become a message.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn message(
        &mut self,
        sql: &Sql,
        row: &RecordedRow,
    ) -> Result<Option<TailedMessage>> {
        let event_id = EventId {
            uuid: row.event_id.into_bytes(),
            source_id: row.source_id.clone().map(Into::into),
        };
        for reader in &mut self.readers {
            let Some(values) = rows::find(sql, reader, &event_id).await? else {
                continue;
            };
            let event = reader.event(&values, row.record.position);
            return Ok(event.ok().and_then(|event| read(&event.event.message)));
        }
        Ok(None)
    }
}

fn read(message: &[u8]) -> Option<TailedMessage> {
    let message = PubsubMessage::decode(message).ok()?;
    let (data, data_base64) = match std::str::from_utf8(&message.data) {
        Ok(text) => (Some(text.to_owned()), None),
        Err(_) => (None, Some(STANDARD.encode(&message.data))),
    };
    Some(TailedMessage {
        attributes: message.attributes.into_iter().collect(),
        data,
        data_base64,
    })
}
