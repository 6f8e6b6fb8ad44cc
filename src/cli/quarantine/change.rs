//! Releases and discards events. Discarding requires `--yes`; without it, the command only says how many
//! events it would discard.

use std::process::ExitCode;

use printable::printable;

use super::select::{self, Which};
use super::session;
use crate::cli::{figures, output};
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::{OnBadEvent, Settings};
use crate::store::dispatch::quarantine_commands::{self, QuarantineFilter};

/// The arguments of `postrider quarantine release`.
#[derive(Debug, clap::Args)]
pub(super) struct ReleaseArgs {
    #[command(flatten)]
    which: Which,
    /// Print JSON: {released, whole_key}
    #[arg(long)]
    json: bool,
}

/// The arguments of `postrider quarantine discard`.
#[derive(Debug, clap::Args)]
pub(super) struct DiscardArgs {
    #[command(flatten)]
    which: Which,
    /// Do it; without this, only show how many events would be discarded
    #[arg(long)]
    yes: bool,
    /// Print JSON: {discarded}
    #[arg(long)]
    json: bool,
}

pub(super) async fn release(settings: &Settings, args: &ReleaseArgs) -> Result<ExitCode> {
    let sql = session(settings).await?;
    let (released, why_whole) = match &args.which.id {
        Some(id) => release_event(settings, &sql, id).await?,
        None => (release_all(&sql, &args.which).await?, None),
    };
    if args.json {
        output::write_json(
            &serde_json::json!({ "released": released, "whole_key": why_whole.is_some() }),
        );
        return Ok(ExitCode::SUCCESS);
    }
    let why = why_whole.map(|why| format!(" {why}")).unwrap_or_default();
    output::write(&format!(
        "Released {}.{why} A running relay publishes within seconds; a stopped one does so at its \
         next start.\n",
        figures::count(released, "event"),
    ));
    Ok(ExitCode::SUCCESS)
}

/// Releases one event, or its whole key if that is necessary to keep the order. Returns the number of
/// events, and the reason if it released the whole key.
async fn release_event(settings: &Settings, sql: &Sql, id: &str) -> Result<(u64, Option<String>)> {
    let event = select::in_quarantine(sql, id).await?;
    let (before, behind) = quarantine_commands::neighbours(sql, &event).await?;
    let blocks = settings.on_bad_event == OnBadEvent::QuarantineKey;
    let why = match (before, behind) {
        (0, 0) => None,
        (0, behind) => blocks.then(|| {
            format!(
                "It is the first of key {}: the {} behind it {} released too, in order.",
                printable(&event.key),
                figures::count(behind, "event"),
                if behind == 1 { "is" } else { "are" },
            )
        }),
        (before, _) => Some(format!(
            "To keep the order, the whole key {} was released: {} in quarantine before it.",
            printable(&event.key),
            match before {
                1 => "1 event is".to_owned(),
                n => format!("{n} events are"),
            },
        )),
    };
    let released = match &why {
        None => quarantine_commands::release_event(sql, &event).await?,
        Some(_) => quarantine_commands::release_key(sql, &event).await?,
    };
    Ok((released, why))
}

async fn release_all(sql: &Sql, which: &Which) -> Result<u64> {
    let filter = QuarantineFilter::new(which.key.as_deref(), which.topic.as_deref());
    match quarantine_commands::release(sql, &filter).await? {
        0 => Err(nothing(which)),
        released => Ok(released),
    }
}

pub(super) async fn discard(settings: &Settings, args: &DiscardArgs) -> Result<ExitCode> {
    let sql = session(settings).await?;
    let which = &args.which;
    let event = match &which.id {
        Some(id) => Some(select::in_quarantine(&sql, id).await?),
        None => None,
    };
    let filter = QuarantineFilter::new(which.key.as_deref(), which.topic.as_deref());
    if !args.yes {
        let count = match &event {
            Some(_) => 1,
            None => quarantine_commands::count(&sql, &filter).await?,
        };
        let what = format!(
            "discarding {} needs --yes; nothing was done",
            figures::count(count, "event")
        );
        return Err(Error::new(Code::ConfirmationMissing, what).hint(
            "add --yes if they never need to be published; their outbox rows stay unchanged",
        ));
    }
    let discarded = match &event {
        Some(event) => quarantine_commands::discard_event(&sql, event).await?,
        None => quarantine_commands::discard(&sql, &filter).await?,
    };
    if discarded == 0 {
        return Err(nothing(which));
    }
    if args.json {
        output::write_json(&serde_json::json!({ "discarded": discarded }))
    } else {
        output::write(&format!(
            "Discarded {}: never published; outbox.dispatch keeps the reason. Events behind them still \
             wait: `postrider quarantine list`.\n",
            figures::count(discarded, "event"),
        ))
    }
    Ok(ExitCode::SUCCESS)
}

fn nothing(which: &Which) -> Error {
    let what = match (&which.key, &which.topic) {
        (Some(key), _) => format!("no event of key {key} is in quarantine"),
        (None, Some(topic)) => format!("no event of topic {topic} is in quarantine"),
        (None, None) => "nothing is in quarantine".to_owned(),
    };
    Error::new(Code::NotInQuarantine, what)
}
