//! Keeps track of troubles: errors that last, and that the relay retries while its session
//! continues.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::error::{Code, Error};

/// An error that lasts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// The code of the latest error.
    pub code: Code,
    /// What happened, on one line.
    pub what: String,
    /// What to do.
    pub hint: String,
    /// When the trouble began.
    pub since: Instant,
}

impl Trouble {
    /// Makes a trouble of an error that began at `since`.
    pub fn of(error: &Error, since: Instant) -> Self {
        Self {
            code: error.code(),
            what: error.to_string(),
            hint: error.hint_text().to_owned(),
            since,
        }
    }
}

/// A topic to which publishing fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailingTopic {
    /// Full name, `projects/<project>/topics/<name>`.
    pub topic: Arc<str>,
    /// The first error with the present code, and when the topic began to fail.
    pub trouble: Trouble,
    /// Failed requests since the topic began to fail.
    pub failures: u64,
    /// Events of the topic that the relay has read and that wait to be published.
    pub waiting_events: u64,
    /// Commit time of the oldest of these events, Unix microseconds, by PostgreSQL's clock.
    pub oldest_commit: Option<i64>,
}

/// The present troubles, shared between the session, which sets them, and everyone who shows them.
#[derive(Debug, Clone, Default)]
pub struct Troubles(Arc<Mutex<Board>>);

#[derive(Debug, Default)]
struct Board {
    topics: Vec<FailingTopic>,
    recording: Option<Trouble>,
    publication: Option<Trouble>,
    /// The latest troubles that have begun, oldest first.
    recent: VecDeque<Trouble>,
}

/// How many troubles are remembered.
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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The topics that fail, by name.
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

    /// The fault of the publication, if it has one.
    pub fn publication(&self) -> Option<Trouble> {
        self.lock().publication.clone()
    }

    /// Sets the fault of the publication. While there is a fault, its start time stays, even if the
    /// error changes.
    pub fn set_publication(&self, error: Option<&Error>) {
        let mut board = self.lock();
        let since = board.publication.as_ref().map(|trouble| trouble.since);
        let trouble = error.map(|error| Trouble::of(error, since.unwrap_or_else(Instant::now)));
        if let (None, Some(trouble)) = (since, &trouble) {
            board.remember(trouble.clone());
        }
        board.publication = trouble;
    }

    /// Adds a trouble to the recent troubles.
    pub fn remember(&self, trouble: &Trouble) {
        self.lock().remember(trouble.clone());
    }

    /// The latest troubles that have begun, oldest first.
    pub fn recent(&self) -> Vec<Trouble> {
        self.lock().recent.iter().cloned().collect()
    }

    /// Forgets the present troubles when the session ends. The recent troubles stay.
    pub fn forget(&self) {
        let mut board = self.lock();
        board.topics.clear();
        (board.recording, board.publication) = (None, None);
    }
}
