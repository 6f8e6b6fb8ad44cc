//! Keeps track of troubles: errors that last while the relay retries and its session continues.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::watch;

use super::Condition;
use crate::error::{Code, Error};

/// An error that lasts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// The code of the error.
    pub code: Code,
    /// What happened, on one line.
    pub what: String,
    /// What to do.
    pub hint: String,
    /// When the trouble began.
    pub since: Instant,
}

impl Trouble {
    /// Creates a trouble from an error that began at `since`.
    pub fn of(error: &Error, since: Instant) -> Self {
        Self {
            code: error.code(),
            what: error.to_string(),
            hint: error.hint_text().to_owned(),
            since,
        }
    }
}

/// An error that prevents the auditor from finding rows that the stream has left out, or a gap that the auditor has not
/// looked into yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditTrouble {
    /// The error.
    pub trouble: Trouble,
    /// Whether the stream may have left out rows. If so, these rows are not published until an audit
    /// succeeds.
    pub has_gap: bool,
}

/// A topic to which publishing fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailingTopic {
    /// Full name, `projects/<project>/topics/<name>`.
    pub topic: Arc<str>,
    /// The error of the first failed request. A later error replaces it only if the two have different codes. `since`
    /// always stays the time when the topic began to fail.
    pub trouble: Trouble,
    /// Failed requests since the topic began to fail.
    pub failures: u64,
    /// Events of the topic that the relay has read and that wait to be published.
    pub waiting_events: u64,
    /// Commit time of the oldest of these events, Unix microseconds, by PostgreSQL's clock.
    pub oldest_commit: Option<i64>,
    /// The ordering keys of the topic: at most 5, those with the oldest events, oldest first.
    pub keys: Vec<WaitingKey>,
}

/// An ordering key whose events wait for a failing topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingKey {
    /// The ordering key.
    pub ordering_key: Arc<str>,
    /// Events of the key that the relay has read and that wait for the topic.
    pub waiting_events: u64,
    /// Commit time of the oldest of these events, Unix microseconds, by PostgreSQL's clock.
    pub oldest_commit: i64,
}

/// The current troubles, shared between the session, which sets them, and the views that show them.
#[derive(Debug, Clone, Default)]
pub struct Troubles {
    board: Arc<Mutex<Board>>,
    unwritten: watch::Sender<Option<Condition>>,
}

#[derive(Debug, Default)]
struct Board {
    topics: Vec<FailingTopic>,
    recording: Option<Trouble>,
    publication: Option<Trouble>,
    stream: Option<Trouble>,
    auditing: Option<AuditTrouble>,
    opening: Option<Trouble>,
    /// The latest [`REMEMBERED`] troubles, in the order in which they were added.
    recent: VecDeque<Trouble>,
}

/// Number of recent troubles that are kept for the page for operators.
const REMEMBERED: usize = 50;

impl Board {
    fn remember(&mut self, trouble: Trouble) {
        if self.recent.len() == REMEMBERED {
            self.recent.pop_front();
        }
        self.recent.push_back(trouble);
    }
}

impl Troubles {
    fn lock(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The failing topics, sorted by name.
    pub fn topics(&self) -> Vec<FailingTopic> {
        self.lock().topics.clone()
    }

    /// Replaces the failing topics.
    pub fn set_topics(&self, topics: Vec<FailingTopic>) {
        self.lock().topics = topics;
    }

    /// The error that keeps outcomes from being recorded in `outbox.dispatch`, if there is one.
    pub fn recording(&self) -> Option<Trouble> {
        self.lock().recording.clone()
    }

    /// Notes that outcomes cannot be recorded, because of this error.
    pub fn cannot_record(&self, error: &Error) {
        let mut board = self.lock();
        let since = board.recording.as_ref().map(|trouble| trouble.since);
        let trouble = Trouble::of(error, since.unwrap_or_else(Instant::now));
        if since.is_none() {
            board.remember(trouble.clone());
        }
        board.recording = Some(trouble);
    }

    /// Notes that outcomes can be recorded again.
    pub fn can_record(&self) {
        self.lock().recording = None;
    }

    /// The fault of the publication, or the error that prevents the check of the publication. `None` if there is
    /// neither.
    pub fn publication(&self) -> Option<Trouble> {
        self.lock().publication.clone()
    }

    /// Sets the fault of the publication, or the error that prevents the check of the publication. `None` means
    /// that the publication is correct. The start time stays the same until the next `None`, even if the error
    /// changes.
    pub fn set_publication(&self, error: Option<&Error>) {
        let mut board = self.lock();
        let since = board.publication.as_ref().map(|trouble| trouble.since);
        let trouble = error.map(|error| Trouble::of(error, since.unwrap_or_else(Instant::now)));
        if let (None, Some(trouble)) = (since, &trouble) {
            board.remember(trouble.clone());
        }
        board.publication = trouble;
    }

    /// The reason why PostgreSQL sends nothing to the relay; `None` if PostgreSQL does not hold the stream back.
    pub fn stream(&self) -> Option<Trouble> {
        self.lock().stream.clone()
    }

    /// Sets the reason why PostgreSQL sends nothing to the relay, and the time when this began.
    pub fn set_stream(&self, reason: Option<(&Error, Instant)>) {
        let mut board = self.lock();
        let trouble = reason.map(|(error, since)| Trouble::of(error, since));
        if let (None, Some(trouble)) = (&board.stream, &trouble) {
            board.remember(trouble.clone());
        }
        board.stream = trouble;
    }

    /// The error of the failing audits, or a gap that no audit has looked into yet. `None` if there is neither.
    pub fn auditing(&self) -> Option<AuditTrouble> {
        self.lock().auditing.clone()
    }

    /// Notes that audits have failed since `since`. `has_gap` says whether the stream may have left out rows.
    pub fn cannot_audit(&self, error: &Error, since: Instant, has_gap: bool) {
        let mut board = self.lock();
        let trouble = Trouble::of(error, since);
        if board.auditing.is_none() {
            board.remember(trouble.clone());
        }
        board.auditing = Some(AuditTrouble { trouble, has_gap });
    }

    /// Notes that the stream may have left out rows, and that no audit has looked for these rows yet. The duration of
    /// this trouble counts from now.
    pub fn sees_gap(&self) {
        let what = "the publication or a captured table was altered, and the relay has not compared the tables \
                    with outbox.dispatch yet";
        let error = Error::new(Code::PublicationGap, what).hint(
            "the relay compares the tables once it has read the stream up to the end. If something holds up \
             delivery, remove that cause",
        );
        let trouble = Trouble::of(&error, Instant::now());
        let has_gap = true;
        self.lock().auditing = Some(AuditTrouble { trouble, has_gap });
    }

    /// Notes that an audit has succeeded, or that audits no longer fail.
    pub fn can_audit(&self) {
        self.lock().auditing = None;
    }

    /// The reason why the opening of the session has to wait; `None` if it does not wait.
    pub fn opening(&self) -> Option<Trouble> {
        self.lock().opening.clone()
    }

    /// Sets the reason why the opening of the session has to wait. The wait began at `since`.
    pub fn set_opening(&self, error: &Error, since: Instant) {
        let mut board = self.lock();
        let trouble = Trouble::of(error, since);
        if board.opening.is_none() {
            board.remember(trouble.clone());
        }
        board.opening = Some(trouble);
    }

    /// Notes that the opening of the session no longer waits.
    pub fn opening_continues(&self) {
        self.lock().opening = None;
    }

    /// Adds a trouble to the recent troubles.
    pub fn remember(&self, trouble: &Trouble) {
        self.lock().remember(trouble.clone());
    }

    /// The latest troubles, in the order in which they were added.
    pub fn recent(&self) -> Vec<Trouble> {
        self.lock().recent.iter().cloned().collect()
    }

    /// Asks the writer of dispatch rows to write this condition to `outbox.relay`. The supervisor asks while it has no
    /// SQL session of its own. `None` withdraws the request.
    pub(crate) fn leave_to_write(&self, condition: Option<Condition>) {
        self.unwritten.send_replace(condition);
    }

    /// Receives the conditions that the supervisor cannot write.
    pub(crate) fn unwritten(&self) -> watch::Receiver<Option<Condition>> {
        self.unwritten.subscribe()
    }

    /// Forgets the current troubles when the session ends. The recent troubles stay.
    pub fn forget(&self) {
        let mut board = self.lock();
        board.topics.clear();
        (board.recording, board.publication) = (None, None);
        (board.stream, board.auditing, board.opening) = (None, None, None);
        self.unwritten.send_replace(None);
    }
}
