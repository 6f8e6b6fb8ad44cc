//! `postrider check`: is everything there that the relay needs, in PostgreSQL and in Pub/Sub.
//!
//! Changes nothing. What is wrong is a finding, also that the database cannot be reached; only
//! settings that cannot be read are errors. `slot_manager::preflight` looks at the database,
//! `mapping` at the settings of the tables, `capture` at what tells their rows apart, `pubsub` at the
//! other end.

mod capture;
mod mapping;
mod pubsub;

use std::process::ExitCode;
use std::time::Duration;

use slot_manager::preflight::{self, Expectation};
use slot_manager::publication;
use slot_manager::{Finding, QualifiedName, Severity};

use super::findings::{Findings, finding, from_error};
use super::output;
use super::recover;
use crate::error::Result;
use crate::postgres::connect;
use crate::relay::opening::{self, untraced};
use crate::settings::{Dispatch, Endpoint, Settings};
use crate::source;

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The arguments of `postrider check`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print JSON: {findings: [{code, severity, what, remedy}], worst}
    #[arg(long)]
    json: bool,
}

pub(super) fn run(settings: &Settings, args: &Args) -> Result<ExitCode> {
    let findings = super::block_on(check(settings))?;
    if args.json {
        findings.print_json();
    } else {
        findings.print();
        output::write(&match findings.worst() {
            Severity::Ok | Severity::Info => "Ready for `postrider run`.\n".to_owned(),
            Severity::Warning => format!("{}; `postrider run` would start.\n", findings.summary()),
            Severity::Error => format!("{}; `postrider run` would not work.\n", findings.summary()),
        });
    }
    Ok(findings.exit_code())
}

async fn check(settings: &Settings) -> Result<Findings> {
    let mut findings = Findings::default();
    let heading = match &settings.database {
        Some(target) => format!("PostgreSQL {target}"),
        None => "PostgreSQL".to_owned(),
    };
    let (database, topics) = match check_database(settings).await {
        Ok(checked) => checked,
        Err(error) => (vec![from_error(&error)], Vec::new()),
    };
    findings.section(heading, database);
    let heading = match &settings.pubsub {
        Endpoint::Emulator(host) => format!("Pub/Sub emulator {host}"),
        Endpoint::Service(url) => format!("Pub/Sub {url}"),
    };
    findings.section(heading, pubsub::check(settings, topics).await);
    Ok(findings)
}

/// The findings, and the topics that the events in the tables go to.
async fn check_database(settings: &Settings) -> Result<(Vec<Finding>, Vec<String>)> {
    let sql = connect(settings.database()?, "postrider check", STATEMENT_TIMEOUT).await?;
    let expectation = Expectation {
        slot: settings.slot.clone(),
        publication: settings.publication.clone(),
        tables: settings.captured(),
        dispatch: Some(QualifiedName::new("outbox", "dispatch")),
        relay: QualifiedName::new("outbox", "relay"),
    };
    let mut findings = preflight::check(&sql, &expectation).await?;
    if findings
        .iter()
        .any(|finding| finding.code == "server-too-old")
    {
        return Ok((findings, Vec::new()));
    }
    findings.extend(replication_session(settings, &findings).await?);
    // A table that may be read, and still be of an older version.
    if findings.iter().any(|finding| finding.code == "relay-table") {
        let read = opening::refuse_foreign_records(&sql, settings).await;
        match read {
            Ok(()) => with_a_lost_slot(&mut findings, recover::lost_slot(&sql, settings).await),
            Err(error) => findings.push(from_error(&error)),
        }
    }
    if settings.dispatch == Dispatch::Exceptions {
        let tables = settings.captured();
        let state = publication::inspect(&sql, &settings.publication, &tables).await?;
        findings.extend(untraced(&state).as_ref().map(from_error));
    }
    findings.extend(capture::check(&sql, settings).await?);
    let mut topics = Vec::new();
    for table in &settings.tables {
        let looked = mapping::check(&sql, table, &settings.project).await?;
        // The publication's check names missing columns too.
        let is_known = |code| findings.iter().any(|finding| finding.code == code);
        let is_new =
            |finding: &Finding| finding.code != "column-missing" || !is_known(finding.code);
        let new: Vec<Finding> = looked.findings.into_iter().filter(is_new).collect();
        findings.extend(new);
        topics.extend(looked.topics);
    }
    Ok((findings, topics))
}

/// A missing slot is no news at a first start, and else a loss.
fn with_a_lost_slot(findings: &mut Vec<Finding>, lost: Option<Finding>) {
    let Some(lost) = lost else { return };
    let is_milder = |known: &Finding| known.code == lost.code && known.severity < lost.severity;
    findings.retain(|known| !is_milder(known));
    if findings.iter().all(|known| known.code != lost.code) {
        findings.push(lost);
    }
}

/// Whether a replication session is let in. A relay that reads from the slot has one, and there may
/// be no walsender for a second one.
async fn replication_session(settings: &Settings, known: &[Finding]) -> Result<Option<Finding>> {
    let has = |code| known.iter().any(|finding| finding.code == code);
    if has("slot-held") || has("replication-right-missing") || has("wal-senders-used-up") {
        return Ok(None);
    }
    let probed = source::probe(settings.database()?, "postrider check").await;
    Ok(Some(match probed {
        Ok(()) => finding(
            Severity::Ok,
            "replication-session",
            "the server takes a replication session",
        ),
        Err(error) => from_error(&error),
    }))
}
