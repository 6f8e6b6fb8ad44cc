//! Outcomes of events: hands them to the writer of `outbox.dispatch`, and resolves the events once the
//! rows are durable.

use std::time::Duration;

use replication::CommitLsn;

use super::{Answer, Delivery, WRITER_LIMIT};
use crate::error::Result;
use crate::event::{EventRef, Standing};
use crate::store::dispatch::{Record, WriterEvent, Written};

impl Delivery {
    /// Whether events that get no row are resolved at once. Behind a released event they are resolved
    /// only when its row is durable: otherwise a crash in between would repeat the released event
    /// alone.
    pub(super) fn resolves_at_once(&self, events: &[EventRef]) -> bool {
        let is_released = |event: &EventRef| event.standing == Standing::Released;
        self.quarantine.is_settled() && !events.iter().any(is_released)
    }

    /// Gives outcomes to the writer.
    pub(super) fn record(&mut self, record: Record) {
        self.quarantine.handed(&record);
        self.budget.take_texts(record.text_bytes());
        self.writer.record(record);
    }

    pub(super) fn on_written(&mut self, event: WriterEvent) -> Result<()> {
        match event {
            WriterEvent::Recorded(Written {
                commits,
                events,
                text_bytes,
                records,
            }) => {
                self.budget.give_back_records(events);
                self.budget.give_back_texts(text_bytes);
                self.metrics.events_recorded.inc_by(events as u64);
                self.quarantine.durable(records);
                self.resolved.commits.extend(commits);
                if self.cannot_record {
                    self.cannot_record = false;
                    self.metrics.troubles.can_record();
                    tracing::info!("outcomes are recorded again");
                }
                Ok(())
            }
            WriterEvent::Retrying(error) => {
                self.cannot_record = true;
                self.metrics.troubles.cannot_record(&error);
                if let Some(since_last) = self.log.due(error.code()) {
                    tracing::warn!(
                        code = %error.code(), hint = error.hint_text(), since_last,
                        "cannot write outbox.dispatch, retrying: {error}"
                    );
                }
                Ok(())
            }
            WriterEvent::Failed(error) => Err(error),
        }
    }

    /// Waits for requests in flight, and records them; starts no new ones. Returns how many events of
    /// which transactions have their outcome now.
    pub(crate) async fn drain(mut self, limit: Duration) -> Vec<(CommitLsn, u64)> {
        let deadline = tokio::time::Instant::now() + limit;
        while let Ok(Some(answer)) =
            tokio::time::timeout_at(deadline, self.publishing.join_next()).await
        {
            // The next session publishes the events of a failed request again.
            if let Ok(Answer {
                request,
                result: Ok(ids),
            }) = answer
            {
                self.on_published(request, ids);
            }
        }
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        self.writer.finish(left.max(WRITER_LIMIT.min(limit))).await;
        let mut recorded = self.resolved.commits;
        while let Ok(event) = self.written.try_recv() {
            if let WriterEvent::Recorded(batch) = event {
                self.metrics.events_recorded.inc_by(batch.events as u64);
                recorded.extend(batch.commits);
            }
        }
        recorded
    }
}

/// With `dispatch = exceptions` only events that were in quarantine have a row.
pub(super) fn leave_without_rows(events: &mut [EventRef]) {
    for event in events {
        if event.standing == Standing::New {
            event.standing = Standing::Repeated;
        }
    }
}
