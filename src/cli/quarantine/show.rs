//! `postrider quarantine show`: shows the record of one event.

use std::process::ExitCode;

use printable::{printable, start_of};
use serde::Serialize;

use super::{seconds, select, session};
use crate::cli::{figures, output};
use crate::error::Result;
use crate::event::SHOWN_CHARS;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::dispatch::quarantine_commands::{self, EventRow};

/// The arguments of `postrider quarantine show`.
#[derive(Debug, clap::Args)]
pub(super) struct QuarantineShowArgs {
    /// The event: its uuid, or `schema.table:id` where ids are not uuids
    #[arg(value_name = "ID")]
    id: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Shown {
    /// The event's uuid, or `schema.table:id` if the ids of its table are not uuids.
    event_id: String,
    /// The event's uuid, which its message has in the attribute `event_id`.
    uuid: String,
    state: String,
    error: Option<String>,
    topic: Option<String>,
    ordering_key: Option<String>,
    attempts: i32,
    commit_lsn: String,
    ordinal: i32,
    committed_seconds_ago: u64,
    dispatched_seconds_ago: u64,
    message_id: Option<String>,
    /// Numbers of events of the same key that are in quarantine before and behind this event.
    earlier_in_quarantine: u64,
    later_in_quarantine: u64,
}

pub(super) async fn run(settings: &Settings, args: &QuarantineShowArgs) -> Result<ExitCode> {
    let sql = session(settings).await?;
    // If the event is in quarantine, show its first row, otherwise its latest row.
    let mut rows = select::rows_of(&sql, &args.id).await?;
    let event = if rows[0].is_in_quarantine() {
        rows.swap_remove(0)
    } else {
        rows.swap_remove(rows.len() - 1)
    };
    let shown = shown(&sql, event).await?;
    if args.json {
        output::write_json(&shown)
    } else {
        output::write(&text(&shown))
    }
    Ok(ExitCode::SUCCESS)
}

async fn shown(sql: &Sql, event: EventRow) -> Result<Shown> {
    let (earlier, later) = quarantine_commands::neighbours(sql, &event).await?;
    let record = quarantine_commands::record(sql, &event).await?;
    let (commit, ordinal) = event.place;
    Ok(Shown {
        event_id: event.source_id.unwrap_or_else(|| event.uuid.to_string()),
        uuid: event.uuid.to_string(),
        state: event.state,
        error: record.error,
        topic: record.topic,
        ordering_key: record.ordering_key,
        attempts: record.attempts,
        commit_lsn: commit.to_string(),
        ordinal,
        committed_seconds_ago: seconds(record.committed_seconds_ago),
        dispatched_seconds_ago: seconds(record.dispatched_seconds_ago),
        message_id: record.message_id,
        earlier_in_quarantine: earlier,
        later_in_quarantine: later,
    })
}

fn text(shown: &Shown) -> String {
    let none = || "none".to_owned();
    let line = |text: &str| printable(text).into_owned();
    let ago = |seconds| {
        let time = figures::time(std::time::Duration::from_secs(seconds));
        format!("{time} ago")
    };
    let mut lines = vec![
        ("event", line(&start_of(&shown.event_id, SHOWN_CHARS))),
        ("uuid", shown.uuid.clone()),
        ("state", shown.state.clone()),
        ("error", shown.error.as_deref().map_or(none(), line)),
        ("topic", shown.topic.as_deref().map_or(none(), line)),
        ("key", shown.ordering_key.as_deref().map_or(none(), line)),
        ("attempts", shown.attempts.to_string()),
        (
            "commit",
            format!("{}, ordinal {}", shown.commit_lsn, shown.ordinal),
        ),
        ("committed", ago(shown.committed_seconds_ago)),
        ("recorded", ago(shown.dispatched_seconds_ago)),
    ];
    if let Some(message_id) = &shown.message_id {
        lines.push(("message", line(message_id)));
    }
    if ["quarantined", "released"].contains(&shown.state.as_str()) {
        let (before, behind) = (shown.earlier_in_quarantine, shown.later_in_quarantine);
        lines.push((
            "its key",
            format!(
                "{} before it in quarantine, {} behind it",
                figures::count(before, "event"),
                figures::count(behind, "event")
            ),
        ));
    }
    let named = |(name, value)| format!("{name:<10} {value}\n");
    lines.into_iter().map(named).collect()
}
