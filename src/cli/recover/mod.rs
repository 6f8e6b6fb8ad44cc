//! `postrider recover`: previews a recovery, or requests one (`ops::recover`).

mod preview;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use super::{output, report};
use crate::error::{Code, Error, Result};
use crate::ops::recover::request::{RecoveryRequest, RelayReaction, RequestedRecovery};
use crate::ops::recover::situation::Situation;
use crate::ops::{LOCK_TIMEOUT, recover};
use crate::postgres::{Sql, connect, limiting_lock_waits};
use crate::settings::Settings;

/// Statement timeout. It is long, because an adoption may update many rows of `outbox.dispatch`.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(3600);

/// The arguments of `postrider recover`.
#[derive(Debug, clap::Args)]
pub(super) struct RecoverArgs {
    /// Only show whether recovery is needed and which rows it would publish; changes nothing
    #[arg(long, conflicts_with_all = ["yes", "adopt"])]
    dry_run: bool,
    /// Let the relay continue on a server that replaces its previous server, or with a slot that
    /// replaces another slot
    #[arg(long)]
    adopt: bool,
    /// Do it without asking for confirmation
    #[arg(long)]
    yes: bool,
    /// Print JSON: {slot_name, needed, why, tables: [...]} or {slot_name, marked, relay}, where
    /// `marked` is null if the relay continues with the slot as it is
    #[arg(long)]
    json: bool,
}

pub(super) fn run(settings: &Settings, args: &RecoverArgs) -> Result<ExitCode> {
    super::block_on(async {
        let sql = connect(settings.database()?, "postrider recover", STATEMENT_TIMEOUT).await?;
        sql.wait_without_limit();
        let reading = Situation::read(&sql, settings);
        let situation = limiting_lock_waits(&sql, LOCK_TIMEOUT, reading).await?;
        if args.dry_run {
            show_preview(&situation, settings, args.json).await
        } else {
            request(sql, &situation, settings, args).await
        }
    })
}

async fn show_preview(situation: &Situation, settings: &Settings, json: bool) -> Result<ExitCode> {
    let rows = recover::preview::read(situation, settings).await?;
    if json {
        output::write_json(&rows)
    } else {
        output::write_wrapped(&preview::text(&rows, situation))
    }
    Ok(ExitCode::SUCCESS)
}

async fn request(
    mut sql: Sql,
    situation: &Situation,
    settings: &Settings,
    args: &RecoverArgs,
) -> Result<ExitCode> {
    let request = RecoveryRequest::prepare(&sql, situation, settings, args.adopt).await?;
    confirmed(args, &question(situation, settings))?;
    let requested = request.carry_out(&mut sql).await?;
    let name = &settings.slot;
    let RequestedRecovery {
        marked,
        relay,
        records_moved,
    } = &requested;
    if args.json {
        output::write_json(&serde_json::json!({
            "slot_name": name,
            "marked": marked,
            "relay": relay.name(),
            "records_moved": records_moved,
        }))
    } else if marked.is_none() {
        output::write_wrapped(&format!(
            "Kept slot {name}: every row in the tables has an outcome, and the slot delivers all later \
             rows. Start the relay.\n"
        ))
    } else {
        output::write_wrapped(&format!(
            "Marked slot {name} for recovery: the relay publishes every row without a record in \
             outbox.dispatch from the tables, then continues with the stream.\n{}\n",
            reaction(relay)
        ))
    }
    Ok(ExitCode::SUCCESS)
}

fn question(situation: &Situation, settings: &Settings) -> String {
    let name = &settings.slot;
    if situation.is_foreign() {
        format!(
            "this adopts cluster {} for slot {name}, and every row without a record is published to \
             project {:?} from here",
            situation.cluster.origin(),
            settings.project
        )
    } else if situation.owner.is_some() {
        format!(
            "slot {name} becomes the owner of the tables, and every row without a record is published \
             through it"
        )
    } else {
        format!(
            "slot {name} is recreated, and every row without a record is published from the tables"
        )
    }
}

/// Without `--yes`, asks for confirmation. Refuses if there is no terminal, or if the answer is not yes.
fn confirmed(args: &RecoverArgs, what: &str) -> Result<()> {
    if args.yes {
        return Ok(());
    }
    let refused = || {
        Error::new(
            Code::ConfirmationMissing,
            format!("this needs --yes: {what}; nothing was done"),
        )
        .hint("`postrider recover --dry-run` shows which rows would be published; then add --yes")
    };
    if !std::io::stdin().is_terminal() {
        return Err(refused());
    }
    report::write_part(&format!("{what}. Continue? [y/N] "));
    let mut answer = String::new();
    match std::io::stdin().read_line(&mut answer) {
        Ok(_) if matches!(answer.trim(), "y" | "Y" | "yes") => Ok(()),
        Ok(_) | Err(_) => Err(refused()),
    }
}

fn reaction(relay: &RelayReaction) -> &'static str {
    match relay {
        RelayReaction::Starts => {
            "No relay holds the slot: the next `postrider run` does the recovery."
        }
        RelayReaction::BeginsAnew => "The relay that holds the slot recovers now; see its log.",
        RelayReaction::MustBeRestarted => {
            "This role may not end the session of the relay that holds the slot: restart the relay."
        }
    }
}
