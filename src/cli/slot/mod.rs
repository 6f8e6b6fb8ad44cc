//! `postrider slot`: shows, creates, drops and advances replication slots.
//!
//! `screen` formats the state of the slot (`ops::slot`) as text. `show` prints this text or JSON, and
//! sets the exit code. `list` lists all slots. `change` creates, drops and advances the slot.

mod change;
mod list;
pub(super) mod screen;
mod show;

use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;

use crate::error::Result;
use crate::postgres::{Sql, connect};
use crate::settings::Settings;

/// Statement timeout. It is short, because operators inspect a slot during an incident, when an early
/// answer is better than a complete one.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Statement timeout of changes. It is long, because creating a slot waits for running transactions,
/// and advancing a slot decodes all WAL up to the target.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(3600);

/// The arguments of `postrider slot`.
#[derive(Debug, clap::Args)]
pub(super) struct SlotArgs {
    #[command(subcommand)]
    command: Option<SlotAction>,
    /// Without a command: show
    #[command(flatten)]
    show: show::ShowArgs,
}

#[derive(Debug, Subcommand)]
enum SlotAction {
    /// Show one slot: health, what to do, lag, reader, retained WAL and the cause
    ///
    /// The exit code is suitable for alerts: 0 ok, 1 warning, 2 critical, 3 missing or unknown.
    #[command(after_long_help = "\
Example:
  postrider slot show --warn-bytes 256MB --warn-seconds 60")]
    Show(show::ShowArgs),
    /// List every slot of the cluster
    #[command(after_long_help = "\
Example:
  postrider slot list --json")]
    List(list::SlotListArgs),
    /// Create the slot: rows committed from then on are delivered
    ///
    /// The publication must exist first. Waits until all transactions that are running now have
    /// ended. `postrider init --apply` also creates the slot.
    #[command(after_long_help = "\
Example:
  postrider slot create --slot postrider")]
    Create(change::CreateArgs),
    /// Drop the slot. This releases its WAL, and undelivered events are no longer streamed
    #[command(after_long_help = "\
Example:
  postrider slot drop --yes")]
    Drop(change::DropArgs),
    /// Move the slot forward without delivering the events in between
    #[command(after_long_help = "\
Example:
  postrider slot advance --to 16/B374D848 --yes")]
    Advance(change::AdvanceArgs),
}

pub(super) fn run(settings: &Settings, args: SlotArgs) -> Result<ExitCode> {
    match args.command {
        None => super::block_on(show::run(settings, args.show)),
        Some(SlotAction::Show(show)) => super::block_on(show::run(settings, show.or(args.show))),
        Some(SlotAction::List(list)) => super::block_on(list::run(settings, &list)),
        Some(SlotAction::Create(create)) => super::block_on(change::create(settings, &create)),
        Some(SlotAction::Drop(drop)) => super::block_on(change::drop(settings, &drop)),
        Some(SlotAction::Advance(advance)) => super::block_on(change::advance(settings, &advance)),
    }
}

async fn session(settings: &Settings, statement_timeout: Duration) -> Result<Sql> {
    let sql = connect(settings.database()?, "postrider slot", statement_timeout).await?;
    sql.wait_without_limit();
    Ok(sql)
}
