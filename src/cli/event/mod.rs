//! `postrider event`: shows the outcome of one event, or lists the newest events.
//!
//! `ops::event` finds the events and their states; `screen` formats the text.

mod screen;

use std::process::ExitCode;

use super::report::refuse;
use super::{block_on, output};
use crate::error::Result;
use crate::ops::LOCK_TIMEOUT;
use crate::ops::event::EventQuery;
use crate::ops::event::find::{self, STATEMENT_TIMEOUT};
use crate::ops::event::list;
use crate::ops::since::Since;
use crate::postgres::{Sql, connect_patiently, limiting_lock_waits};
use crate::settings::Settings;

/// Exit code when nothing is found.
const NOTHING: u8 = 1;

/// The arguments of `postrider event`.
#[derive(Debug, clap::Args)]
pub(super) struct EventArgs {
    /// The event: the id in its table, its uuid (attribute `event_id`), or `schema.table:id`
    #[arg(value_name = "ID", conflicts_with_all = ["key", "topic", "since", "limit"],
          value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: Option<String>,
    /// List the newest events of this ordering key
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// List only events of this topic
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// List events committed since this time: a duration such as 10min, or a time such as 2026-11-27T08:30:00Z
    #[arg(long, value_name = "TIME")]
    since: Option<Since>,
    /// Maximum number of events in the list, newest first [default: 20]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    limit: Option<u32>,
    /// Print JSON: {events: [...]}
    #[arg(long)]
    json: bool,
}

pub(super) fn run(settings: &Settings, args: &EventArgs) -> Result<ExitCode> {
    if args.id.is_none() && args.key.is_none() && args.since.is_none() {
        refuse("choose the events: give the ID of one event, or list events with --key or --since");
    }
    block_on(async {
        let target = settings.database()?;
        let sql = connect_patiently(target, "postrider event", STATEMENT_TIMEOUT).await?;
        let searching = async {
            match &args.id {
                Some(id) => one(&sql, settings, args, id).await,
                None => several(&sql, settings, args).await,
            }
        };
        limiting_lock_waits(&sql, LOCK_TIMEOUT, searching).await
    })
}

async fn one(sql: &Sql, settings: &Settings, args: &EventArgs, id: &str) -> Result<ExitCode> {
    let events = find::find(sql, settings, id).await?;
    let is_found = !events.is_empty();
    if args.json {
        output::write_json(&serde_json::json!({ "events": events }));
    } else if is_found {
        output::write_wrapped(&screen::details(&events));
    } else {
        output::write_wrapped(&screen::not_found(id));
    }
    Ok(exit(is_found))
}

async fn several(sql: &Sql, settings: &Settings, args: &EventArgs) -> Result<ExitCode> {
    let query = EventQuery {
        key: args.key.as_deref(),
        topic: args.topic.as_deref(),
        since: args.since.as_ref(),
    };
    let limit = args.limit.unwrap_or(20) as usize;
    let listing = list::list(sql, settings, &query, limit).await?;
    if args.json {
        output::write_json(&listing);
    } else {
        output::write_wrapped(&screen::list(&listing));
    }
    Ok(exit(!listing.events.is_empty()))
}

fn exit(is_found: bool) -> ExitCode {
    if is_found {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(NOTHING)
    }
}
