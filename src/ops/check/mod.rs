//! Checks that PostgreSQL, Pub/Sub and this machine have everything that the relay needs.
//!
//! Changes nothing. Every problem is a finding, even an unreachable database. Only invalid settings are
//! errors, which end the command before the first check. `slot_manager::preflight` checks the database, and
//! `mapping` checks the settings of the tables with a `sample` of their rows. [`capture`] checks the columns
//! that identify and order rows, `days` the daily partitions, `slots` the slots that nobody reads,
//! `pubsub` topics and credentials, and `http_port` the port on this machine. [`forecast`] predicts from the
//! findings what `postrider run` would do.
//!
//! Not here: the output and the exit code (`cli`).

pub(crate) mod capture;
mod days;
pub(crate) mod forecast;
mod http_port;
mod mapping;
mod pubsub;
mod sample;
mod slots;

use std::time::Duration;

use publisher::Endpoint;
use slot_manager::preflight::{self, Expectation};
use slot_manager::publication;
use slot_manager::{Finding, QualifiedName, Severity};

use super::finding::{finding, from_error};
use super::prune::{Pruning, require_rights};
use super::recover::situation::{ReasonEffect, RecoveryReason};
use super::{LOCK_TIMEOUT, recover};
use crate::capture::claim;
use crate::condition::{Condition, State};
use crate::error::{Code, Result};
use crate::postgres::{Sql, connect, limiting_lock_waits};
use crate::session::database;
use crate::session::publication::untraced;
use crate::settings::{OnBadEvent, Settings};
use crate::store::privileges::{Purpose, missing_grants, name_missing_on};
use crate::store::relay_row::{RecordKeeping, shown};
use forecast::Forecast;

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The findings about one server, about the HTTP port, or about the settings.
#[derive(Debug)]
pub(crate) struct CheckSection {
    pub(crate) heading: String,
    pub(crate) findings: Vec<Finding>,
}

/// Returns the findings that need no connection. Invalid settings have already ended the command with
/// an error.
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
    checked.extend(settings.project().err().as_ref().map(from_error));
    vec![CheckSection {
        heading: "Settings".to_owned(),
        findings: checked,
    }]
}

/// Checks the database, Pub/Sub and the HTTP port, and predicts what `postrider run` would do. Changes nothing.
pub(crate) async fn everything(settings: &Settings) -> (Vec<CheckSection>, Forecast) {
    let mut due = None;
    let connected = async {
        let servers = settings.database()?;
        connect(servers, "postrider check", STATEMENT_TIMEOUT).await
    };
    let (database, topics) = match connected.await {
        Ok(sql) => {
            let reached = format!("connected to {}", sql.target());
            let mut found = vec![finding(Severity::Ok, "connection", reached)];
            let topics = match check_database(&sql, settings, &mut due).await {
                Ok((more, topics)) => {
                    found.extend(more);
                    topics
                }
                Err(error) => {
                    let purpose = Purpose::Relay;
                    let error = name_missing_on(&sql, error, &settings.tables, purpose).await;
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
    let mut sections = vec![database, pubsub];
    sections.extend(http_port::check(settings).await);
    let forecast = Forecast::of(&sections, due.as_ref(), settings);
    (sections, forecast)
}

/// Returns the findings about the database, and the full names of the topics to look up. Sets `due` to the
/// reason why the next session of a relay would not simply stream from its slot, but create it, recover, or stop.
async fn check_database(
    sql: &Sql,
    settings: &Settings,
    due: &mut Option<RecoveryReason>,
) -> Result<(Vec<Finding>, Vec<String>)> {
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
    // A locked table would block each of the next checks, so skip them.
    if let Some(locked) = locked_table(sql, settings).await {
        findings.push(locked);
        return Ok((findings, Vec::new()));
    }
    // The finding `relay-table` shows only that outbox.relay exists. Reading a row also shows whether the
    // table has the schema of an older version.
    if findings.iter().any(|finding| finding.code == "relay-table") {
        let read = database::refuse_foreign_records(sql, settings).await;
        match read {
            Ok(()) => {
                *due = recover::due(sql, settings).await;
                let found = due.as_ref().and_then(|due| recover::finding(due, settings));
                with_a_lost_slot(&mut findings, found);
            }
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
    if findings
        .iter()
        .any(|found| found.code == Code::TableCaptured.name())
    {
        // The relay would stop with `table-captured` before it creates the slot. So remove the finding that
        // promises that `postrider run` creates the slot.
        let promises = |found: &Finding| {
            found.code == Code::SlotMissing.name() && found.severity == Severity::Info
        };
        findings.retain(|found| !promises(found));
    }
    findings.extend(pruning(sql, settings).await);
    findings.extend(days::check(sql, settings).await);
    let (mapped, topics) = mappings(sql, settings, &findings).await?;
    findings.extend(mapped);
    let recovers = due
        .as_ref()
        .is_some_and(|due| due.effect == ReasonEffect::Recovers);
    name_grants(sql, settings, recovers, &mut findings).await?;
    Ok((findings, topics))
}

/// Returns a finding if another session holds a lock on a captured table or on one of the relay's tables, and the
/// lock would block the checks. Ignores other errors, because the other checks report them.
async fn locked_table(sql: &Sql, settings: &Settings) -> Option<Finding> {
    let tables = async {
        claim::known(sql, &settings.slot, &settings.tables).await?;
        Ok(())
    };
    let relay = async {
        shown::read(sql, &settings.slot).await?;
        Ok(())
    };
    let locked = |read: Result<()>| match read {
        Err(error) if error.code() == Code::LockWait => Some(from_error(&error)),
        Ok(()) | Err(_) => None,
    };
    let found = locked(limiting_lock_waits(sql, LOCK_TIMEOUT, tables).await);
    if found.is_some() {
        return found;
    }
    locked(limiting_lock_waits(sql, LOCK_TIMEOUT, relay).await)
}

/// Returns the findings about the mapping of the tables, and the full names of the topics to look up. The relay's
/// failing topics and the topics of waiting rows come first.
async fn mappings(
    sql: &Sql,
    settings: &Settings,
    known: &[Finding],
) -> Result<(Vec<Finding>, Vec<String>)> {
    let mut findings = Vec::new();
    let said = shown::read(sql, &settings.slot).await.ok().flatten();
    let said = said.and_then(|row| row.condition);
    let failing = said.iter().flat_map(|condition| &condition.topics);
    let mut waiting: Vec<String> = failing.map(|topic| topic.topic.clone()).collect();
    let mut others = Vec::new();
    // The capture records say which rows wait for delivery. Without the records, no row counts as waiting.
    let captured = claim::known(sql, &settings.slot, &settings.tables).await;
    let captured = captured.unwrap_or_default();
    for (n, table) in settings.tables.iter().enumerate() {
        let looked = mapping::check(sql, settings, table, captured.get(n)).await?;
        // The publication's check also reports missing columns, so report them only once.
        let is_known = |code| known.iter().any(|finding| finding.code == code);
        let is_new =
            |finding: &Finding| finding.code != "column-missing" || !is_known(finding.code);
        findings.extend(looked.findings.into_iter().filter(is_new));
        waiting.extend(looked.waiting_topics);
        others.extend(looked.topics);
    }
    findings.extend(said.and_then(|said| halted(&said, settings, &findings)));
    let mut topics = Vec::new();
    for topic in waiting.into_iter().chain(others) {
        if !topics.contains(&topic) {
            topics.push(topic);
        }
    }
    Ok((findings, topics))
}

/// Returns a finding if the relay's last condition in `outbox.relay` says that the relay stopped at a bad event.
/// Returns none if an error in `found` has the same code.
fn halted(said: &Condition, settings: &Settings, found: &[Finding]) -> Option<Finding> {
    let code: Code = said.code.as_deref()?.parse().ok()?;
    let is_of_an_event = matches!(
        code,
        Code::EventInvalid | Code::EventTooLarge | Code::EventRefused
    );
    let is_known = found
        .iter()
        .any(|found| found.severity == Severity::Error && found.code == code.name());
    let halts = settings.on_bad_event == OnBadEvent::Halt;
    (said.state == State::Broken && is_of_an_event && halts && !is_known).then(|| Finding {
        remedy: said.hint.clone(),
        ..finding(
            Severity::Error,
            code.name(),
            format!(
                "the relay has stopped because of an event: {}",
                said.what.as_deref().unwrap_or_default()
            ),
        )
    })
}

/// If the role lacks rights, makes sure that exactly one finding names the GRANT statements. A check that fails
/// because of a missing right reports a vague finding, which has only the general hint of `privilege-missing`.
///
/// - If another finding already names the statements, this function only removes the vague findings.
/// - Otherwise the first vague finding gets the statements, and this function removes the other vague findings.
/// - If there is no vague finding, this function adds a finding with the statements. It is an error if the relay would
///   recover (`recovers`) and may not compute event ids, because the recovery would then fail. Otherwise it is a
///   warning, because the relay can deliver events without the rights.
async fn name_grants(
    sql: &Sql,
    settings: &Settings,
    recovers: bool,
    findings: &mut Vec<Finding>,
) -> Result<()> {
    let code = Code::PrivilegeMissing;
    let is_vague =
        |found: &Finding| found.code == code.name() && found.remedy.as_deref() == Some(code.hint());
    let is_known = |found: &Finding| found.code == code.name() && !is_vague(found);
    if findings.iter().any(is_known) {
        findings.retain(|found| !is_vague(found));
        return Ok(());
    }
    let grants = missing_grants(sql, &settings.tables, Purpose::Relay).await?;
    if grants.is_empty() {
        return Ok(());
    }
    let failed = findings.iter().position(is_vague);
    let mut found = match failed {
        Some(failed) => findings.swap_remove(failed),
        None if recovers
            && grants
                .iter()
                .any(|grant| grant.starts_with("GRANT EXECUTE")) =>
        {
            finding(
                Severity::Error,
                code.name(),
                "the role lacks rights that the due recovery needs",
            )
        }
        None => finding(
            Severity::Warning,
            code.name(),
            "the role lacks rights that some of the relay's work needs, such as a release from quarantine, or a \
             replay",
        ),
    };
    findings.retain(|found| !is_vague(found));
    found.remedy = Some(grants.join("; "));
    findings.push(found);
    Ok(())
}

/// If the relay prunes, checks that it has the right to delete rows. Without this right the relay still
/// delivers events, so the finding is only a warning.
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
        // Other checks report missing tables, so this one ignores the error.
        Err(_) => None,
    }
}

/// Adds the finding about a due recovery. Replaces a milder finding with the same code, because `preflight`
/// cannot tell a lost slot from a slot that a first start has yet to create.
fn with_a_lost_slot(findings: &mut Vec<Finding>, lost: Option<Finding>) {
    let Some(lost) = lost else { return };
    let is_milder = |known: &Finding| known.code == lost.code && known.severity < lost.severity;
    findings.retain(|known| !is_milder(known));
    if findings.iter().all(|known| known.code != lost.code) {
        findings.push(lost);
    }
}

/// Checks that the server accepts a replication session. Skips the check if a relay reads from the slot,
/// because that relay already has a replication session and may use the last free walsender. Also skips the
/// check if an earlier finding already says why the check would fail.
async fn replication_session(sql: &Sql, known: &[Finding]) -> Option<Finding> {
    let reasons = [
        Code::SlotHeld,
        Code::ReplicationRight,
        Code::WalSendersUsedUp,
    ];
    // A passed check also adds a finding: with the severity `Ok`, and the code of the problem that was looked for.
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
