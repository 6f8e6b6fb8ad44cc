//! `postrider recover`: previews a recovery, or requests one.
//!
//! The relay does the recovery itself, because it holds the slot and knows which events are in
//! flight. This command marks the slot and ends the relay's session, so that the relay opens a new one.

mod preview;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use slot_manager::{Cluster, Slot, SlotName, cluster, publication, slots};
use tokio_postgres::error::SqlState;

use crate::capture::{Snapshot, claim, record as captures};
use crate::cli::output;
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, connect};
use crate::relay::opening::server_lsn;
use crate::relay::record::{self, Recorded};
use crate::relay::recovery::loss::{self, Seen, Verdict};
use crate::settings::Settings;

/// Adopting may move many records.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(3600);

/// The arguments of `postrider recover`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Only show whether recovery is needed and which rows it would publish; changes nothing
    #[arg(long, conflicts_with_all = ["yes", "adopt"])]
    dry_run: bool,
    /// This server replaces the one that the relay served before, or this slot replaces another one:
    /// let the relay continue here
    #[arg(long)]
    adopt: bool,
    /// Do it without asking
    #[arg(long)]
    yes: bool,
    /// Print JSON: {slot_name, needed, why, tables: [...]} or {slot_name, marked, relay}
    #[arg(long)]
    json: bool,
}

pub(super) fn run(settings: &Settings, args: &Args) -> Result<ExitCode> {
    super::block_on(async {
        let sql = connect(settings.database()?, "postrider recover", STATEMENT_TIMEOUT).await?;
        let situation = Situation::look(&sql, settings).await?;
        match args.dry_run {
            true => preview::show(&situation, settings, args.json).await,
            false => request(sql, &situation, settings, args).await,
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
    /// Whether events may have been delivered without a record.
    repeats: bool,
    /// Why a relay would recover at its next session; `None` if it would only stream.
    why: Option<Why>,
}

/// A reason to recover.
struct Why {
    name: &'static str,
    what: String,
}

impl Situation {
    async fn look(sql: &Sql, settings: &Settings) -> Result<Self> {
        let name = &settings.slot;
        let cluster = cluster::inspect(sql).await?;
        if cluster.in_recovery {
            return Err(Error::new(Code::PostgresStandby, "the server is a standby"));
        }
        let slot = slots::find(sql, name).await?;
        if let Some(slot) = &slot {
            slot.require_ours()?;
        }
        let earlier = record::read(sql, name).await?;
        let server_lsn = server_lsn(sql).await?;
        let publication =
            publication::inspect(sql, &settings.publication, &settings.captured()).await?;
        let found = claim::look(sql, &settings.tables).await?;
        let is_foreign = is_foreign(earlier.as_ref(), &cluster);
        let records = match is_foreign {
            true => captures::read_as_adopted(&**sql).await?,
            false => captures::read(&**sql).await?,
        };
        let known = claim::matched(&found, &records);
        let identities = known.iter().flatten().map(|record| record.identity.clone());
        let mut owners = known.iter().flatten().map(|record| record.slot.as_str());
        let other = owners.find(|owner| *owner != name.as_str());
        let mut situation = Self {
            cluster,
            slot,
            earlier,
            owner: other.and_then(|owner| owner.parse().ok()),
            identities: identities.collect(),
            repeats: false,
            why: None,
        };
        let seen = Seen {
            earlier: situation.earlier.as_ref(),
            slot: situation.slot.as_ref(),
            cluster: &situation.cluster,
            server_lsn,
            start: claim::start(settings.start, situation.earlier.is_none(), &known),
            dispatch: settings.dispatch,
            publication: publication.fingerprint(),
            has_new_table: known.iter().any(Option::is_none),
            is_captured: known.iter().any(Option::is_some),
        };
        let (repeats, why) = (loss::repeats(seen), situation.why(seen));
        (situation.repeats, situation.why) = (repeats, why);
        Ok(situation)
    }

    fn is_foreign(&self) -> bool {
        is_foreign(self.earlier.as_ref(), &self.cluster)
    }

    fn why(&self, seen: Seen<'_>) -> Option<Why> {
        if let Some(earlier) = self.earlier.as_ref().filter(|_| self.is_foreign()) {
            let what = format!(
                "the relay's records come from cluster {}, and this is cluster {}: a relay refuses to \
                 run here until `postrider recover --adopt`",
                earlier.system_identifier, self.cluster.system_identifier
            );
            let name = Code::ForeignCluster.name();
            return Some(Why { name, what });
        }
        if let Some(owner) = &self.owner {
            let what = format!(
                "the tables are captured through slot \"{owner}\": a relay refuses to run here until \
                 `postrider recover --adopt`"
            );
            let name = Code::TableCaptured.name();
            return Some(Why { name, what });
        }
        match loss::judge(seen) {
            Verdict::Stream { .. } | Verdict::CreateSlot => None,
            Verdict::Recover(loss) => Some(Why {
                name: loss.name(),
                what: loss.to_string(),
            }),
        }
    }
}

/// Whether the relay's records come from another cluster.
fn is_foreign(earlier: Option<&Recorded>, cluster: &Cluster) -> bool {
    earlier.is_some_and(|row| row.system_identifier != cluster.system_identifier)
}

async fn request(
    mut sql: Sql,
    situation: &Situation,
    settings: &Settings,
    args: &Args,
) -> Result<ExitCode> {
    let name = &settings.slot;
    let is_anothers = situation.is_foreign() || situation.owner.is_some();
    let why = match (is_anothers, args.adopt) {
        (true, true) => "adopted",
        (false, false) => "requested",
        (true, false) => {
            let (what, code) = match &situation.why {
                Some(why) => (
                    why.what.clone(),
                    why.name.parse().unwrap_or(Code::ForeignCluster),
                ),
                None => (String::new(), Code::ForeignCluster),
            };
            return Err(Error::new(code, what).hint(
                "if no other relay publishes these tables and events should be published from here: \
                 `postrider recover --adopt`",
            ));
        }
        (false, true) => {
            return Err(Error::new(
                Code::SettingInvalid,
                "--adopt is not needed: the tables and the slot already belong to this relay",
            )
            .hint("leave --adopt out"));
        }
    };
    if let Some(owner) = &situation.owner {
        refuse_a_live_owner(&sql, owner).await?;
    }
    if situation.is_foreign() {
        refuse_lower_transactions(&sql, settings).await?;
    }
    confirmed(args, &question(situation, settings))?;
    let transaction = sql.client_mut().transaction().await?;
    if args.adopt {
        captures::take_over(&transaction, name, &situation.identities).await?;
    }
    let moved = match situation.is_foreign() {
        true => {
            captures::adopt(&transaction).await?;
            record::move_records(&transaction).await?
        }
        false => 0,
    };
    record::request_recovery(&transaction, name, &situation.cluster, why).await?;
    transaction.commit().await?;
    let relay = wake(&sql, name).await?;
    match args.json {
        true => output::write_json(&serde_json::json!({
            "slot_name": name,
            "marked": why,
            "relay": relay.name(),
            "records_moved": moved,
        })),
        false => output::write(&format!(
            "Marked slot {name} for recovery: the relay publishes every row without a record in \
             outbox.dispatch from the tables, then continues with the stream.\n{}\n",
            relay.text()
        )),
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses a cluster whose transaction ids are below those in the tables. A cluster that a dump was
/// restored into counts transactions from the beginning, so new rows would look older than the relay.
async fn refuse_lower_transactions(sql: &Sql, settings: &Settings) -> Result<()> {
    let now = captures::current_snapshot(&**sql).await?.xmax();
    let records = captures::read(&**sql).await?;
    let since = records.iter().filter_map(|record| record.since.as_ref());
    let mut wanted = since.map(Snapshot::xmax).max().unwrap_or_default();
    for found in claim::look(sql, &settings.tables).await? {
        if found.shape.has_inserted_xid {
            let table = &found.table;
            let statement = format!(
                "select e.inserted_xid::text from {table} e order by e.inserted_xid desc limit 1"
            );
            let row = sql.query_opt(&statement, &[]).await?;
            let last: Option<&str> = row.as_ref().and_then(|row| row.get(0));
            let last: Option<u64> = last.and_then(|last| last.parse().ok());
            wanted = wanted.max(last.map_or(0, |last| last + 1));
        }
    }
    if now >= wanted {
        return Ok(());
    }
    let what = format!(
        "the next transaction of this cluster is {now}, but the tables have rows of transactions up to \
         {wanted}: new rows could not be distinguished from the old ones"
    );
    let next = next_xid_to_set(now, wanted);
    let (epoch, xid) = (next >> 32, next & u64::from(u32::MAX));
    Err(Error::new(Code::ForeignCluster, what).hint(format!(
        "stop PostgreSQL; as its user, with DATADIR as its data directory: `dd if=/dev/zero \
         of=DATADIR/pg_xact/{:04X} bs=8192 count=32` (the server does not start without this file) and \
         `pg_resetwal -e {epoch} -x {xid} DATADIR`; start it, and run this again",
        xid / XIDS_PER_FILE
    )))
}

/// How many transactions one file of `pg_xact` covers: 32 pages of 8 KiB, 2 bits each.
const XIDS_PER_FILE: u64 = 1 << 20;

/// How far the lower 32 bits may move at once. PostgreSQL compares transactions modulo 2^32, and
/// takes one that is more than 2^31 away for one of the future.
const FARTHEST: u64 = 1 << 30;

/// A transaction id to continue with, not before `wanted`, that begins a file of `pg_xact` which does
/// not exist yet.
fn next_xid_to_set(now: u64, wanted: u64) -> u64 {
    const EPOCH: u64 = 1 << 32;
    let after_now = (now / XIDS_PER_FILE + 1) * XIDS_PER_FILE;
    let next = wanted.max(after_now).next_multiple_of(XIDS_PER_FILE);
    // The first ids of an epoch are reserved.
    let next = if next.is_multiple_of(EPOCH) {
        next + XIDS_PER_FILE
    } else {
        next
    };
    if next.wrapping_sub(now) % EPOCH <= FARTHEST {
        return next;
    }
    // Just after `now`, in the next epoch in which that is not before `wanted`.
    let epochs = (next - after_now).div_ceil(EPOCH);
    let next = after_now + epochs * EPOCH;
    if next.is_multiple_of(EPOCH) {
        next + XIDS_PER_FILE
    } else {
        next
    }
}

/// Refuses while a relay reads the slot that owns the tables: it would keep publishing.
async fn refuse_a_live_owner(sql: &Sql, owner: &SlotName) -> Result<()> {
    match slots::find(sql, owner).await? {
        Some(slot) if slot.active => Err(Error::new(
            Code::SlotHeld,
            format!("slot \"{owner}\", which owns the tables, is being read"),
        )
        .hint("stop the relay that reads it first; `postrider slot list` shows who that is")),
        Some(_) | None => Ok(()),
    }
}

fn question(situation: &Situation, settings: &Settings) -> String {
    let name = &settings.slot;
    match situation.is_foreign() {
        true => format!(
            "this adopts cluster {} for slot {name}, and every row without a record is published to \
             project {:?} from here",
            situation.cluster.system_identifier, settings.project
        ),
        false if situation.owner.is_some() => format!(
            "slot {name} becomes the owner of the tables, and every row without a record is published \
             through it"
        ),
        false => format!(
            "slot {name} is recreated, and every row without a record is published from the tables"
        ),
    }
}

/// Asks for confirmation on a terminal; without a terminal, `--yes` is required.
fn confirmed(args: &Args, what: &str) -> Result<()> {
    if args.yes {
        return Ok(());
    }
    let refused = || {
        Error::new(
            Code::SettingInvalid,
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

/// When the relay reacts to the mark.
enum Relay {
    /// No relay runs: at the next start.
    Starts,
    /// The relay's session was ended: it opens the next one at once.
    BeginsAnew,
    /// The relay keeps running, and this role may not end its session.
    MustBeRestarted,
}

impl Relay {
    fn name(&self) -> &'static str {
        match self {
            Relay::Starts => "starts",
            Relay::BeginsAnew => "begins-anew",
            Relay::MustBeRestarted => "must-be-restarted",
        }
    }

    fn text(&self) -> &'static str {
        match self {
            Relay::Starts => "No relay holds the slot: the next `postrider run` does the recovery.",
            Relay::BeginsAnew => "The relay that holds the slot recovers now; see its log.",
            Relay::MustBeRestarted => {
                "This role may not end the session of the relay that holds the slot: restart the relay."
            }
        }
    }
}

/// Ends the session that holds the slot; the relay's next session finds the mark.
async fn wake(sql: &Sql, slot: &SlotName) -> Result<Relay> {
    const STATEMENT: &str = "\
        select pg_terminate_backend(active_pid) from pg_catalog.pg_replication_slots \
        where slot_name = $1 and active_pid is not null";
    match sql.query_opt(STATEMENT, &[&slot.as_str()]).await {
        Ok(None) => Ok(Relay::Starts),
        Ok(Some(_)) => Ok(Relay::BeginsAnew),
        Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            Ok(Relay::MustBeRestarted)
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_transaction_id_is_near_by_in_its_lower_half_and_begins_a_file() {
        const EPOCH: u64 = 1 << 32;
        for (now, wanted) in [
            (800, 801),
            (800, 5_000_000),
            (800, 3_000_000_000),
            (800, EPOCH),
            (800, 7 * EPOCH + 5),
            (3_000_000_000, 7 * EPOCH + 5),
            (EPOCH - 5, EPOCH - 2),
            (EPOCH - 5, EPOCH + 2),
            (5 * EPOCH + 900, 6 * EPOCH - 1),
        ] {
            let next = next_xid_to_set(now, wanted);
            assert!(next >= wanted && next > now, "{now} {wanted}: {next}");
            assert_eq!(next % XIDS_PER_FILE, 0);
            assert_ne!(next % EPOCH, 0);
            assert_ne!(next / XIDS_PER_FILE, now / XIDS_PER_FILE);
            let ahead = (next - now) % EPOCH;
            assert!(
                ahead <= FARTHEST + 2 * XIDS_PER_FILE,
                "{now} {wanted}: {next}"
            );
        }
    }
}
