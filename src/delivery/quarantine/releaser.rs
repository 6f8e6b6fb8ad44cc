//! A task that reads released rows from `outbox.dispatch`, and marks rows as released or quarantined. The
//! task has its own connection, and answers one request at a time.
//!
//! The task looks up the rows of a page one by one, so it has only one row in memory, however large the rows are. It
//! searches the captured tables, then the former tables (`former_tables`). The session takes each event when it has
//! room. If a request fails, the task reports the error, and opens a new connection for the next request.
//!
//! Not here: what to request and when, and what happens to an event.

use std::sync::Arc;
use std::time::Duration;

use slot_manager::SlotName;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::former_tables::FormerTables;
use super::{PAGE, QuarantineQuery};
use crate::capture::table::{RowValues, TableEvent, TableReader};
use crate::capture::{claim, rows};
use crate::error::{Code, Error, Result};
use crate::event::{EventRef, Group};
use crate::mapping::{self, MapError, TableSettings};
use crate::postgres::{Sql, Target, connect_patiently};
use crate::store::dispatch::quarantined::{self, ReleasedKind, ReleasedRow};
use crate::store::privileges::{Purpose, name_missing};

/// Timeout of a statement. It is long, because marking a key with a million events takes a while.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(600);

/// Maximum number of groups that one poll returns. If there are more, the next poll continues with the
/// groups after these.
const GROUPS: usize = 256;

/// A request to the task.
#[derive(Debug)]
pub(crate) enum ReleaserRequest {
    /// Find the groups that have released rows, and the `blocked` keys that have no row left in
    /// quarantine. `durable` is the number of durable records when the session asks. If `count`, also
    /// count the events in quarantine.
    Poll {
        blocked: Vec<Group>,
        durable: u64,
        count: bool,
    },
    Do(QuarantineQuery),
}

/// An answer of the task.
#[derive(Debug)]
pub(crate) enum QuarantineAnswer {
    Polled {
        /// The groups with released rows. The flag says whether the first released event of the group is
        /// a replayed one.
        released: Vec<(Group, bool)>,
        vanished: Vec<Group>,
        durable: u64,
        count: Option<i64>,
    },
    /// The quarantined events of the group are now marked as released.
    Marked(Group),
    /// The task has marked nothing, because all released events of the group belong to a replay. No operator has
    /// released the quarantined events of the group.
    OnlyReplayed(Group),
    /// The task has marked the released rows of the group as quarantined, or as published if they were being
    /// replayed.
    SentBack(Group),
    /// The event of one row of the group's page.
    Event {
        group: Group,
        event: TableEvent,
        /// See [`InLane::is_new`](super::InLane::is_new).
        is_new: bool,
    },
    /// A row whose event cannot be published, and the reason.
    Lost(Group, EventRef, Error),
    PageEnded(Group, usize),
    Failed(Error),
    /// The task has died: no more answers will come.
    Died,
}

/// The running task. Dropping this value aborts the task.
#[derive(Debug)]
pub(crate) struct Releaser {
    asks: mpsc::Sender<ReleaserRequest>,
    found: mpsc::Receiver<QuarantineAnswer>,
    task: JoinHandle<()>,
}

impl Releaser {
    pub(crate) fn start(
        target: Target,
        slot: SlotName,
        tables: Vec<TableSettings>,
        project: Arc<str>,
    ) -> Self {
        let (asks, incoming) = mpsc::channel(1);
        let (outgoing, found) = mpsc::channel(1);
        let worker = Worker {
            target,
            slot,
            tables,
            project,
            session: None,
            read_to: None,
        };
        Self {
            asks,
            found,
            task: tokio::spawn(worker.run(incoming, outgoing)),
        }
    }

    /// Sends a request; [`found`](Self::found) returns the answer. Only one request may be outstanding.
    pub(crate) fn ask(&self, ask: ReleaserRequest) {
        let sent = self.asks.try_send(ask);
        debug_assert!(sent.is_ok(), "one question at a time");
    }

    /// Waits for the next answer; waits forever when no request is outstanding. Cancel-safe.
    pub(crate) async fn found(&mut self) -> QuarantineAnswer {
        self.found.recv().await.unwrap_or(QuarantineAnswer::Died)
    }
}

impl Drop for Releaser {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct ReleaserSession {
    sql: Sql,
    /// One reader per captured table; created when first needed.
    readers: Vec<TableReader>,
    former: FormerTables,
}

struct Worker {
    target: Target,
    slot: SlotName,
    tables: Vec<TableSettings>,
    project: Arc<str>,
    session: Option<ReleaserSession>,
    /// The last group of the last poll, if that poll returned [`GROUPS`] groups. The next poll continues
    /// after this group, because otherwise groups that cannot be published for now would hide later groups.
    read_to: Option<Group>,
}

impl Worker {
    async fn run(
        mut self,
        mut asks: mpsc::Receiver<ReleaserRequest>,
        found: mpsc::Sender<QuarantineAnswer>,
    ) {
        while let Some(ask) = asks.recv().await {
            let answer = match self.answer(ask, &found).await {
                Ok(answer) => answer,
                Err(error) => {
                    self.session = None;
                    let (target, tables) = (&self.target, &self.tables);
                    let error = name_missing(error, target, tables, Purpose::Relay).await;
                    QuarantineAnswer::Failed(error)
                }
            };
            if found.send(answer).await.is_err() {
                return;
            }
        }
    }

    async fn answer(
        &mut self,
        ask: ReleaserRequest,
        found: &mpsc::Sender<QuarantineAnswer>,
    ) -> Result<QuarantineAnswer> {
        let session = match &mut self.session {
            Some(session) => session,
            none => {
                let (slot, tables) = (self.slot.clone(), self.tables.clone());
                let former = FormerTables::new(slot, tables, self.project.clone());
                none.insert(ReleaserSession::open(&self.target, former).await?)
            }
        };
        let sql = &session.sql;
        match ask {
            ReleaserRequest::Poll {
                blocked,
                durable,
                count,
            } => {
                let after = self.read_to.take();
                let released =
                    quarantined::released_groups(sql, after.as_ref(), GROUPS as i64).await?;
                self.read_to = released.get(GROUPS - 1).map(|(group, _)| group.clone());
                Ok(QuarantineAnswer::Polled {
                    released,
                    vanished: if blocked.is_empty() {
                        Vec::new()
                    } else {
                        quarantined::vanished(sql, &blocked).await?
                    },
                    durable,
                    count: if count {
                        Some(quarantined::count(sql).await?)
                    } else {
                        None
                    },
                })
            }
            ReleaserRequest::Do(QuarantineQuery::Mark(group)) => {
                if quarantined::only_replayed(sql, &group).await? {
                    return Ok(QuarantineAnswer::OnlyReplayed(group));
                }
                quarantined::mark(sql, &group).await?;
                Ok(QuarantineAnswer::Marked(group))
            }
            ReleaserRequest::Do(QuarantineQuery::SendBack(group)) => {
                quarantined::send_back(sql, &group).await?;
                Ok(QuarantineAnswer::SentBack(group))
            }
            ReleaserRequest::Do(QuarantineQuery::Page(group, after)) => {
                let rows = quarantined::page(sql, &group, after, PAGE).await?;
                let count = rows.len();
                if count > 0 {
                    self.read(&group, rows, found).await?;
                }
                Ok(QuarantineAnswer::PageEnded(group, count))
            }
        }
    }

    /// Looks up the rows of a page, and sends their events to the session.
    async fn read(
        &mut self,
        group: &Group,
        rows: Vec<ReleasedRow>,
        found: &mpsc::Sender<QuarantineAnswer>,
    ) -> Result<()> {
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        let of = (&self.slot, &*self.tables, &self.project);
        if session.readers.is_empty() {
            session.make_readers(of).await?;
        }
        session.former.page_begins();
        let mut not_replayed = 0;
        for row in rows {
            let mut one = session.find(group, &row).await;
            if one
                .as_ref()
                .is_err_and(|error| error.code() == Code::SlotBusy)
            {
                // A table was altered or renamed after its reader was created.
                session.make_readers(of).await?;
                one = session.find(group, &row).await;
            }
            let one = match one {
                Err(error) if is_of_one_event(&error) => {
                    QuarantineAnswer::Lost(group.clone(), row.origin.clone(), error)
                }
                found => found?,
            };
            if let QuarantineAnswer::Lost(_, origin, error) = &one
                && let ReleasedKind::Replayed(replay) = &row.kind
            {
                if not_replayed == 0 {
                    tracing::warn!(
                        code = %error.code(), event = origin.event_id.shown(), replay,
                        "cannot replay an event: {error}"
                    );
                }
                not_replayed += 1;
                quarantined::leave_published(&session.sql, origin).await?;
            } else if found.send(one).await.is_err() {
                break;
            }
        }
        if not_replayed > 1 {
            tracing::warn!(events = not_replayed, "could not replay these events");
        }
        Ok(())
    }
}

/// Whether the error concerns only one event. If so, this event cannot be published, and the task continues with the
/// other events. Any other error fails the whole request.
///
/// Here `slot-busy` means that a statement failed with readers that were just made, so the tables have probably not
/// changed again, and the error is about this event.
fn is_of_one_event(error: &Error) -> bool {
    matches!(error.code(), Code::PostgresStatement | Code::SlotBusy)
}

impl ReleaserSession {
    async fn open(target: &Target, former: FormerTables) -> Result<Self> {
        let sql = connect_patiently(target, "postrider quarantine", STATEMENT_TIMEOUT).await?;
        // Make the planner use the index even if its statistics are wrong, because only few rows of a large
        // table are in quarantine. With `enable_seqscan = off`, statements on a table without an index on the
        // id get a very high cost estimate. PostgreSQL would therefore compile each of them just in time, which
        // takes half a second. So disable this compilation too.
        sql.batch_execute("SET enable_seqscan = off; SET jit = off")
            .await?;
        Ok(Self {
            sql,
            readers: Vec::new(),
            former,
        })
    }

    /// Makes the readers of the captured tables, and forgets those of former tables.
    async fn make_readers(
        &mut self,
        (slot, tables, project): (&SlotName, &[TableSettings], &Arc<str>),
    ) -> Result<()> {
        let known = claim::known(&self.sql, slot, tables).await?;
        self.readers.clear();
        for (table, captured) in tables.iter().zip(&known) {
            let reader = TableReader::resolve(&self.sql, table, project, captured).await?;
            self.readers.push(reader);
        }
        self.former = FormerTables::new(slot.clone(), tables.to_vec(), project.clone());
        Ok(())
    }

    /// Looks up the outbox row of an event and maps it again, because the settings may have changed.
    async fn find(&mut self, group: &Group, row: &ReleasedRow) -> Result<QuarantineAnswer> {
        let origin = row.origin.clone();
        let Some((reader, values)) = self.row(&origin).await? else {
            let gone = self.former.gone();
            return Ok(QuarantineAnswer::Lost(group.clone(), origin, gone));
        };
        match reader.event(&values, origin.position) {
            Ok(mut found) => {
                found.event.origin = origin;
                if let ReleasedKind::Replayed(replay) = &row.kind {
                    let message = found.event.message;
                    found.event.message = mapping::marked(message, &found.topic, replay);
                }
                Ok(QuarantineAnswer::Event {
                    group: group.clone(),
                    event: found,
                    is_new: row.kind == ReleasedKind::New,
                })
            }
            Err(MapError::Event(error)) if error.fault.is_of_the_row() => {
                let what = error.without_id();
                let error = Error::from(MapError::Event(error));
                let error = Error::new(error.code(), what).hint(error.hint_text());
                Ok(QuarantineAnswer::Lost(group.clone(), origin, error))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the row of an event, with the reader of its table.
    async fn row(&mut self, origin: &EventRef) -> Result<Option<(&mut TableReader, RowValues)>> {
        for reader in &mut self.readers {
            if let Some(values) = rows::find(&self.sql, reader, &origin.event_id).await? {
                return Ok(Some((reader, values)));
            }
        }
        self.former.row(&self.sql, origin).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_that_fails_for_one_event_does_not_hold_up_the_others() {
        let of = |code| is_of_one_event(&Error::new(code, "no"));
        assert!(of(Code::PostgresStatement) && of(Code::SlotBusy));
        for code in [
            Code::PostgresConnectionLost,
            Code::PostgresTimeout,
            Code::PrivilegeMissing,
        ] {
            assert!(!of(code), "{code}");
        }
    }

    #[tokio::test]
    async fn a_dead_task_is_reported_instead_of_awaited() {
        let (asks, _) = mpsc::channel(1);
        let (outgoing, found) = mpsc::channel(1);
        let task = tokio::spawn(async move {
            let _held_until_it_dies = outgoing;
        });
        let mut releaser = Releaser { asks, found, task };
        assert!(matches!(releaser.found().await, QuarantineAnswer::Died));
    }
}
