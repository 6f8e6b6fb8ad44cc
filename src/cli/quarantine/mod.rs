//! `postrider quarantine`: what was set aside, and what becomes of it.
//!
//! Works through the database alone: a running relay looks every two seconds what was released or
//! discarded, one that is down does so at its next start. `select` says which events are meant,
//! `list` and `show` look, `change` releases and discards.

mod change;
mod list;
mod select;
mod show;

use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;

use crate::error::Result;
use crate::postgres::{Sql, connect};
use crate::settings::Settings;

/// Releasing a million events is one statement.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(600);

/// The arguments of `postrider quarantine`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List the keys with events in quarantine: how many, since when, and why
    ///
    /// Example: postrider quarantine list --topic order.events --json
    #[command(verbatim_doc_comment)]
    List(list::Args),
    /// Show one event: what became of it and why, and what waits behind it
    ///
    /// Example: postrider quarantine show 0190163d-8694-739b-aea5-966c26f8ad91
    #[command(verbatim_doc_comment)]
    Show(show::Args),
    /// Have events sent after all, in the order of their keys
    ///
    /// A running relay sends them within seconds, behind nothing later of their key. What fails
    /// again goes back into quarantine, with all that waits behind it.
    ///
    /// Examples:
    ///   postrider quarantine release 0190163d-8694-739b-aea5-966c26f8ad91
    ///   postrider quarantine release --key order-17 --topic order.events
    ///   postrider quarantine release --all
    #[command(verbatim_doc_comment)]
    Release(change::ReleaseArgs),
    /// Give events up: they are never sent. Their rows stay, as `discarded`
    ///
    /// Discard the bad event, then release its key: the events behind it are sent.
    ///
    /// Example: postrider quarantine discard 0190163d-8694-739b-aea5-966c26f8ad91 --yes
    #[command(verbatim_doc_comment)]
    Discard(change::DiscardArgs),
}

pub(super) fn run(settings: &Settings, args: Args) -> Result<ExitCode> {
    match args.action {
        Action::List(args) => super::block_on(list::run(settings, &args)),
        Action::Show(args) => super::block_on(show::run(settings, &args)),
        Action::Release(args) => super::block_on(change::release(settings, &args)),
        Action::Discard(args) => super::block_on(change::discard(settings, &args)),
    }
}

async fn session(settings: &Settings) -> Result<Sql> {
    let target = settings.database()?;
    connect(target, "postrider quarantine", STATEMENT_TIMEOUT).await
}

/// Whole seconds of an age that the server has computed by its own clock.
fn seconds(age: f64) -> u64 {
    let age = Duration::try_from_secs_f64(age).unwrap_or_default();
    age.as_secs()
}

/// A topic without its project, where that is plain.
fn short(topic: &str) -> &str {
    topic.rsplit('/').next().unwrap_or(topic)
}

/// The first characters, with dots where some are left out.
fn start_of(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
