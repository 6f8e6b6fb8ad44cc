//! Asks the table what has been released, on a session of its own, one thing at a time.
//!
//! The rows of a page are found in their tables one by one, so that no more than one is in memory
//! here, however large they are; the session takes each when it has room. What fails is told and
//! asked for again later; a new connection is made for it.
//!
//! Not here: what is asked for and when, and what becomes of an event.

use std::sync::Arc;
use std::time::Duration;

use futures_util::TryFutureExt;
use slot_manager::Shard;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_postgres::SimpleQueryMessage;

use super::{Command, PAGE};
use crate::dispatch::quarantined;
use crate::error::{Code, Error, Result};
use crate::lanes::{EventRef, Group};
use crate::map::{MapError, TableSettings};
use crate::postgres::{PatientSql, Target};
use crate::table::{TableEvent, TableReader, altered_since};

/// Marking a key with a million events takes a while.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(600);

/// Groups that one look brings; the next look goes on behind them.
const GROUPS: usize = 256;

/// What to ask.
#[derive(Debug)]
pub(in crate::relay) enum Ask {
    /// Which groups are released, and which of these blocked keys have nothing left in
    /// quarantine, as of so many durable records.
    Look {
        blocked: Vec<Group>,
        durable: u64,
        count: bool,
    },
    Do(Command),
}

/// What came of it.
#[derive(Debug)]
pub(in crate::relay) enum Found {
    Looked {
        released: Vec<Group>,
        vanished: Vec<Group>,
        durable: u64,
        count: Option<i64>,
    },
    Marked(Group),
    SentBack(Group),
    /// A row of the page of this group.
    Event(Group, TableEvent),
    /// A row that cannot be sent, and why.
    Lost(Group, EventRef, Error),
    PageEnded(Group, usize),
    Failed(Error),
    /// The task has died: nothing will be found any more.
    Died,
}

/// The running task; ends when dropped.
#[derive(Debug)]
pub(in crate::relay) struct Releaser {
    asks: mpsc::Sender<Ask>,
    found: mpsc::Receiver<Found>,
    task: JoinHandle<()>,
}

impl Releaser {
    pub(in crate::relay) fn start(
        target: Target,
        tables: Vec<TableSettings>,
        project: Arc<str>,
        shard: Option<Shard>,
    ) -> Self {
        let (asks, incoming) = mpsc::channel(1);
        let (outgoing, found) = mpsc::channel(1);
        let worker = Worker {
            target,
            tables,
            project,
            shard,
            session: None,
            looked_to: None,
        };
        Self {
            asks,
            found,
            task: tokio::spawn(worker.run(incoming, outgoing)),
        }
    }

    /// Asks; the answer comes through [`found`](Self::found). Only one thing at a time.
    pub(in crate::relay) fn ask(&self, ask: Ask) {
        let sent = self.asks.try_send(ask);
        debug_assert!(sent.is_ok(), "one thing at a time");
    }

    /// The next answer. Cancel-safe; waits for ever when nothing is asked.
    pub(in crate::relay) async fn found(&mut self) -> Found {
        self.found.recv().await.unwrap_or(Found::Died)
    }
}

impl Drop for Releaser {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Session {
    sql: PatientSql,
    /// Resolved when first needed.
    readers: Vec<TableReader>,
}

struct Worker {
    target: Target,
    tables: Vec<TableSettings>,
    project: Arc<str>,
    /// Whose rows are looked at.
    shard: Option<Shard>,
    session: Option<Session>,
    /// The last group that a look has brought, unless it was the last of all: those that cannot be
    /// published for now must not hide others.
    looked_to: Option<Group>,
}

impl Worker {
    async fn run(mut self, mut asks: mpsc::Receiver<Ask>, found: mpsc::Sender<Found>) {
        while let Some(ask) = asks.recv().await {
            let answer = self.answer(ask, &found).await.unwrap_or_else(|error| {
                self.session = None;
                Found::Failed(error)
            });
            if found.send(answer).await.is_err() {
                return;
            }
        }
    }

    async fn answer(&mut self, ask: Ask, found: &mpsc::Sender<Found>) -> Result<Found> {
        let session = match &mut self.session {
            Some(session) => session,
            none => none.insert(Session::open(&self.target).await?),
        };
        let (sql, shard) = (&session.sql, self.shard);
        match ask {
            Ask::Look {
                blocked,
                durable,
                count,
            } => {
                let after = self.looked_to.take();
                let looking =
                    quarantined::released_groups(sql, shard, after.as_ref(), GROUPS as i64);
                let released = sql.answer(looking).await?;
                self.looked_to = released.get(GROUPS - 1).cloned();
                Ok(Found::Looked {
                    released,
                    vanished: match blocked.is_empty() {
                        true => Vec::new(),
                        false => {
                            let looking = quarantined::vanished(sql, shard, &blocked);
                            sql.answer(looking).await?
                        }
                    },
                    durable,
                    count: match count {
                        true => Some(sql.answer(quarantined::count(sql, shard)).await?),
                        false => None,
                    },
                })
            }
            Ask::Do(Command::Mark(group)) => {
                sql.answer(quarantined::mark(sql, shard, &group)).await?;
                Ok(Found::Marked(group))
            }
            Ask::Do(Command::SendBack(group)) => {
                sql.answer(quarantined::send_back(sql, shard, &group))
                    .await?;
                Ok(Found::SentBack(group))
            }
            Ask::Do(Command::Page(group, after)) => {
                let paging = quarantined::page(sql, shard, &group, after, PAGE);
                let rows = sql.answer(paging).await?;
                let count = rows.len();
                if count > 0 && session.readers.is_empty() {
                    for table in &self.tables {
                        let identity = table.identity();
                        let resolving =
                            TableReader::resolve(sql, table, &identity, &self.project, shard);
                        session.readers.push(sql.answer(resolving).await?);
                    }
                }
                for origin in rows {
                    let one = session.find(&group, origin).await?;
                    if found.send(one).await.is_err() {
                        break;
                    }
                }
                Ok(Found::PageEnded(group, count))
            }
        }
    }
}

impl Session {
    async fn open(target: &Target) -> Result<Self> {
        let sql = PatientSql::open(target, "postrider quarantine", STATEMENT_TIMEOUT).await?;
        // What is in quarantine is a small part of a large table, whatever the statistics say.
        let setting = sql.batch_execute("SET enable_seqscan = off");
        sql.answer(setting).await?;
        Ok(Self {
            sql,
            readers: Vec::new(),
        })
    }

    /// Reads the row of an event and maps it anew: the settings may have changed since.
    async fn find(&mut self, group: &Group, origin: EventRef) -> Result<Found> {
        for reader in &mut self.readers {
            let Some(statement) = reader.find_sql(&origin.event_id) else {
                continue;
            };
            let asking = self.sql.simple_query(&statement).map_err(altered_since);
            let messages = self.sql.answer(asking).await?;
            let row = messages.iter().find_map(|message| match message {
                SimpleQueryMessage::Row(row) => Some(row),
                _ => None,
            });
            let Some(row) = row else { continue };
            return match reader.event(row, origin.commit, origin.ordinal) {
                Ok(mut found) => {
                    found.event.origin = origin;
                    Ok(Found::Event(group.clone(), found))
                }
                Err(MapError::Event(error)) if error.fault.is_of_the_row() => {
                    let error = Error::from(MapError::Event(error));
                    Ok(Found::Lost(group.clone(), origin, error))
                }
                Err(error) => Err(error.into()),
            };
        }
        let what = format!("event {} is not in its table any more", origin.event_id);
        let gone = Error::new(Code::EventInvalid, what)
            .hint("discard it: `postrider quarantine discard ID --yes`");
        Ok(Found::Lost(group.clone(), origin, gone))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_has_died_is_told_and_not_waited_for() {
        let (asks, _) = mpsc::channel(1);
        let (outgoing, found) = mpsc::channel(1);
        let task = tokio::spawn(async move {
            let _held_until_it_dies = outgoing;
        });
        let mut releaser = Releaser { asks, found, task };
        assert!(matches!(releaser.found().await, Found::Died));
    }
}
