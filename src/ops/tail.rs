//! Follows outbox.dispatch: returns each record soon after the relay has written it.
//!
//! Records appear out of order, because keys do not wait for each other. But the slot confirms a
//! position only when all events before it are recorded. So each look reads the records above the
//! position that was confirmed at the previous look, and leaves out those returned already. One
//! look reads at most [`WINDOW`] records. While a key or a topic holds the confirmed position back
//! for longer than that, a record that appears further behind is not returned.

use std::collections::{BTreeMap, HashSet};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
use prost::Message;
use serde::Serialize;
use slot_manager::slots;
use tokio_postgres::types::PgLsn;

use super::event::EventReport;
use super::event::find::of_record_alone;
use super::since::Since;
use crate::capture::claim;
use crate::capture::rows;
use crate::capture::table::TableReader;
use crate::error::Result;
use crate::event::EventId;
use crate::postgres::PatientSql;
use crate::settings::Settings;
use crate::store::dispatch::history::{self, EventOutcome, RecordFilter, RecordedRow};
use crate::watermark::CommitLsn;

/// The most records that one look reads.
pub(crate) const WINDOW: usize = 10_000;

/// Which records to follow.
#[derive(Debug)]
pub(crate) struct TailQuery<'a> {
    pub(crate) key: Option<&'a str>,
    /// A full name, or the last part of one.
    pub(crate) topic: Option<&'a str>,
    /// Also the records of commits since then; without it, only records to come.
    pub(crate) since: Option<&'a Since>,
    /// Whether to read messages too.
    pub(crate) messages: bool,
}

/// A record with its message; its JSON form, on which programs depend.
#[derive(Debug, Serialize)]
pub(crate) struct TailedEvent {
    #[serde(flatten)]
    pub(crate) event: EventReport,
    /// The message as the relay builds it from the row with the present settings; absent unless asked
    /// for, null if the row is gone or cannot become a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) message: Option<Option<TailedMessage>>,
}

/// The content of a message.
#[derive(Debug, Serialize)]
pub(crate) struct TailedMessage {
    pub(crate) attributes: BTreeMap<String, String>,
    /// The data, if it is text.
    pub(crate) data: Option<String>,
    /// The data otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) data_base64: Option<String>,
}

/// What identifies a record and its state.
type Seen = (u64, i32, String);

/// Where the command is in outbox.dispatch.
pub(crate) struct Tail<'a> {
    sql: &'a PatientSql,
    settings: &'a Settings,
    filter: RecordFilter,
    /// The records that were returned, from the position of the filter on. Everything below that
    /// position was confirmed before the last look.
    seen: HashSet<Seen>,
    /// Whether more records appeared than one look reads, so that some were not returned.
    pub(crate) has_gap: bool,
    /// Empty unless messages are read.
    readers: Vec<TableReader>,
}

impl<'a> Tail<'a> {
    /// Finds the place to begin.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn begin(
        sql: &'a PatientSql,
        settings: &'a Settings,
        query: &TailQuery<'_>,
    ) -> Result<Self> {
        let mut tail = Self {
            sql,
            settings,
            filter: RecordFilter {
                key: query.key.map(str::to_owned),
                topic: query.topic.map(str::to_owned),
                since: Some((PgLsn::from(0), "'-infinity'::timestamptz".to_owned())),
            },
            seen: HashSet::new(),
            has_gap: false,
            readers: Vec::new(),
        };
        if query.messages {
            tail.readers = readers(sql, settings).await?;
        }
        if let Some(since) = query.since {
            let since = since.resolve(sql).await?;
            let from = since.first_commit(sql).await?;
            tail.filter.since = Some((from, since.sql().to_owned()));
        } else {
            // What is recorded now is not new.
            tail.look().await?;
            tail.has_gap = false;
        }
        Ok(tail)
    }

    /// The records that have appeared since the last look, in the order of their commits.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn next(&mut self) -> Result<Vec<TailedEvent>> {
        let mut events = Vec::new();
        for row in self.look().await? {
            let message = if self.readers.is_empty() {
                None
            } else {
                Some(self.message(&row).await?)
            };
            let event = of_record_alone(row);
            events.push(TailedEvent { event, message });
        }
        Ok(events)
    }

    async fn look(&mut self) -> Result<Vec<RecordedRow>> {
        let slot = slots::find(self.sql, &self.settings.slot).await?;
        let confirmed = slot.and_then(|slot| slot.confirmed_flush_lsn);
        let mut rows = history::newest(self.sql, &self.filter, WINDOW as i64).await?;
        let oldest = rows.get(WINDOW - 1);
        self.has_gap |= oldest.is_some_and(|row| !self.seen.contains(&seen(row)));
        let oldest = oldest.map(|row| row.commit_lsn);
        rows.retain(|row| self.seen.insert(seen(row)));
        rows.reverse();
        if let Some((from, _)) = &mut self.filter.since {
            let confirmed = confirmed.map(|lsn| PgLsn::from(lsn.as_u64()));
            *from = confirmed.max(oldest).max(Some(*from)).unwrap_or(*from);
            self.seen.retain(|(commit, ..)| *commit >= u64::from(*from));
        }
        Ok(rows)
    }

    /// The message of an event; `None` if its row is gone or cannot become a message.
    async fn message(&mut self, row: &RecordedRow) -> Result<Option<TailedMessage>> {
        let event_id = EventId {
            uuid: row.event_id.into_bytes(),
            source_id: row.source_id.clone().map(Into::into),
        };
        for reader in &mut self.readers {
            let Some(values) = rows::find(self.sql, reader, &event_id).await? else {
                continue;
            };
            let commit = CommitLsn::new(decoder::Lsn::new(row.commit_lsn.into()));
            let ordinal = row.record.ordinal.unsigned_abs();
            let event = reader.event(&values, commit, ordinal).ok();
            return Ok(event.and_then(|event| read(&event.event.message)));
        }
        Ok(None)
    }
}

async fn readers(sql: &PatientSql, settings: &Settings) -> Result<Vec<TableReader>> {
    let captured =
        claim::as_if_claimed(sql, &settings.slot, &settings.tables, settings.start).await?;
    let project = settings.project().unwrap_or("none");
    let mut readers = Vec::new();
    for (table, captured) in settings.tables.iter().zip(&captured) {
        readers.push(TableReader::resolve(sql, table, project, captured).await?);
    }
    Ok(readers)
}

fn seen(row: &RecordedRow) -> Seen {
    let EventOutcome { ordinal, state, .. } = &row.record;
    (row.commit_lsn.into(), *ordinal, state.clone())
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
