//! `postrider quarantine release` and `postrider quarantine discard`. Discarding requires `--yes`; without
//! it, the command only says how many events it would discard.

use std::process::ExitCode;

use printable::printable;

use super::session;
use crate::cli::report::refuse;
use crate::cli::{figures, output};
use crate::error::{Code, Error, Result};
use crate::ops::quarantine::change::{self, DiscardRequest, WholeKeyReason};
use crate::ops::quarantine::select::QuarantineSelection;
use crate::settings::Settings;

/// The arguments that select events.
#[derive(Debug, clap::Args)]
pub(super) struct SelectedEventsArgs {
    /// The event: its uuid, or `schema.table:id` where ids are not uuids
    #[arg(value_name = "ID", conflicts_with_all = ["key", "topic", "all"])]
    id: Option<String>,
    /// All events of this ordering key
    #[arg(long, value_name = "KEY", conflicts_with = "all")]
    key: Option<String>,
    /// Only of this topic
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// All events in quarantine
    #[arg(long)]
    all: bool,
}

/// The arguments of `postrider quarantine release`.
#[derive(Debug, clap::Args)]
pub(super) struct ReleaseArgs {
    #[command(flatten)]
    which: SelectedEventsArgs,
    /// Print JSON: {released, whole_key}
    #[arg(long)]
    json: bool,
}

/// The arguments of `postrider quarantine discard`.
#[derive(Debug, clap::Args)]
pub(super) struct DiscardArgs {
    #[command(flatten)]
    which: SelectedEventsArgs,
    /// Do it; without this, only show how many events would be discarded
    #[arg(long)]
    yes: bool,
    /// Print JSON: {discarded}
    #[arg(long)]
    json: bool,
}

impl SelectedEventsArgs {
    /// Ends the command with a usage error if no events are chosen.
    fn require_a_choice(&self) {
        if self.id.is_none() && self.key.is_none() && !self.all {
            let what = "choose the events: give the ID of one event (`postrider quarantine list` shows the \
                        ids), `--key KEY` for all events of a key, or `--all`; `--topic TOPIC` limits the \
                        last two";
            refuse(what)
        }
    }

    fn selection(&self) -> QuarantineSelection<'_> {
        QuarantineSelection {
            key: self.key.as_deref(),
            topic: self.topic.as_deref(),
        }
    }
}

pub(super) async fn release(settings: &Settings, args: &ReleaseArgs) -> Result<ExitCode> {
    args.which.require_a_choice();
    let sql = session(settings).await?;
    let (released, why_whole) = match &args.which.id {
        Some(id) => {
            let released = change::release_event(&sql, settings, id).await?;
            (released.events, released.whole_key)
        }
        None => (change::release(&sql, args.which.selection()).await?, None),
    };
    if args.json {
        output::write_json(
            &serde_json::json!({ "released": released, "whole_key": why_whole.is_some() }),
        );
        return Ok(ExitCode::SUCCESS);
    }
    let why = why_whole.map(|why| format!(" {}", reason(&why)));
    let why = why.unwrap_or_default();
    output::write_wrapped(&format!(
        "Released {}.{why} A running relay publishes within seconds; a stopped one does so at its \
         next start.\n",
        figures::count(released, "event"),
    ));
    Ok(ExitCode::SUCCESS)
}

fn reason(why: &WholeKeyReason) -> String {
    match why {
        WholeKeyReason::IsFirst { key, behind } => format!(
            "It is the first of key {}: the {} behind it {} released too, in order.",
            printable(key),
            figures::count(*behind, "event"),
            if *behind == 1 { "is" } else { "are" },
        ),
        WholeKeyReason::IsBehind { key, before } => format!(
            "To keep the order, the whole key {} was released: {} in quarantine before it.",
            printable(key),
            match before {
                1 => "1 event is".to_owned(),
                n => format!("{n} events are"),
            },
        ),
    }
}

pub(super) async fn discard(settings: &Settings, args: &DiscardArgs) -> Result<ExitCode> {
    args.which.require_a_choice();
    let sql = session(settings).await?;
    let which = &args.which;
    let request = match &which.id {
        Some(id) => DiscardRequest::event(&sql, settings, id).await?,
        None => DiscardRequest::Selection(which.selection()),
    };
    if !args.yes {
        let what = format!(
            "discarding {} needs --yes; nothing was done",
            figures::count(request.count(&sql).await?, "event")
        );
        return Err(Error::new(Code::ConfirmationMissing, what).hint(
            "add --yes if they never need to be published; their outbox rows stay unchanged",
        ));
    }
    let discarded = request.carry_out(&sql).await?;
    let left = change::count_left(&sql).await?;
    if args.json {
        output::write_json(&serde_json::json!({ "discarded": discarded }))
    } else {
        output::write_wrapped(&format!(
            "Discarded {}: never published; outbox.dispatch keeps the reason.{}\n",
            figures::count(discarded, "event"),
            match left {
                0 => String::new(),
                _ => format!(
                    " {} in quarantine: `postrider quarantine list`.",
                    figures::count_more(left, "event")
                ),
            }
        ))
    }
    Ok(ExitCode::SUCCESS)
}
