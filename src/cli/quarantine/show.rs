//! `postrider quarantine show`: shows the record of one event.

use std::process::ExitCode;

use printable::{printable, start_of};

use super::session;
use crate::cli::{figures, output};
use crate::error::Result;
use crate::event::SHOWN_CHARS;
use crate::ops::quarantine;
use crate::ops::quarantine::show::ShownEvent;
use crate::settings::Settings;

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

pub(super) async fn run(settings: &Settings, args: &QuarantineShowArgs) -> Result<ExitCode> {
    let sql = session(settings).await?;
    let shown = quarantine::show::show(&sql, settings, &args.id).await?;
    if args.json {
        output::write_json(&shown)
    } else {
        output::write_wrapped(&text(&shown))
    }
    Ok(ExitCode::SUCCESS)
}

fn text(shown: &ShownEvent) -> String {
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
        ("position", shown.position.to_string()),
        ("committed", ago(shown.committed_seconds_ago)),
        ("recorded", ago(shown.dispatched_seconds_ago)),
    ];
    lines.extend(figures::requests(shown.attempts, &shown.state));
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
