//! Creates missing topics in background tasks, if `create_topics` allows it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use publisher::TopicAdmin;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::error::{Code, Error};
use crate::throttled_log::ThrottledLog;

/// Maximum time for creating one topic.
const LIMIT: Duration = Duration::from_secs(30);

/// Pause before the relay may try again to create a topic. Causes of failures, such as a missing grant, often last.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(10);

pub(crate) struct TopicMaker {
    /// The client that creates topics; `None` when the relay must not create topics.
    topics: Option<TopicAdmin>,
    under_way: HashSet<Arc<str>>,
    tasks: JoinSet<()>,
    log: Arc<Mutex<ThrottledLog>>,
    ready: mpsc::UnboundedSender<(Arc<str>, bool)>,
    made: mpsc::UnboundedReceiver<(Arc<str>, bool)>,
}

impl TopicMaker {
    pub(crate) fn new(topics: Option<TopicAdmin>) -> Self {
        let (ready, made) = mpsc::unbounded_channel();
        Self {
            topics,
            under_way: HashSet::new(),
            tasks: JoinSet::new(),
            log: Arc::default(),
            ready,
            made,
        }
    }

    /// Whether creating a topic can fix this error.
    pub(crate) fn can_help(&self, code: Code) -> bool {
        code == Code::TopicMissing && self.topics.is_some()
    }

    /// Starts to create `topic`, unless its creation is already under way.
    pub(crate) fn make(&mut self, topic: Arc<str>) {
        let Some(topics) = self.topics.clone() else {
            return;
        };
        if !self.under_way.insert(topic.clone()) {
            return;
        }
        let (log, ready) = (self.log.clone(), self.ready.clone());
        self.tasks.spawn(async move {
            let created = tokio::time::timeout(LIMIT, topics.create(&topic)).await;
            let made = matches!(created, Ok(Ok(())));
            match created {
                Ok(Err(failure)) => log_failure(&log, &Error::pubsub(&failure, &topic)),
                Err(_) => {
                    let what = format!("creating topic {topic} took longer than {LIMIT:?}");
                    log_failure(&log, &Error::new(Code::PubsubUnreachable, what));
                }
                Ok(Ok(())) => {}
            }
            if !made {
                tokio::time::sleep(PAUSE_AFTER_FAILURE).await;
            }
            // Sending cannot fail, because the receiver lives as long as this struct, and dropping the struct
            // aborts the task.
            let _ = ready.send((topic, made));
        });
    }

    /// Waits until a topic has been created, and returns its name. Waits forever if no topic is being created.
    /// Cancel-safe.
    pub(crate) async fn made(&mut self) -> Arc<str> {
        loop {
            match self.made.recv().await {
                Some((topic, made)) => {
                    while self.tasks.try_join_next().is_some() {}
                    self.under_way.remove(&topic);
                    if made {
                        return topic;
                    }
                }
                None => std::future::pending().await,
            }
        }
    }
}

fn log_failure(log: &Mutex<ThrottledLog>, error: &Error) {
    let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(since_last) = log.due(error.code()) {
        tracing::error!(code = %error.code(), hint = error.hint_text(), since_last, "{error}");
    }
}
