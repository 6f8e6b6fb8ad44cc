//! `postrider slot create`, `slot drop` and `slot advance`. Drop and advance need `--yes`, because PostgreSQL
//! might not stream some events afterwards. Without `--yes` they only show how many events and how much WAL
//! are not confirmed. Create needs `--yes` only if the relay has lost an earlier slot of this name.

use std::process::ExitCode;
use std::time::Duration;

use decoder::Lsn;

use super::{CHANGE_TIMEOUT, STATEMENT_TIMEOUT, session};
use crate::cli::{figures, output};
use crate::error::{Code, Error, Result};
use crate::ops::slot::change::{self, LeftOut, SlotAdvance, SlotDrop};
use crate::settings::Settings;

/// The arguments of `postrider slot create`.
#[derive(Debug, clap::Args)]
pub(super) struct CreateArgs {
    /// How long to wait for running transactions
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = figures::parse_interval)]
    wait_seconds: u64,
    /// Create the slot even if the relay has lost an earlier slot of this name
    #[arg(long)]
    yes: bool,
    /// Print JSON: {slot_name, created_at_lsn}
    #[arg(long)]
    json: bool,
}

/// The arguments of `postrider slot drop`.
#[derive(Debug, clap::Args)]
pub(super) struct DropArgs {
    /// Do it; without this, only show how much would not be streamed
    #[arg(long)]
    yes: bool,
    /// Print JSON: {slot_name, confirmed_flush_lsn, lag_bytes, pending_events,
    /// pending_is_lower_bound}
    #[arg(long)]
    json: bool,
}

/// The arguments of `postrider slot advance`.
#[derive(Debug, clap::Args)]
pub(super) struct AdvanceArgs {
    /// Position to move to [default: the server's current position]
    #[arg(long, value_name = "LSN")]
    to: Option<Lsn>,
    /// Do it; without this, only show how much would not be streamed
    #[arg(long)]
    yes: bool,
    /// Print JSON: {slot_name, confirmed_flush_lsn, lag_bytes, pending_events,
    /// pending_is_lower_bound}
    #[arg(long)]
    json: bool,
}

pub(super) async fn create(settings: &Settings, args: &CreateArgs) -> Result<ExitCode> {
    let name = &settings.slot;
    let sql = session(settings, CHANGE_TIMEOUT).await?;
    let wait = Duration::from_secs(args.wait_seconds);
    let at = change::create(&sql, settings, wait, args.yes).await?;
    if args.json {
        output::write_json(
            &serde_json::json!({ "slot_name": name, "created_at_lsn": at.to_string() }),
        )
    } else {
        output::write_wrapped(&format!(
            "Created slot {name} at {at}: every row committed from now on is delivered. PostgreSQL \
             retains WAL until `postrider run` has read it.\n"
        ))
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn drop(settings: &Settings, args: &DropArgs) -> Result<ExitCode> {
    let sql = session(settings, STATEMENT_TIMEOUT).await?;
    let drop = SlotDrop::prepare(&sql, settings).await?;
    if !args.yes {
        let text = text(&drop.left_out);
        return Err(not_confirmed(&format!("dropping {text}")));
    }
    let left_out = drop.carry_out(&sql, settings).await?;
    if args.json {
        output::write_json(&left_out)
    } else {
        output::write_wrapped(&format!(
            "Dropped {}. At its next start the relay publishes the unrecorded rows from the tables.\n",
            text(&left_out)
        ))
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn advance(settings: &Settings, args: &AdvanceArgs) -> Result<ExitCode> {
    let sql = session(settings, CHANGE_TIMEOUT).await?;
    let advance = SlotAdvance::prepare(&sql, settings, args.to).await?;
    let before = text(&advance.left_out);
    if !args.yes {
        return Err(not_confirmed(&format!(
            "advancing {before} to {}",
            advance.to
        )));
    }
    let left_out = advance.carry_out(&sql, settings).await?;
    if args.json {
        output::write_json(&left_out)
    } else {
        output::write_wrapped(&format!(
            "Advanced {before} to {}. The WAL in between is never streamed; at its next start the relay \
             publishes the unrecorded rows from the tables.\n",
            left_out.confirmed_flush_lsn
        ))
    }
    Ok(ExitCode::SUCCESS)
}

fn text(left_out: &LeftOut) -> String {
    let events = match left_out.pending_events {
        Some(events) => {
            let least = figures::at_least(left_out.pending_is_lower_bound == Some(true));
            format!(", {least}{} not recorded", figures::count(events, "event"))
        }
        None => String::new(),
    };
    let bytes = figures::bytes(left_out.lag_bytes);
    let LeftOut {
        slot_name,
        confirmed_flush_lsn,
        ..
    } = left_out;
    format!("slot {slot_name} at {confirmed_flush_lsn} ({bytes} of WAL not confirmed{events})")
}

fn not_confirmed(what: &str) -> Error {
    Error::new(
        Code::ConfirmationMissing,
        format!("{what} needs --yes; nothing was done"),
    )
    .hint("add --yes; the relay publishes undelivered rows from the tables when it starts")
}
