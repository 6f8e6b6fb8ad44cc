//! `postrider tail`: shows events as they are published.

use std::process::ExitCode;
use std::time::Duration;

use super::{block_on, output};
use crate::error::Result;
use crate::ops::event::EventState;
use crate::ops::since::Since;
use crate::ops::tail::{Tail, TailQuery, TailedEvent, TailedMessage, WINDOW};
use crate::postgres::PatientSql;
use crate::printable::{printable, start_of};
use crate::settings::{Dispatch, Settings};

/// Limit of a statement. Only the search for `--since` comes near it.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(15);

/// Between two looks at outbox.dispatch.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// Characters of a topic and of a key: a line fits into 80.
const TOPIC_CHARS: usize = 16;
const KEY_CHARS: usize = 12;

/// The arguments of `postrider tail`.
#[derive(Debug, clap::Args)]
pub(super) struct TailArgs {
    /// Only of this ordering key
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Only of this topic
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// Begin with events committed since: a duration such as 10min, or a time such as
    /// 2026-11-27T08:30:00Z
    #[arg(long, value_name = "TIME")]
    since: Option<Since>,
    /// Also show attributes and data, built again from the row with the present settings
    #[arg(long)]
    message: bool,
    /// End after this many events
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

pub(super) fn run(settings: &Settings, args: &TailArgs) -> Result<ExitCode> {
    block_on(async {
        let target = settings.database()?;
        let sql = PatientSql::open(target, "postrider tail", STATEMENT_TIMEOUT).await?;
        let query = TailQuery {
            key: args.key.as_deref(),
            topic: args.topic.as_deref(),
            since: args.since.as_ref(),
            messages: args.message,
        };
        if settings.dispatch == Dispatch::Exceptions {
            eprintln!(
                "note: with dispatch = exceptions published events have no record, so only events \
                 that were set aside appear"
            );
        }
        let mut tail = Tail::begin(&sql, settings, &query).await?;
        if !args.json {
            output::write(&line("RECORDED", "TOPIC", "KEY", "EVENT"));
        }
        let mut left = args.limit.unwrap_or(u64::MAX);
        loop {
            for event in tail.next().await? {
                show(&event, args.json);
                left -= 1;
                if left == 0 {
                    return Ok(ExitCode::SUCCESS);
                }
            }
            if std::mem::take(&mut tail.has_gap) {
                eprintln!(
                    "note: more than {WINDOW} records appeared at once; the oldest are not shown"
                );
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    })
}

fn show(tailed: &TailedEvent, is_json: bool) {
    if is_json {
        output::write_json_line(tailed);
    } else {
        output::write(&text(tailed));
    }
}

fn text(tailed: &TailedEvent) -> String {
    let event = &tailed.event;
    let record = event.record.as_ref();
    // `2026-11-27T08:30:00.123Z`: only the time.
    let recorded = record.and_then(|record| record.recorded_at.get(11..23));
    let topic = event.topic.as_deref().unwrap_or("-");
    let topic = topic.rsplit('/').next().unwrap_or(topic);
    let key = event.ordering_key.as_deref().filter(|key| !key.is_empty());
    let name = event.source_id.as_deref().unwrap_or(&event.event_id);
    let mut text = line(
        recorded.unwrap_or("-"),
        topic,
        key.unwrap_or("-"),
        &start_of(&printable(name), 60),
    );
    if event.state != EventState::Published {
        text += &format!("    {}\n", printable(&event.meaning));
    }
    match &tailed.message {
        None => {}
        Some(None) => text += "    (no message: its row is gone, or cannot become one)\n",
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
