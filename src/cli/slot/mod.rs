//! `postrider slot`: look at replication slots, make, drop and advance them.
//!
//! `look` reads everything that there is to know about the slot, `screen` shows it to a person,
//! `show` prints one or the other and sets the exit code. `change` holds what alters something,
//! and asks for `--yes` where events would not be streamed.

mod change;
mod list;
mod look;
mod pending;
mod screen;
mod show;

use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use decoder::Lsn;
use slot_manager::SlotName;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::PgLsn;

use crate::error::Result;
use crate::postgres::{Sql, connect};
use crate::settings::Settings;

/// A slot is looked at while things are bad: better an answer soon than a complete one.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Making a slot waits for running transactions, advancing one decodes all WAL on the way.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(3600);

/// The arguments of `postrider slot`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Option<Action>,
    /// Without a command: show
    #[command(flatten)]
    show: show::ShowArgs,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show one slot: health and what to do, lag, reader, WAL kept and by whom
    ///
    /// The exit code is fit for alerts: 0 ok, 1 warning, 2 critical, 3 missing or unknown.
    ///
    /// Example: postrider slot show --warn-bytes 256MB --critical-bytes 2GB --warn-seconds 60
    #[command(verbatim_doc_comment)]
    Show(show::ShowArgs),
    /// List every slot of the cluster
    ///
    /// Example: postrider slot list --json
    #[command(verbatim_doc_comment)]
    List(list::Args),
    /// Create the slot: rows committed from then on are delivered
    ///
    /// The publication must be there first. Waits until the transactions that run at this moment
    /// have ended. `postrider init --apply` does this too.
    ///
    /// Example: postrider slot create --slot postrider
    #[command(verbatim_doc_comment)]
    Create(change::CreateArgs),
    /// Drop the slot: its WAL is released, what was not delivered is not streamed any more
    ///
    /// Example: postrider slot drop --yes
    #[command(verbatim_doc_comment)]
    Drop(change::DropArgs),
    /// Move the slot forward without delivering what lies between
    ///
    /// Example: postrider slot advance --to 16/B374D848 --yes
    #[command(verbatim_doc_comment)]
    Advance(change::AdvanceArgs),
}

pub(super) fn run(settings: &Settings, args: Args) -> Result<ExitCode> {
    match args.command {
        None => super::block_on(show::run(settings, args.show)),
        Some(Action::Show(show)) => super::block_on(show::run(settings, show.or(args.show))),
        Some(Action::List(list)) => super::block_on(list::run(settings, &list)),
        Some(Action::Create(create)) => super::block_on(change::create(settings, &create)),
        Some(Action::Drop(drop)) => super::block_on(change::drop(settings, &drop)),
        Some(Action::Advance(advance)) => super::block_on(change::advance(settings, &advance)),
    }
}

async fn session(settings: &Settings, statement_timeout: Duration) -> Result<Sql> {
    connect(settings.database()?, "postrider slot", statement_timeout).await
}

/// How far the relay of this slot has confirmed, if one ever ran: then a missing slot is a gap.
/// `None` also when the relay's tables are not there, or not for us to read.
pub(super) async fn served_before(sql: &Sql, slot: &SlotName) -> Result<Option<Lsn>> {
    const STATEMENT: &str = "select confirmed_lsn from outbox.relay where slot = $1";
    match sql.query_opt(STATEMENT, &[&slot.as_str()]).await {
        Ok(row) => {
            let confirmed: Option<PgLsn> = row.and_then(|row| row.get(0));
            Ok(confirmed.map(|lsn| Lsn::new(lsn.into())))
        }
        Err(error) if not_to_be_read(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether a statement failed because our tables are not there or not for this role to read.
fn not_to_be_read(error: &tokio_postgres::Error) -> bool {
    let states = [
        SqlState::UNDEFINED_TABLE,
        SqlState::INVALID_SCHEMA_NAME,
        SqlState::UNDEFINED_COLUMN,
        SqlState::INSUFFICIENT_PRIVILEGE,
    ];
    error.code().is_some_and(|code| states.contains(code))
}
