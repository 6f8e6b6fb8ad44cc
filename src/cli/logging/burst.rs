//! Limits how many lines one log statement of the code can write, so that no fault can flood the log. Code that logs
//! often has a stricter limit of its own (`throttled_log`). The limit here also covers all other statements, such as
//! the one that logs each released key.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Maximum number of lines that one log statement writes in [`INTERVAL`].
const MAX_LINES: u64 = 100;
const INTERVAL: Duration = Duration::from_secs(10);

/// A layer that limits each log statement of the code to [`MAX_LINES`] lines in [`INTERVAL`]. Drops further lines of
/// the statement, and later logs their number. Does not limit lines of the levels `debug` and `trace`.
#[derive(Debug, Default)]
pub(super) struct BurstLimit(Mutex<HashMap<Identifier, Burst>>);

/// The lines of one log statement, counted from `began` for [`INTERVAL`].
#[derive(Debug)]
struct Burst {
    level: Level,
    began: Instant,
    lines: u64,
    /// The first line that was dropped.
    dropped: String,
}

/// Lines that were dropped.
#[derive(Debug, PartialEq, Eq)]
struct DroppedLines {
    level: Level,
    lines: u64,
    first: String,
}

impl<S: Subscriber> Layer<S> for BurstLimit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        if *event.metadata().level() > Level::INFO {
            return true;
        }
        let now = Instant::now();
        for dropped in self.ended(now) {
            dropped.tell();
        }
        self.admits(event, now)
    }
}

impl DroppedLines {
    /// Logs how many lines were dropped. The new line has the level of the dropped lines, so a log filter that hides
    /// the dropped lines hides the new line too.
    fn tell(self) {
        let Self {
            level,
            lines,
            first,
        } = self;
        if level == Level::ERROR {
            tracing::error!(lines, like = first, "left out similar log lines");
        } else if level == Level::WARN {
            tracing::warn!(lines, like = first, "left out similar log lines");
        } else {
            tracing::info!(lines, like = first, "left out similar log lines");
        }
    }
}

impl BurstLimit {
    /// Removes the bursts that have ended. Returns the dropped lines of each burst that had too many lines.
    fn ended(&self, now: Instant) -> Vec<DroppedLines> {
        let mut bursts = self.bursts();
        let ended = bursts
            .extract_if(|_, burst| now.saturating_duration_since(burst.began) >= INTERVAL)
            .filter(|(_, burst)| burst.lines > MAX_LINES);
        ended
            .map(|(_, burst)| DroppedLines {
                level: burst.level,
                lines: burst.lines - MAX_LINES,
                first: burst.dropped,
            })
            .collect()
    }

    fn admits(&self, event: &Event<'_>, now: Instant) -> bool {
        let lines = self.count(event, now);
        if lines == MAX_LINES + 1 {
            // Format the message without holding the lock, so that threads that log do not wait for it.
            let mut message = MessageText(String::new());
            event.record(&mut message);
            if let Some(burst) = self.bursts().get_mut(&event.metadata().callsite()) {
                burst.dropped = message.0;
            }
        }
        lines <= MAX_LINES
    }

    /// Counts this line. Returns the number of lines in the burst of its log statement, including this line.
    fn count(&self, event: &Event<'_>, now: Instant) -> u64 {
        let mut bursts = self.bursts();
        let burst = bursts
            .entry(event.metadata().callsite())
            .or_insert_with(|| Burst {
                level: *event.metadata().level(),
                began: now,
                lines: 0,
                dropped: String::new(),
            });
        burst.lines += 1;
        burst.lines
    }

    fn bursts(&self) -> MutexGuard<'_, HashMap<Identifier, Burst>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the message out of a log event.
struct MessageText(String);

impl Visit for MessageText {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tracing_subscriber::layer::SubscriberExt;

    use super::super::tests::Lines;
    use super::*;

    #[test]
    fn a_log_statement_writes_at_most_100_lines_and_holds_up_no_other_statement() {
        let written = Lines::default();
        let writer = written.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(Level::DEBUG)
            .with_writer(move || writer.clone())
            .finish()
            .with(BurstLimit::default());
        tracing::subscriber::with_default(subscriber, || {
            for n in 0..150 {
                tracing::info!(n, "this key is released");
                tracing::debug!(n, "a detail");
            }
            tracing::warn!("another line");
        });
        let written = written.text();
        let count = |text: &str| written.matches(text).count();
        assert_eq!(count("this key is released"), 100, "{written}");
        assert_eq!(count("a detail"), 150, "{written}");
        assert_eq!(count("another line"), 1, "{written}");
    }

    #[test]
    fn the_number_of_dropped_lines_is_told_when_the_interval_is_over() {
        let limit = Arc::new(BurstLimit::default());
        let began = Instant::now();
        let subscriber = tracing_subscriber::registry().with(Admitting(limit.clone(), began));
        tracing::subscriber::with_default(subscriber, || {
            for n in 0..130 {
                tracing::info!("key {n} is released");
            }
        });
        let early = began + INTERVAL - Duration::from_millis(1);
        assert_eq!(limit.ended(early), []);
        let dropped = DroppedLines {
            level: Level::INFO,
            lines: 30,
            first: "key 100 is released".to_owned(),
        };
        assert_eq!(limit.ended(began + INTERVAL), [dropped]);
        assert_eq!(limit.ended(began + INTERVAL), []);
    }

    /// Passes each event to the limit, at a fixed time.
    struct Admitting(Arc<BurstLimit>, Instant);

    impl<S: Subscriber> Layer<S> for Admitting {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            self.0.admits(event, self.1);
        }
    }
}
