//! Turns messages of the stream into events: decodes the message, finds its table, maps the row.
//!
//! This module has no IO and no queues. The caller decides what to do with an event. The ordinal of an
//! event counts every insert of its transaction that the publication sends, including inserts into tables
//! that are not captured. So the ordinal does not depend on the settings.

mod streamed;

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use decoder::{
    CacheChange, Lsn, Message, Oid, OwnedRelation, PgTimestamp, Relation, RelationCache, Value,
};
use replication::CommitLsn;

use super::moved::{MovedMark, xid8};
use super::session_records::SessionRecords;

pub(crate) use self::streamed::Streamed;
use super::shape::FIRST_NORMAL_XID;
use crate::error::{Code, Error, Result};
use crate::event::{CommittedAt, Event, EventPosition, EventRef, OrderingKey};
use crate::mapping::{ColumnTypes, EventError, MapError, Mapper, TupleValues};
use crate::metrics::{KindLabel, Metrics};
use crate::throttled_log::ThrottledLog;

/// The result of one message of the stream.
#[derive(Debug)]
pub(crate) enum IntakeStep {
    /// Nothing to do.
    Nothing,
    /// A transaction begins. The fields are its commit LSN, its commit time, and the lower 32 bits of its
    /// id.
    Begin(CommitLsn, PgTimestamp, u32),
    /// An event of the open transaction.
    Event {
        /// Index of the table's capture record in [`SessionRecords`].
        record: usize,
        topic: Arc<str>,
        ordering_key: OrderingKey,
        event: Event,
        /// Set if another transaction originally inserted the row, for example because the row was moved.
        moved: Option<MovedMark>,
    },
    /// A row of the open transaction that cannot become a message. `payload` is empty if the payload
    /// column cannot be read or is too large.
    Unmappable {
        /// Index of the table's capture record in [`SessionRecords`].
        record: usize,
        error: Box<EventError>,
        payload: Bytes,
        moved: Option<MovedMark>,
    },
    /// The open transaction ends at this LSN.
    Commit(Lsn),
    /// Rows of this captured table cannot be mapped until [`Intake::learn`] gets the types of its
    /// columns.
    TypesUnknown(Oid),
    /// The stream describes a table with a configured name, but the session has claimed another table under this name.
    /// If the described table still has the name, a new session must claim it before its rows can be mapped. Otherwise
    /// the described table was dropped or renamed after its rows were written, and the session can map the rows.
    TableUnknown(Oid),
    /// The stream describes a claimed table without an optional column that the table had when the session began. So
    /// the caller must read the table's present columns and call [`Intake::refuse_incomplete`]. That function accepts
    /// the rows if the column was added after they were inserted.
    ColumnUnknown(Oid),
}

/// How to handle the rows of one relation.
#[derive(Debug)]
enum KnownRelation {
    Captured(Box<MappedTable>),
    /// The table is not in the settings. `rows` counts its rows, so that only the first one causes a warning.
    Ignored {
        rows: u64,
    },
}

#[derive(Debug)]
struct MappedTable {
    mapper: Mapper,
    /// Index of the table's capture record in [`SessionRecords`].
    record: usize,
    /// Index of the column `inserted_xid`, if the table has one.
    inserted_xid: Option<usize>,
}

#[derive(Debug, Clone, Copy)]
struct CurrentTransaction {
    commit: CommitLsn,
    commit_time: PgTimestamp,
    xid: u32,
    /// Whether the transaction was replicated from another server. If so, `inserted_xid` in its rows
    /// may be a transaction id of that server.
    is_replicated: bool,
    inserts: u32,
}

impl CurrentTransaction {
    /// Returns a mark if another transaction originally inserted the row. Compares only the lower 32 bits of the
    /// transaction ids, because the stream contains only these bits.
    fn moved(&self, table: &MappedTable, row: &[Value<'_>]) -> Option<MovedMark> {
        let Value::Text(text) = row.get(table.inserted_xid?)? else {
            return None;
        };
        let inserted_xid = xid8(text)?;
        // A service that sets every column itself may write a placeholder such as 0, which names no
        // transaction.
        let is_made_up = inserted_xid < FIRST_NORMAL_XID;
        let is_own = self.is_replicated || is_made_up || inserted_xid as u32 == self.xid;
        (!is_own).then_some(MovedMark {
            record: table.record,
            inserted_xid,
        })
    }
}

/// The decoder's state and the mappers of one session.
#[derive(Debug)]
pub(crate) struct Intake {
    captured: Vec<Streamed>,
    records: SessionRecords,
    project: Arc<str>,
    relations: RelationCache,
    types: ColumnTypes,
    /// Uses a fast hash, because the intake looks up the table of each event.
    tables: HashMap<Oid, KnownRelation, foldhash::fast::RandomState>,
    open: Option<CurrentTransaction>,
    last_commit_time: Option<PgTimestamp>,
    metrics: Metrics,
    /// Throttles the lines about changes other than inserts, by the kind of change and the table.
    log: ThrottledLog<(&'static str, Oid)>,
}

impl Intake {
    pub(crate) fn new(
        captured: Vec<Streamed>,
        records: SessionRecords,
        project: Arc<str>,
        metrics: Metrics,
    ) -> Self {
        Self {
            captured,
            records,
            project,
            relations: RelationCache::new(),
            types: ColumnTypes::default(),
            tables: HashMap::default(),
            open: None,
            last_commit_time: None,
            metrics,
            log: ThrottledLog::default(),
        }
    }

    /// Commit time of the transaction that began last in the stream.
    pub(crate) fn last_commit_time(&self) -> Option<PgTimestamp> {
        self.last_commit_time
    }

    /// Processes one message of the stream.
    ///
    /// # Errors
    /// `replication-protocol` when the message cannot be decoded; `column-missing` and similar errors
    /// when the rows of a table cannot be mapped.
    pub(crate) fn message(&mut self, payload: &[u8]) -> Result<IntakeStep> {
        let message = decoder::decode(payload).map_err(|e| {
            Error::new(
                Code::ReplicationProtocol,
                "cannot decode a message of the stream",
            )
            .caused_by(e)
        })?;
        match message {
            Message::Begin(begin) => {
                let commit = CommitLsn::new(begin.final_lsn);
                self.last_commit_time = Some(begin.commit_time);
                self.open = Some(CurrentTransaction {
                    commit,
                    commit_time: begin.commit_time,
                    xid: begin.xid.0,
                    is_replicated: false,
                    inserts: 0,
                });
                Ok(IntakeStep::Begin(commit, begin.commit_time, begin.xid.0))
            }
            Message::Commit(commit) => {
                self.open = None;
                Ok(IntakeStep::Commit(commit.end_lsn))
            }
            Message::Relation(relation) => self.relation(&relation),
            Message::Insert(insert) => self.insert(insert.relation, &insert.tuple),
            Message::Update(update) => Ok(self.unexpected("update", update.relation)),
            Message::Delete(delete) => Ok(self.unexpected("delete", delete.relation)),
            Message::Truncate(truncate) => {
                for relation in truncate.relations.iter() {
                    self.unexpected("truncate", relation);
                }
                Ok(IntakeStep::Nothing)
            }
            Message::Origin(_) => {
                if let Some(open) = &mut self.open {
                    open.is_replicated = true;
                }
                Ok(IntakeStep::Nothing)
            }
            Message::Type(_) | Message::Logical(_) => Ok(IntakeStep::Nothing),
        }
    }

    fn relation(&mut self, relation: &Relation<'_>) -> Result<IntakeStep> {
        if self.relations.insert(relation) == CacheChange::Unchanged {
            return Ok(IntakeStep::Nothing);
        }
        self.know(relation.oid)
    }

    /// Finds out how to handle the rows of a relation that the stream has described.
    fn know(&mut self, oid: Oid) -> Result<IntakeStep> {
        let known = self.relations.get(oid).ok_or_else(|| unknown(oid))?;
        let Some((number, streamed)) = self.captured(known) else {
            // Partitions of a captured table are ignored too, because their rows arrive as rows of the
            // root table.
            self.tables.insert(oid, KnownRelation::Ignored { rows: 0 });
            return Ok(IntakeStep::Nothing);
        };
        if self.types.any_unknown(known) {
            self.tables.remove(&oid);
            return Ok(IntakeStep::TypesUnknown(oid));
        }
        streamed.refuse_dropped_types(known, &self.types)?;
        let table = self.resolve(known, number, streamed)?;
        let is_claimed = streamed.is_claimed(known) || !self.names_a_table(known);
        let may_be_incomplete = streamed.may_be_incomplete(known);
        let table = KnownRelation::Captured(Box::new(table));
        self.tables.insert(oid, table);
        Ok(if !is_claimed {
            IntakeStep::TableUnknown(oid)
        } else if may_be_incomplete {
            IntakeStep::ColumnUnknown(oid)
        } else {
            IntakeStep::Nothing
        })
    }

    /// Returns a table as the stream has described it, and the column types that are known so far.
    ///
    /// # Errors
    /// `replication-protocol` when the stream has not described the table.
    pub(crate) fn described(&self, relation: Oid) -> Result<(&OwnedRelation, &ColumnTypes)> {
        let known = self.relations.get(relation);
        let known = known.ok_or_else(|| unknown(relation))?;
        Ok((known, &self.types))
    }

    /// Takes the types that the caller has looked up for [`IntakeStep::TypesUnknown`].
    ///
    /// # Errors
    /// `column-missing` and similar errors when the rows of the table cannot be mapped.
    pub(crate) fn learn(&mut self, relation: Oid, types: ColumnTypes) -> Result<IntakeStep> {
        self.types.learn_all(types);
        self.know(relation)
    }

    fn insert(&mut self, relation: Oid, tuple: &decoder::Tuple<'_>) -> Result<IntakeStep> {
        let outside = || {
            Error::new(
                Code::ReplicationProtocol,
                "the stream has an insert outside of a transaction",
            )
        };
        let open = self.open.as_mut().ok_or_else(outside)?;
        open.inserts += 1;
        let CurrentTransaction {
            commit,
            commit_time,
            inserts: ordinal,
            ..
        } = *open;
        let table = match self.tables.get_mut(&relation) {
            Some(KnownRelation::Captured(table)) => table,
            Some(KnownRelation::Ignored { rows }) => {
                *rows += 1;
                if *rows == 1 {
                    let name = self.name_of(relation);
                    tracing::warn!(
                        table = name,
                        "the publication sends rows of a table that is not in the settings: ignoring them"
                    );
                }
                return Ok(IntakeStep::Nothing);
            }
            None => return Err(unknown(relation)),
        };
        let at = CommittedAt {
            position: EventPosition { commit, ordinal },
            time: commit_time,
        };
        let row = TupleValues::of(tuple);
        let row = row.as_slice();
        let (moved, record) = (open.moved(table, row), table.record);
        let mapped = match table.mapper.map_row(row, at) {
            Ok(mapped) => mapped,
            Err(MapError::Event(error)) if error.fault.is_of_the_row() => {
                let payload = table.mapper.payload(row);
                return Ok(IntakeStep::Unmappable {
                    record,
                    error,
                    payload,
                    moved,
                });
            }
            Err(error) => return Err(error.into()),
        };
        let origin = EventRef::new(at, mapped.event_id);
        Ok(IntakeStep::Event {
            record,
            topic: mapped.topic,
            ordering_key: mapped.ordering_key,
            event: Event {
                origin,
                message: mapped.message,
            },
            moved,
        })
    }

    fn name_of(&self, relation: Oid) -> String {
        let known = self.relations.get(relation);
        known
            .map(|r| format!("{}.{}", r.namespace, r.name))
            .unwrap_or_default()
    }

    /// Counts a change of a captured table other than an insert. An append-only outbox has no such
    /// changes.
    fn unexpected(&mut self, kind: &'static str, relation: Oid) -> IntakeStep {
        if matches!(self.tables.get(&relation), Some(KnownRelation::Captured(_))) {
            let changes = &self.metrics.unexpected_changes;
            changes.get_or_create(&KindLabel { kind }).inc();
            if let Some(since_last) = self.log.due((kind, relation)) {
                tracing::warn!(
                    table = self.name_of(relation),
                    kind,
                    since_last,
                    "a captured table was changed other than by INSERT, which is never published; \
                     set publish = 'insert' in the publication"
                );
            }
        }
        IntakeStep::Nothing
    }
}

fn unknown(relation: Oid) -> Error {
    Error::new(
        Code::ReplicationProtocol,
        format!("a row of relation {relation} came before its description"),
    )
}
