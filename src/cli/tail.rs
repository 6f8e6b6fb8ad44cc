//! `postrider tail`: shows events as they are published.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::Duration;

use printable::{printable, start_of};
use serde::Serialize;

use super::{block_on, output, report};
use crate::error::{Code, Disposition, Error, Result};
use crate::ops::event::find::of_record_alone;
use crate::ops::event::{EventQuery, EventReport, EventState};
use crate::ops::since::Since;
use crate::ops::tail::{MessageReader, RecordedRow, Tail, TailedMessage};
use crate::postgres::{Sql, connect_patiently};
use crate::settings::Settings;

/// Statement timeout. It is long, because `--since` with `--key` or `--topic` may scan much of the
/// table.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Poll interval for outbox.dispatch.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Pause between two attempts to reconnect.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of characters of a topic, so that a line with a uuid fits into 80 columns.
const TOPIC_CHARS: usize = 14;
/// Maximum number of characters of a key, for the same reason as [`TOPIC_CHARS`].
const KEY_CHARS: usize = 12;

/// Maximum number of characters of an event's name.
const NAME_CHARS: usize = 60;

/// The arguments of `postrider tail`.
#[derive(Debug, clap::Args)]
pub(super) struct TailArgs {
    /// Show only events with this ordering key
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Show only events of this topic
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// Also show events committed since TIME: a duration such as 10min, or a time such as
    /// 2026-11-27T08:30:00Z
    #[arg(long, value_name = "TIME")]
    since: Option<Since>,
    /// Also show attributes and data, rebuilt from the row with the current settings
    #[arg(long)]
    message: bool,
    /// End after this many events
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// An event with its message. Programs depend on the JSON form.
#[derive(Debug, Serialize)]
struct TailedEvent {
    #[serde(flatten)]
    event: EventReport,
    /// Absent without `--message`; null if the row is gone or cannot become a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Option<TailedMessage>>,
}

pub(super) fn run(settings: &Settings, args: &TailArgs) -> Result<ExitCode> {
    let query = EventQuery {
        key: args.key.as_deref(),
        topic: args.topic.as_deref(),
        since: args.since.as_ref(),
    };
    block_on(follow(settings, args, &query))
}

/// Shows events until the limit is reached. Reconnects after a lost connection, and continues with
/// the next event.
async fn follow(settings: &Settings, args: &TailArgs, query: &EventQuery<'_>) -> Result<ExitCode> {
    let mut session = TailSession::open(settings, args).await?;
    let mut tail = Tail::begin(&session.sql, settings, query).await?;
    if !args.json {
        output::write_wrapped(&line("RECORDED UTC", "TOPIC", "KEY", "EVENT"));
    }
    let mut left = args.limit.unwrap_or(u64::MAX);
    // Records that were read but not shown yet.
    let mut waiting = VecDeque::new();
    loop {
        let next = session.next(&mut tail, &mut waiting).await;
        for note in tail.take_notes() {
            report::write(&format!("note: {note}"));
        }
        let is_quiet = match next {
            Ok(Some(event)) => {
                show(&event, args.json);
                left -= 1;
                if left == 0 {
                    return Ok(ExitCode::SUCCESS);
                }
                false
            }
            Ok(None) => true,
            Err(error) if is_of_the_connection(&error) => {
                report::write(&format!("note: {error}; reconnecting ({})", error.code()));
                session = TailSession::open_again(settings, args).await?;
                continue;
            }
            Err(error) => return Err(error),
        };
        if is_quiet || waiting.is_empty() && args.since.is_none() {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// Whether a new connection may fix the error.
fn is_of_the_connection(error: &Error) -> bool {
    // After a statement timeout, the same statement would only time out again.
    error.code().disposition() == Disposition::Retry && error.code() != Code::PostgresTimeout
}

/// A connection, and the reader of messages that was opened with it.
struct TailSession {
    sql: Sql,
    messages: Option<MessageReader>,
}

impl TailSession {
    async fn open(settings: &Settings, args: &TailArgs) -> Result<Self> {
        let target = settings.database()?;
        let sql = connect_patiently(target, "postrider tail", STATEMENT_TIMEOUT).await?;
        let messages = if args.message {
            Some(MessageReader::open(&sql, settings).await?)
        } else {
            None
        };
        Ok(Self { sql, messages })
    }

    /// Reconnects. Retries until it succeeds, or until an error occurs that a new connection cannot fix.
    async fn open_again(settings: &Settings, args: &TailArgs) -> Result<Self> {
        loop {
            // Sleep before the first attempt too. Otherwise, if each connection succeeds but its first
            // statement fails, the command would reconnect without a pause.
            tokio::time::sleep(RECONNECT_INTERVAL).await;
            match Self::open(settings, args).await {
                Err(error) if is_of_the_connection(&error) => {}
                opened => return opened,
            }
        }
    }

    /// Returns the next event; `None` if no event has appeared. After an error, the event stays in
    /// `waiting` for the next call.
    async fn next(
        &mut self,
        tail: &mut Tail<'_>,
        waiting: &mut VecDeque<RecordedRow>,
    ) -> Result<Option<TailedEvent>> {
        if waiting.is_empty() {
            waiting.extend(tail.next(&self.sql).await?);
        }
        let Some(row) = waiting.front() else {
            return Ok(None);
        };
        let message = match &mut self.messages {
            Some(messages) => Some(messages.message(&self.sql, row).await?),
            None => None,
        };
        let event = waiting.pop_front().map(of_record_alone);
        Ok(event.map(|event| TailedEvent { event, message }))
    }
}

fn show(tailed: &TailedEvent, is_json: bool) {
    if is_json {
        output::write_json_line(tailed);
    } else {
        output::write_wrapped(&text(tailed));
    }
}

fn text(tailed: &TailedEvent) -> String {
    let event = &tailed.event;
    let record = event.record.as_ref();
    // Show only the time of `2026-11-27T08:30:00.123Z`.
    let recorded = record.and_then(|record| record.recorded_at.get(11..23));
    let topic = event.topic.as_deref().unwrap_or("-");
    let topic = topic.rsplit('/').next().unwrap_or(topic);
    let key = event.ordering_key.as_deref().filter(|key| !key.is_empty());
    let name = event.source_id.as_deref().unwrap_or(&event.event_id);
    let mut text = line(
        recorded.unwrap_or("-"),
        topic,
        key.unwrap_or("-"),
        &start_of(&printable(name), NAME_CHARS),
    );
    if event.state != EventState::Published {
        text += &format!("    {}\n", printable(&event.meaning));
    }
    match &tailed.message {
        None => {}
        Some(None) => text += "    (no message: the row was deleted, or cannot be mapped)\n",
        Some(Some(message)) => text += &of_message(message),
    }
    text
}

fn of_message(message: &TailedMessage) -> String {
    let attributes = message.attributes.iter();
    let mut text: String = attributes
        .map(|(name, value)| format!("    {}: {}\n", printable(name), printable(value)))
        .collect();
    match (&message.data, &message.data_base64) {
        (Some(data), _) => text += &format!("    {}\n", printable(data)),
        (None, Some(data)) => text += &format!("    (base64) {data}\n"),
        (None, None) => {}
    }
    text
}

fn line(recorded: &str, topic: &str, key: &str, name: &str) -> String {
    let topic = start_of(&printable(topic), TOPIC_CHARS);
    let key = start_of(&printable(key), KEY_CHARS);
    format!("{recorded:<12}  {topic:<TOPIC_CHARS$}  {key:<KEY_CHARS$}  {name}\n")
}
