//! Checks that PostgreSQL and Pub/Sub have everything that the relay needs.
//!
//! Changes nothing. Every problem is a finding, even an unreachable database; only unreadable settings
//! are errors, and these end a command before it can check anything. `slot_manager::preflight` checks
//! the database, `mapping` checks the settings of the tables, [`capture`] the columns that identify and
//! order rows, `days` the daily partitions, `slots` the slots that nobody reads, and `pubsub` topics and
//! credentials. [`forecast`] predicts from the findings what `postrider run` would do.
//!
//! Not here: the output and the exit code (`cli`).

pub(crate) mod capture;
mod days;
pub(crate) mod forecast;
mod mapping;
mod pubsub;
mod slots;

use std::time::Duration;

use publisher::Endpoint;
use slot_manager::preflight::{self, Expectation};
use slot_manager::publication;
use slot_manager::{Finding, QualifiedName, Severity};

use super::finding::{finding, from_error};
use super::prune::{Pruning, require_rights};
use super::recover;
use crate::error::{Code, Result};
use crate::postgres::{Sql, connect};
use crate::session::database;
use crate::session::publication::untraced;
use crate::settings::Settings;
use crate::store::relay_row::RecordKeeping;

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The findings about one server, or about the settings.
#[derive(Debug)]
pub(crate) struct CheckSection {
    pub(crate) heading: String,
    pub(crate) findings: Vec<Finding>,
}

/// The findings that need no connection. Unreadable settings have already ended the command with an
/// error.
pub(crate) fn settings_alone(settings: &Settings) -> Vec<CheckSection> {
    let tables: Vec<String> = settings
        .tables
        .iter()
        .map(|t| t.table.to_string())
        .collect();
    let (slot, publication) = (&settings.slot, &settings.publication);
    let what = format!(
        "slot {slot}, publication {publication}, tables {}",
        tables.join(", ")
    );
    let mut checked = vec![finding(Severity::Ok, "settings", what)];
    checked.extend(settings.database().err().as_ref().map(from_error));
    match settings.project() {
        // The full name of the topic contains the project, so check the topic only if the project is
        // set.
        Ok(_) => checked.extend(settings.dead_letter_topic().err().as_ref().map(from_error)),
        Err(error) => checked.push(from_error(&error)),
    }
    vec![CheckSection {
        heading: "Settings".to_owned(),
        findings: checked,
    }]
}

/// Checks the database and Pub/Sub. Changes nothing.
pub(crate) async fn everything(settings: &Settings) -> Vec<CheckSection> {
    let connected = async {
        let servers = settings.database()?;
        connect(servers, "postrider check", STATEMENT_TIMEOUT).await
    };
    let (database, topics) = match connected.await {
        Ok(sql) => {
            let reached = format!("connected to {}", sql.target());
            let mut found = vec![finding(Severity::Ok, "connection", reached)];
            let topics = match check_database(&sql, settings).await {
                Ok((more, topics)) => {
                    found.extend(more);
                    topics
                }
                Err(error) => {
                    found.push(from_error(&error));
                    Vec::new()
                }
            };
            let database = CheckSection {
                heading: format!("PostgreSQL {}", sql.target()),
                findings: found,
            };
            (database, topics)
        }
        Err(error) => {
            let heading = match &settings.database {
                Some(servers) => format!("PostgreSQL {servers}"),
                None => "PostgreSQL".to_owned(),
            };
            let database = CheckSection {
                heading,
                findings: vec![from_error(&error)],
            };
            (database, Vec::new())
        }
    };
    let heading = match &settings.pubsub {
        Endpoint::Emulator(host) => format!("Pub/Sub emulator {host}"),
        Endpoint::Service(url) => format!("Pub/Sub {url}"),
    };
    let pubsub = CheckSection {
        heading,
        findings: pubsub::check(settings, topics).await,
    };
    vec![database, pubsub]
}

/// Returns the findings about the database, and the topics of the settings and of the sampled
/// events.
async fn check_database(sql: &Sql, settings: &Settings) -> Result<(Vec<Finding>, Vec<String>)> {
    let expectation = Expectation {
        slot: settings.slot.clone(),
        publication: settings.publication.clone(),
        tables: settings.captured(),
        dispatch: Some(QualifiedName::new("outbox", "dispatch")),
        relay: QualifiedName::new("outbox", "relay"),
        capture: QualifiedName::new("outbox", "capture"),
    };
    let mut findings = preflight::check(sql, &expectation).await?;
    if findings
        .iter()
        .any(|finding| finding.code == Code::PostgresVersion.name())
    {
        return Ok((findings, Vec::new()));
    }
    findings.extend(replication_session(sql, &findings).await);
    // Read from outbox.relay: the table may exist, but with the schema of an older version.
    if findings.iter().any(|finding| finding.code == "relay-table") {
        let read = database::refuse_foreign_records(sql, settings).await;
        match read {
            Ok(()) => with_a_lost_slot(&mut findings, recover::lost_slot(sql, settings).await),
            Err(error) => findings.push(from_error(&error)),
        }
    }
    if RecordKeeping::of(settings.dispatch, None).needs_traces() {
        let tables = settings.captured();
        let state = publication::inspect(sql, &settings.publication, &tables).await?;
        findings.extend(untraced(&state).as_ref().map(from_error));
    }
    findings.extend(slots::unread(sql, settings).await?);
    findings.extend(capture::check(sql, settings).await?);
    findings.extend(pruning(sql, settings).await);
    findings.extend(days::check(sql, settings).await);
    let mut topics = Vec::new();
    for table in &settings.tables {
        let looked = mapping::check(sql, table, &settings.project).await?;
        // The publication's check also reports missing columns.
        let is_known = |code| findings.iter().any(|finding| finding.code == code);
        let is_new =
            |finding: &Finding| finding.code != "column-missing" || !is_known(finding.code);
        let new: Vec<Finding> = looked.findings.into_iter().filter(is_new).collect();
        findings.extend(new);
        topics.extend(looked.topics);
    }
    Ok((findings, topics))
}

/// If the relay prunes, checks that it may delete. Without this right the relay still delivers
/// events, so the finding is only a warning.
async fn pruning(sql: &Sql, settings: &Settings) -> Option<Finding> {
    settings.prune_after?;
    match require_rights(sql, settings, Pruning::Relay).await {
        Ok(()) => {
            let what = "the relay may delete old rows, as prune_after says";
            Some(finding(Severity::Ok, "pruning", what))
        }
        Err(error) if error.code() == Code::PrivilegeMissing => Some(Finding {
            severity: Severity::Warning,
            ..from_error(&error)
        }),
        // Other checks report missing tables.
        Err(_) => None,
    }
}

/// Adds the finding about a lost slot. Removes a milder finding with the same code: `preflight`
/// reports any missing slot, because a slot may be missing before the first start.
fn with_a_lost_slot(findings: &mut Vec<Finding>, lost: Option<Finding>) {
    let Some(lost) = lost else { return };
    let is_milder = |known: &Finding| known.code == lost.code && known.severity < lost.severity;
    findings.retain(|known| !is_milder(known));
    if findings.iter().all(|known| known.code != lost.code) {
        findings.push(lost);
    }
}

/// Checks that the server accepts a replication session. Skips the check if a relay reads from the
/// slot: that relay already has such a session, and there may be no free walsender for a second
/// session. Also skips the check if an earlier finding would make it fail.
async fn replication_session(sql: &Sql, known: &[Finding]) -> Option<Finding> {
    let reasons = [
        Code::SlotHeld,
        Code::ReplicationRight,
        Code::WalSendersUsedUp,
    ];
    // `known` also has findings of passed checks, under the same codes. Ignore those.
    let mut problems = known
        .iter()
        .filter(|finding| finding.severity != Severity::Ok);
    if problems.any(|finding| reasons.iter().any(|code| code.name() == finding.code)) {
        return None;
    }
    let probed = replication::probe(sql.target(), "postrider check").await;
    Some(match probed {
        Ok(()) => finding(
            Severity::Ok,
            "replication-session",
            "the server accepts a replication session",
        ),
        Err(error) => from_error(&error.into()),
    })
}
