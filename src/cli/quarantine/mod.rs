//! `postrider quarantine`: lists, releases and discards quarantined events (`ops::quarantine`).

mod change;
mod list;
mod show;

use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;

use crate::error::Result;
use crate::ops::rights::Purpose;
use crate::postgres::{Sql, connect};
use crate::settings::Settings;

/// Statement timeout. It is long, because one statement may release a million events.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(600);

/// The arguments of `postrider quarantine`.
#[derive(Debug, clap::Args)]
pub(super) struct QuarantineArgs {
    #[command(subcommand)]
    action: QuarantineAction,
}

impl QuarantineArgs {
    /// Returns the purpose for which the command needs privileges.
    pub(super) fn purpose(&self) -> Purpose {
        match self.action {
            QuarantineAction::List(_) | QuarantineAction::Show(_) => Purpose::Read,
            QuarantineAction::Release(_) | QuarantineAction::Discard(_) => {
                Purpose::ChangeQuarantine
            }
        }
    }
}

#[derive(Debug, Subcommand)]
enum QuarantineAction {
    /// List the keys with events in quarantine: how many, since when, and why
    #[command(after_long_help = "\
Example:
  postrider quarantine list --topic order.events --json")]
    List(list::QuarantineListArgs),
    /// Show one event: its state, its error, and how many events wait behind it
    #[command(after_long_help = "\
Example:
  postrider quarantine show \\
    0190163d-8694-739b-aea5-966c26f8ad91")]
    Show(show::QuarantineShowArgs),
    /// Release events: publish them after all, each key in order
    ///
    /// A running relay publishes them within seconds, before any later event of their key. An event
    /// that fails again returns to quarantine, with the events behind it.
    #[command(after_long_help = "\
Examples:
  postrider quarantine release \\
    0190163d-8694-739b-aea5-966c26f8ad91
  postrider quarantine release --key order-17
  postrider quarantine release --all")]
    Release(change::ReleaseArgs),
    /// Discard events: they are never published. Their rows stay, with the state `discarded`
    ///
    /// Discard the bad event, then release its key to publish the events behind it.
    #[command(after_long_help = "\
Example:
  postrider quarantine discard --yes \\
    0190163d-8694-739b-aea5-966c26f8ad91")]
    Discard(change::DiscardArgs),
}

pub(super) fn run(settings: &Settings, args: QuarantineArgs) -> Result<ExitCode> {
    match args.action {
        QuarantineAction::List(args) => super::block_on(list::run(settings, &args)),
        QuarantineAction::Show(args) => super::block_on(show::run(settings, &args)),
        QuarantineAction::Release(args) => super::block_on(change::release(settings, &args)),
        QuarantineAction::Discard(args) => super::block_on(change::discard(settings, &args)),
    }
}

async fn session(settings: &Settings) -> Result<Sql> {
    let target = settings.database()?;
    let sql = connect(target, "postrider quarantine", STATEMENT_TIMEOUT).await?;
    sql.wait_without_limit();
    Ok(sql)
}

/// Returns the last part of a topic's full name.
fn short(topic: &str) -> &str {
    topic.rsplit('/').next().unwrap_or(topic)
}
