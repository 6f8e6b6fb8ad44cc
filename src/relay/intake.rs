//! From bytes of the stream to events: decode, find the table, map.
//!
//! No IO and no queues; what is done with an event is decided by the caller. The ordinal of an
//! event counts every insert of its transaction that the publication sends, captured or not, so that
//! it is the same each time the transaction is decoded.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use decoder::{
    CacheChange, Lsn, Message, Oid, OwnedRelation, PgTimestamp, Relation, RelationCache,
};

use super::places::Places;
use crate::error::{Code, Error, Result};
use crate::lanes::{Event, EventRef};
use crate::map::{
    ColumnTypes, EventError, EventPosition, MapError, Mapper, OrderingKey, TableSettings,
};
use crate::metrics::{Kind, Metrics};
use crate::watermark::CommitLsn;

/// What one message of the stream comes to.
#[derive(Debug)]
pub(super) enum Step {
    /// Nothing to do.
    Nothing,
    /// A transaction begins.
    Begin(CommitLsn, PgTimestamp),
    /// An event of the open transaction.
    Event {
        topic: Arc<str>,
        ordering_key: OrderingKey,
        event: Event,
    },
    /// A row of the open transaction that cannot become a message, and its payload as far as it
    /// can be read.
    Unmappable {
        error: Box<EventError>,
        payload: Bytes,
    },
    /// The open transaction ends here.
    Commit(Lsn),
    /// Nothing of this captured table can be mapped before [`Intake::learn`] was told what types its
    /// columns have.
    TypesUnknown(Oid),
}

/// How rows of one relation are treated.
#[derive(Debug)]
enum Table {
    Captured(Box<Mapper>),
    /// Not in our settings.
    Ignored {
        rows: u64,
    },
}

#[derive(Debug, Clone, Copy)]
struct Open {
    commit: CommitLsn,
    commit_time: PgTimestamp,
    inserts: u32,
}

/// Decoder and mappers of one session.
#[derive(Debug)]
pub(super) struct Intake {
    settings: Arc<[TableSettings]>,
    project: Arc<str>,
    relations: RelationCache,
    types: ColumnTypes,
    /// With a fast hash: each event looks its table up.
    tables: HashMap<Oid, Table, foldhash::fast::RandomState>,
    open: Option<Open>,
    last_commit_time: Option<PgTimestamp>,
    places: Places,
    metrics: Metrics,
}

impl Intake {
    pub(super) fn new(
        settings: Arc<[TableSettings]>,
        project: Arc<str>,
        places: Places,
        metrics: Metrics,
    ) -> Self {
        Self {
            settings,
            project,
            relations: RelationCache::new(),
            types: ColumnTypes::default(),
            tables: HashMap::default(),
            open: None,
            last_commit_time: None,
            places,
            metrics,
        }
    }

    /// When the transaction was committed that the last message belonged to.
    pub(super) fn last_commit_time(&self) -> Option<PgTimestamp> {
        self.last_commit_time
    }

    /// Takes one message of the stream.
    ///
    /// # Errors
    /// `replication-protocol` when it cannot be decoded, `column-missing` and the like when the
    /// rows of a table cannot be mapped, `setting-invalid` when a shard has no place left for a row.
    /// Nothing of the message has taken effect then.
    pub(super) fn message(&mut self, payload: &[u8]) -> Result<Step> {
        let message = decoder::decode(payload).map_err(|e| {
            Error::new(Code::ReplicationProtocol, "a message of the stream").caused_by(e)
        })?;
        match message {
            Message::Begin(begin) => {
                let commit = CommitLsn::new(begin.final_lsn);
                self.last_commit_time = Some(begin.commit_time);
                self.open = Some(Open {
                    commit,
                    commit_time: begin.commit_time,
                    inserts: 0,
                });
                Ok(Step::Begin(commit, begin.commit_time))
            }
            Message::Commit(commit) => {
                self.open = None;
                Ok(Step::Commit(commit.end_lsn))
            }
            Message::Relation(relation) => self.relation(&relation),
            Message::Insert(insert) => self.insert(insert.relation, &insert.tuple),
            Message::Update(update) => Ok(self.unexpected("update", update.relation)),
            Message::Delete(delete) => Ok(self.unexpected("delete", delete.relation)),
            Message::Truncate(truncate) => {
                for relation in truncate.relations.iter() {
                    self.unexpected("truncate", relation);
                }
                Ok(Step::Nothing)
            }
            Message::Origin(_) | Message::Type(_) | Message::Logical(_) => Ok(Step::Nothing),
        }
    }

    fn relation(&mut self, relation: &Relation<'_>) -> Result<Step> {
        if self.relations.insert(relation) == CacheChange::Unchanged {
            return Ok(Step::Nothing);
        }
        let known = self
            .relations
            .get(relation.oid)
            .ok_or_else(|| unknown(relation.oid))?;
        let Some(settings) = settings_of(&self.settings, known) else {
            // Also the leaves of a captured partitioned table: its rows come under the root.
            self.tables.insert(relation.oid, Table::Ignored { rows: 0 });
            return Ok(Step::Nothing);
        };
        if self.types.any_unknown(known) {
            self.tables.remove(&relation.oid);
            return Ok(Step::TypesUnknown(relation.oid));
        }
        let table = captured(known, &self.types, settings, &self.project)?;
        self.tables.insert(relation.oid, table);
        Ok(Step::Nothing)
    }

    /// A table as the stream has described it, and the types that are known.
    ///
    /// # Errors
    /// `replication-protocol` when it was not described.
    pub(super) fn described(&self, relation: Oid) -> Result<(&OwnedRelation, &ColumnTypes)> {
        let known = self.relations.get(relation);
        let known = known.ok_or_else(|| unknown(relation))?;
        Ok((known, &self.types))
    }

    /// Takes the types that were looked up for [`Step::TypesUnknown`].
    ///
    /// # Errors
    /// `column-missing` and the like when the rows of the table cannot be mapped.
    pub(super) fn learn(&mut self, relation: Oid, types: ColumnTypes) -> Result<()> {
        self.types.learn_all(types);
        let known = self.relations.get(relation);
        let known = known.ok_or_else(|| unknown(relation))?;
        let settings = settings_of(&self.settings, known).ok_or_else(|| unknown(relation))?;
        let table = captured(known, &self.types, settings, &self.project)?;
        self.tables.insert(relation, table);
        Ok(())
    }

    fn insert(&mut self, relation: Oid, tuple: &decoder::Tuple<'_>) -> Result<Step> {
        let outside = || {
            Error::new(
                Code::ReplicationProtocol,
                "an insert came outside of a transaction",
            )
        };
        let open = self.open.as_mut().ok_or_else(outside)?;
        open.inserts += 1;
        let Open {
            commit,
            commit_time,
            inserts,
        } = *open;
        let ordinal = self.places.nth(inserts)?;
        let mapper = match self.tables.get_mut(&relation) {
            Some(Table::Captured(mapper)) => mapper,
            Some(Table::Ignored { rows }) => {
                *rows += 1;
                if *rows == 1 {
                    let name = self.name_of(relation);
                    tracing::warn!(
                        table = name,
                        "the publication sends rows of a table that is not in the settings: ignored"
                    );
                }
                return Ok(Step::Nothing);
            }
            None => return Err(unknown(relation)),
        };
        let at = EventPosition {
            commit_lsn: commit.lsn(),
            ordinal,
            commit_time,
        };
        let mapped = match mapper.map(tuple, at) {
            Ok(mapped) => mapped,
            Err(MapError::Event(error)) if error.fault.is_of_the_row() => {
                let payload = mapper.payload(tuple);
                return Ok(Step::Unmappable { error, payload });
            }
            Err(error) => return Err(error.into()),
        };
        let origin = EventRef::new(commit, ordinal, commit_time, mapped.event_id);
        Ok(Step::Event {
            topic: mapped.topic,
            ordering_key: mapped.ordering_key,
            event: Event {
                origin,
                message: mapped.message,
            },
        })
    }

    fn name_of(&self, relation: Oid) -> String {
        let known = self.relations.get(relation);
        known
            .map(|r| format!("{}.{}", r.namespace, r.name))
            .unwrap_or_default()
    }

    /// Counts a change that an append-only outbox should not see; warns at the first of a kind
    /// and then at each thousandth.
    fn unexpected(&self, kind: &'static str, relation: Oid) -> Step {
        if matches!(self.tables.get(&relation), Some(Table::Captured(_))) {
            let count = self
                .metrics
                .unexpected_changes
                .get_or_create(&Kind { kind })
                .inc();
            if count.is_multiple_of(1_000) {
                tracing::warn!(
                    table = self.name_of(relation),
                    kind,
                    count = count + 1,
                    "a captured table was changed other than by INSERT: this is never published; \
                     set the publication to publish = 'insert' alone"
                );
            }
        }
        Step::Nothing
    }
}

fn captured(
    relation: &OwnedRelation,
    types: &ColumnTypes,
    settings: &TableSettings,
    project: &str,
) -> Result<Table> {
    let mapper = Mapper::resolve(relation, types, settings, &settings.identity(), project)?;
    Ok(Table::Captured(Box::new(mapper)))
}

fn settings_of<'a>(
    all: &'a [TableSettings],
    relation: &OwnedRelation,
) -> Option<&'a TableSettings> {
    all.iter().find(|settings| {
        settings.table.schema == relation.namespace && settings.table.name == relation.name
    })
}

fn unknown(relation: Oid) -> Error {
    Error::new(
        Code::ReplicationProtocol,
        format!("a row of relation {relation} came before its description"),
    )
}
