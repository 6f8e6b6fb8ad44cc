//! `postrider recover`: previews a recovery, or requests one.
//!
//! The relay does the recovery itself, because it holds the slot and knows which events are in
//! flight. This command marks the slot for recovery in `outbox.relay`, and ends the relay's session,
//! so that the relay opens a new one.

mod adopt;
mod preview;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use decoder::Lsn;
use slot_manager::{Cluster, Finding, Severity, Slot, SlotName, cluster, publication, slots};
use tokio_postgres::error::SqlState;

use super::output;
use crate::capture::claim;
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, connect};
use crate::recovery::loss::{self, Seen, SlotVerdict};
use crate::settings::{OnLoss, Settings};
use crate::store::capture_record as captures;
use crate::store::relay_row::{self, RecordKeeping, Recorded};

/// Long, because adopting may move many records.
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
    /// Do it without asking
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
        let situation = Situation::read(&sql, settings).await?;
        if args.dry_run {
            preview::show(&situation, settings, args.json).await
        } else {
            request(sql, &situation, settings, args).await
        }
    })
}

/// The facts that decide whether a recovery is needed.
struct Situation {
    cluster: Cluster,
    slot: Option<Slot>,
    earlier: Option<Recorded>,
    /// Another slot that owns one of the tables, if any.
    owner: Option<SlotName>,
    /// The identities of the tables' capture records.
    identities: Vec<String>,
    records: RecordKeeping,
    /// Fingerprint of the publication.
    publication: String,
    /// The slot's confirmed position, if a relay could simply continue to stream from there.
    usable_from: Option<Lsn>,
    /// Why a relay would recover at its next session; `None` if it would only stream.
    why: Option<Why>,
}

/// A reason to recover.
struct Why {
    name: &'static str,
    what: String,
    /// The error with which a relay stops if it may not recover by itself.
    stops: Option<Error>,
}

impl Situation {
    async fn read(sql: &Sql, settings: &Settings) -> Result<Self> {
        let name = &settings.slot;
        let cluster = cluster::inspect(sql).await?;
        if cluster.in_recovery {
            let what = format!("{} is a standby", sql.target());
            return Err(Error::new(Code::PostgresStandby, what));
        }
        let slot = slots::find(sql, name).await?;
        if let Some(slot) = &slot {
            slot.require_ours()?;
        }
        let earlier = relay_row::read(sql, name).await?;
        let server_lsn = cluster::written_wal_end(sql).await?;
        let publication =
            publication::inspect(sql, &settings.publication, &settings.captured()).await?;
        let found = claim::find_tables(sql, &settings.tables).await?;
        let is_foreign = is_foreign(earlier.as_ref(), &cluster);
        let records = if is_foreign {
            captures::read_as_adopted(&**sql).await?
        } else {
            captures::read(&**sql).await?
        };
        let known = claim::matched(&found, &records);
        let identities = known.iter().flatten().map(|record| record.identity.clone());
        let mut owners = known.iter().flatten().map(|record| record.slot.as_str());
        let other = owners.find(|owner| *owner != name.as_str());
        let keeping = RecordKeeping::of(settings.dispatch, earlier.as_ref());
        let mut situation = Self {
            cluster,
            slot,
            earlier,
            owner: other.and_then(|owner| owner.parse().ok()),
            identities: identities.collect(),
            records: keeping,
            publication: publication.fingerprint().to_owned(),
            usable_from: None,
            why: None,
        };
        let seen = Seen {
            earlier: situation.earlier.as_ref(),
            slot: situation.slot.as_ref(),
            cluster: &situation.cluster,
            server_lsn,
            start: claim::start(settings.start, situation.earlier.is_none(), &known),
            records: keeping,
            publication: publication.fingerprint(),
            has_new_table: known.iter().any(Option::is_none),
            since_lsn: captures::since_lsn(&records, name),
            // Ignore an unfinished recovery: continuing it publishes the same rows.
            can_continue: false,
        };
        let why = situation.why(name, seen);
        // Without the column `inserted_xid`, a relay does not recognise rows that were restored after
        // the slot was created.
        let tells_restored_rows = found.iter().all(|found| found.shape.has_inserted_xid);
        let usable_from = adopt::usable_from(seen).filter(|_| tells_restored_rows);
        situation.why = why;
        situation.usable_from = usable_from;
        Ok(situation)
    }

    fn is_foreign(&self) -> bool {
        is_foreign(self.earlier.as_ref(), &self.cluster)
    }

    fn why(&self, slot: &SlotName, seen: Seen<'_>) -> Option<Why> {
        if let Some(earlier) = self.earlier.as_ref().filter(|_| self.is_foreign()) {
            let what = format!(
                "the relay's records come from cluster {}, and this is cluster {}: a relay refuses to \
                 run here until `postrider recover --adopt`",
                earlier.origin,
                self.cluster.origin()
            );
            return Some(Why {
                name: Code::ForeignCluster.name(),
                what,
                stops: None,
            });
        }
        if let Some(owner) = &self.owner {
            let what = format!(
                "the tables are captured through slot \"{owner}\": a relay refuses to run here until \
                 `postrider recover --adopt`"
            );
            return Some(Why {
                name: Code::TableCaptured.name(),
                what,
                stops: None,
            });
        }
        match loss::judge(seen) {
            SlotVerdict::Stream { .. } | SlotVerdict::Continue { .. } => None,
            SlotVerdict::Recover(loss) => Some(Why {
                name: loss.name(),
                what: loss.to_string(),
                stops: loss.stops(slot),
            }),
        }
    }
}

/// Whether the relay's records come from another cluster, or from another database of this cluster.
fn is_foreign(earlier: Option<&Recorded>, cluster: &Cluster) -> bool {
    earlier.is_some_and(|row| !row.origin.matches(cluster.origin()))
}

/// Returns the finding of `postrider check` about a slot that is missing, lost or recreated. Returns
/// `None` if the slot has no such fault. Also returns `None` if a query fails, because another
/// finding then says why.
pub(super) async fn lost_slot(sql: &Sql, settings: &Settings) -> Option<Finding> {
    let situation = Situation::read(sql, settings).await.ok()?;
    let error = situation.why?.stops?;
    let (severity, remedy) = match settings.slot_on_loss {
        OnLoss::Recover => (
            Severity::Warning,
            "`postrider run` creates a new slot and publishes every row without a record from the \
             tables; `postrider recover --dry-run` lists these rows. If this server is a copy of \
             another one, run no relay here",
        ),
        OnLoss::Stop => (
            Severity::Error,
            "`postrider recover --dry-run` lists the undelivered rows, and `postrider recover --yes` \
             requests their delivery. If this server is a copy of another one, run no relay here",
        ),
    };
    Some(Finding {
        code: error.code().name(),
        severity,
        what: error.what().to_owned(),
        remedy: Some(remedy.to_owned()),
    })
}

/// Returns the reason to record for the recovery: `adopted` or `requested`. An adoption without
/// `--adopt` is an error, and so is `--adopt` without need.
fn reason(situation: &Situation, adopt: bool) -> Result<&'static str> {
    let is_anothers = situation.is_foreign() || situation.owner.is_some();
    match (is_anothers, adopt) {
        (true, true) => Ok("adopted"),
        (false, false) => Ok("requested"),
        (true, false) => {
            let (what, code) = match &situation.why {
                Some(why) => (
                    why.what.clone(),
                    why.name.parse().unwrap_or(Code::ForeignCluster),
                ),
                None => (String::new(), Code::ForeignCluster),
            };
            Err(Error::new(code, what).hint(
                "if no other relay publishes these tables and events should be published from here: \
                 `postrider recover --adopt`",
            ))
        }
        (false, true) => Err(Error::new(
            Code::SettingInvalid,
            "--adopt is not needed: the tables and the slot already belong to this relay",
        )
        .hint("leave --adopt out")),
    }
}

async fn request(
    mut sql: Sql,
    situation: &Situation,
    settings: &Settings,
    args: &RecoverArgs,
) -> Result<ExitCode> {
    let name = &settings.slot;
    let why = reason(situation, args.adopt)?;
    if let Some(owner) = &situation.owner {
        adopt::refuse_a_live_owner(&sql, owner).await?;
    }
    if situation.is_foreign() {
        adopt::refuse_lower_transactions(&sql, settings).await?;
    }
    confirmed(args, &question(situation, settings))?;
    let kept_from = adopt::kept_from(situation, settings).await?;
    let transaction = sql.client_mut().transaction().await?;
    if args.adopt {
        captures::take_over(&transaction, name, &situation.identities).await?;
    }
    let moved = if situation.is_foreign() {
        captures::adopt(&transaction).await?;
        relay_row::move_records(&transaction).await?
    } else {
        0
    };
    let cluster = &situation.cluster;
    match kept_from {
        Some(confirmed) => {
            let publication = &situation.publication;
            relay_row::keep_slot(&transaction, name, cluster, confirmed, publication).await?;
        }
        None => relay_row::mark::request_recovery(&transaction, name, cluster, why).await?,
    }
    transaction.commit().await?;
    let relay = wake(&sql, name).await?;
    if args.json {
        output::write_json(&serde_json::json!({
            "slot_name": name,
            "marked": kept_from.is_none().then_some(why),
            "relay": relay.name(),
            "records_moved": moved,
        }))
    } else if kept_from.is_some() {
        output::write(&format!(
            "Kept slot {name}: every row in the tables has an outcome, and the slot delivers all later \
             rows. Start the relay.\n"
        ))
    } else {
        output::write(&format!(
            "Marked slot {name} for recovery: the relay publishes every row without a record in \
             outbox.dispatch from the tables, then continues with the stream.\n{}\n",
            relay.text()
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

/// Asks for confirmation on a terminal; without a terminal, `--yes` is required.
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
    eprint!("{what}. Continue? [y/N] ");
    let mut answer = String::new();
    let _ = std::io::stderr().flush(); // the answer counts, not the prompt
    match std::io::stdin().read_line(&mut answer) {
        Ok(_) if matches!(answer.trim(), "y" | "Y" | "yes") => Ok(()),
        Ok(_) | Err(_) => Err(refused()),
    }
}

/// When the relay acts on the requested recovery.
enum RelayReaction {
    /// At its next start: no relay runs.
    Starts,
    /// Now: this command has ended the relay's session, and the relay opens the next session.
    BeginsAnew,
    /// After a restart: this role may not end the relay's session.
    MustBeRestarted,
}

impl RelayReaction {
    fn name(&self) -> &'static str {
        match self {
            RelayReaction::Starts => "starts",
            RelayReaction::BeginsAnew => "begins-anew",
            RelayReaction::MustBeRestarted => "must-be-restarted",
        }
    }

    fn text(&self) -> &'static str {
        match self {
            RelayReaction::Starts => {
                "No relay holds the slot: the next `postrider run` does the recovery."
            }
            RelayReaction::BeginsAnew => "The relay that holds the slot recovers now; see its log.",
            RelayReaction::MustBeRestarted => {
                "This role may not end the session of the relay that holds the slot: restart the relay."
            }
        }
    }
}

/// Ends the session that holds the slot; the relay's next session finds the mark.
async fn wake(sql: &Sql, slot: &SlotName) -> Result<RelayReaction> {
    match slots::end_reader(sql, slot).await {
        Ok(false) => Ok(RelayReaction::Starts),
        Ok(true) => Ok(RelayReaction::BeginsAnew),
        Err(error) if error.sqlstate() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            Ok(RelayReaction::MustBeRestarted)
        }
        Err(error) => Err(error.into()),
    }
}
