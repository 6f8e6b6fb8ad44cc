//! Creates, drops and advances the slot. Drop and advance need `--yes`, because some events may not
//! be streamed afterwards. Without `--yes` they only show how many events and how much WAL are not
//! confirmed. Create needs `--yes` only if the relay has lost an earlier slot of this name.

use std::process::ExitCode;
use std::time::Duration;

use decoder::Lsn;
use serde::Serialize;
use slot_manager::slots::{self, CreateOptions};
use slot_manager::{Slot, publication};
use tokio_postgres::types::PgLsn;

use super::{CHANGE_TIMEOUT, STATEMENT_TIMEOUT, session};
use crate::cli::{capture, figures, output};
use crate::error::{Code, Error, Result};
use crate::ops::pending;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::relay_row;
use crate::store::relay_row::shown::served_before;

/// The arguments of `postrider slot create`.
#[derive(Debug, clap::Args)]
pub(super) struct CreateArgs {
    /// How long to wait for running transactions
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
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
    /// Print JSON: {slot_name, confirmed_flush_lsn, lag_bytes, pending_events}
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
    /// Print JSON: {slot_name, confirmed_flush_lsn, lag_bytes, pending_events}
    #[arg(long)]
    json: bool,
}

/// The events and WAL that are not streamed after a drop or an advance.
#[derive(Debug, Serialize)]
struct LeftOut {
    slot_name: String,
    /// The slot's confirmed position, before a drop or after an advance.
    #[serde(serialize_with = "as_text")]
    confirmed_flush_lsn: Lsn,
    /// Bytes of WAL that were not confirmed, up to the server's position or the target of the
    /// advance.
    lag_bytes: u64,
    /// Number of events without a record; `None` if unknown.
    pending_events: Option<u64>,
}

pub(super) async fn create(settings: &Settings, args: &CreateArgs) -> Result<ExitCode> {
    let name = &settings.slot;
    let sql = session(settings, CHANGE_TIMEOUT).await?;
    let state = publication::inspect(&sql, &settings.publication, &settings.captured()).await?;
    if state.publication.is_none() {
        let what = format!("publication {} does not exist", settings.publication);
        return Err(Error::new(Code::PublicationMissing, what).hint(
            "create the publication first, with `postrider init --apply`: rows inserted after the \
             slot and before the publication cannot be streamed",
        ));
    }
    let missing = slots::find(&sql, name).await?.is_none();
    if let Some(confirmed) = served_before(&sql, name)
        .await?
        .filter(|_| missing && !args.yes)
    {
        let what = format!(
            "slot {name} was confirmed up to {confirmed} and is gone: rows committed between that \
             position and a new slot are not streamed"
        );
        return Err(Error::new(Code::SlotMissing, what).hint(
            "the relay recreates the slot by itself and publishes the unrecorded rows from the tables \
             (`postrider recover --dry-run` lists them); add --yes to create the slot here",
        ));
    }
    let options = CreateOptions {
        failover: settings.slot_failover,
    };
    capture::refuse_others(&sql, settings).await?;
    let at = slots::create(&sql, name, options, Duration::from_secs(args.wait_seconds)).await?;
    capture::from_now_on(&sql, settings, "postrider slot create", Some(at)).await?;
    if args.json {
        output::write_json(
            &serde_json::json!({ "slot_name": name, "created_at_lsn": at.to_string() }),
        )
    } else {
        output::write(&format!(
            "Created slot {name} at {at}: every row committed from now on is delivered. PostgreSQL \
             retains WAL until `postrider run` has read it.\n"
        ))
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn drop(settings: &Settings, args: &DropArgs) -> Result<ExitCode> {
    let sql = session(settings, STATEMENT_TIMEOUT).await?;
    let slot = find(&sql, settings).await?;
    let left_out = left_out(&sql, settings, &slot).await?;
    if !args.yes {
        return Err(not_confirmed(&format!("dropping {}", left_out.text())));
    }
    slots::drop(&sql, &settings.slot).await?;
    if args.json {
        output::write_json(&left_out)
    } else {
        output::write(&format!(
            "Dropped {}. At its next start the relay publishes the unrecorded rows from the tables.\n",
            left_out.text()
        ))
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn advance(settings: &Settings, args: &AdvanceArgs) -> Result<ExitCode> {
    let sql = session(settings, CHANGE_TIMEOUT).await?;
    let slot = find(&sql, settings).await?;
    let mut left_out = left_out(&sql, settings, &slot).await?;
    let to = args.to.or(slot.server_lsn).unwrap_or_default();
    if let Some(bytes) = to.bytes_since(left_out.confirmed_flush_lsn) {
        left_out.lag_bytes = bytes;
    }
    if args.to.is_some() {
        left_out.pending_events = None; // the number of events before that position is unknown
    }
    if !args.yes {
        return Err(not_confirmed(&format!(
            "advancing {} to {to}",
            left_out.text()
        )));
    }
    let text = left_out.text();
    let left = PgLsn::from(left_out.confirmed_flush_lsn.as_u64());
    slots::can_advance(&sql, &settings.slot, to).await?;
    // Record the position before advancing. Otherwise a relay whose records may be lacking could not
    // notice the advance.
    relay_row::write_left(&sql, &settings.slot, left).await?;
    left_out.confirmed_flush_lsn = slots::advance(&sql, &settings.slot, to).await?;
    if args.json {
        output::write_json(&left_out)
    } else {
        output::write(&format!(
            "Advanced {text} to {}. The WAL in between is never streamed; at its next start the relay \
             publishes the unrecorded rows from the tables.\n",
            left_out.confirmed_flush_lsn
        ))
    }
    Ok(ExitCode::SUCCESS)
}

async fn find(sql: &Sql, settings: &Settings) -> Result<Slot> {
    let name = &settings.slot;
    let slot = slots::find(sql, name).await?.ok_or_else(|| {
        Error::new(Code::SlotMissing, format!("there is no slot {name}"))
            .hint("`postrider slot list` shows all slots; choose another with --slot")
    })?;
    slot.require_ours()?;
    Ok(slot)
}

async fn left_out(sql: &Sql, settings: &Settings, slot: &Slot) -> Result<LeftOut> {
    let pending = pending::read(sql, settings).await?;
    Ok(LeftOut {
        slot_name: slot.slot_name.clone(),
        confirmed_flush_lsn: slot.confirmed_flush_lsn.unwrap_or_default(),
        lag_bytes: slot.lag_bytes.unwrap_or_default(),
        pending_events: pending.map(|pending| pending.events),
    })
}

impl LeftOut {
    fn text(&self) -> String {
        let events = match self.pending_events {
            Some(events) => format!(", {} not recorded", figures::count(events, "event")),
            None => String::new(),
        };
        let bytes = figures::bytes(self.lag_bytes);
        let Self {
            slot_name,
            confirmed_flush_lsn,
            ..
        } = self;
        format!("slot {slot_name} at {confirmed_flush_lsn} ({bytes} of WAL not confirmed{events})")
    }
}

fn not_confirmed(what: &str) -> Error {
    Error::new(
        Code::ConfirmationMissing,
        format!("{what} needs --yes; nothing was done"),
    )
    .hint("add --yes; the relay publishes undelivered rows from the tables when it starts")
}

fn as_text<S: serde::Serializer>(lsn: &Lsn, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(lsn)
}
