//! Lists the rows that a recovery would publish now. Reads and maps the rows with the recovery's code.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use decoder::Lsn;
use printable::printable;
use replication::CommitLsn;
use serde::Serialize;
use slot_manager::SlotName;

use super::{Situation, Why};
use crate::capture::blocked::Firsts;
use crate::capture::table::TableReader;
use crate::capture::unrecorded::Unrecorded;
use crate::capture::{ScanWindow, claim, scan};
use crate::cli::{figures, output};
use crate::error::Result;
use crate::postgres::PatientSql;
use crate::recovery::loss::Loss;
use crate::settings::{Settings, Start};

/// Maximum number of event ids shown for each topic.
const SHOWN_IDS: usize = 5;

/// The output of `recover --dry-run --json`; programs depend on it.
#[derive(Debug, Serialize)]
struct Preview<'a> {
    slot_name: &'a SlotName,
    /// Whether a relay would recover at its next session.
    needed: bool,
    /// The reason in kebab case, such as `slot-missing`.
    why: Option<&'static str>,
    what: Option<&'a str>,
    tables: Vec<TablePreview>,
}

/// The unrecorded rows of one table.
#[derive(Debug, Serialize)]
struct TablePreview {
    table: String,
    rows: u64,
    topics: BTreeMap<String, Topic>,
    /// Rows that cannot become a message.
    unmappable: u64,
    /// The error of the first such row.
    first_error: Option<String>,
}

#[derive(Debug, Default, Serialize)]
struct Topic {
    rows: u64,
    /// Total size of the encoded messages.
    bytes: u64,
    /// Earliest and latest `occurred_at`; `None` if no row has such a time.
    oldest: Option<String>,
    newest: Option<String>,
    first_event_ids: Vec<String>,
}

pub(super) async fn show(
    situation: &Situation,
    settings: &Settings,
    json: bool,
) -> Result<ExitCode> {
    let tables = tables(situation, settings, settings.project()?, u64::MAX).await?;
    let preview = Preview {
        slot_name: &settings.slot,
        needed: situation.why.is_some(),
        why: situation.why.as_ref().map(|why| why.name),
        what: situation.why.as_ref().map(|why| why.what.as_str()),
        tables,
    };
    if json {
        output::write_json(&preview)
    } else {
        output::write(&text(&preview, situation))
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether a recovery would publish anything.
///
/// # Errors
/// Errors of a statement.
pub(super) async fn any_row_waits(situation: &Situation, settings: &Settings) -> Result<bool> {
    // The rows are only counted, so the project does not matter.
    let project = settings.project().unwrap_or("no-project");
    let tables = tables(situation, settings, project, 1).await?;
    Ok(tables.iter().any(|table| table.rows > 0))
}

/// The rows that a recovery would publish, up to `limit` rows of each table.
async fn tables(
    situation: &Situation,
    settings: &Settings,
    project: &str,
    limit: u64,
) -> Result<Vec<TablePreview>> {
    let sql = PatientSql::open(settings.database()?, "postrider recover", Duration::ZERO).await?;
    scan::prepare(&sql).await?;
    let firsts = Firsts::read(&sql, situation.records).await?;
    let mut tables = Vec::new();
    let known = claim::as_if_claimed(&sql, &settings.slot, &settings.tables, settings.start);
    let mut known = sql.answer(known).await?;
    let wants_everything = settings.start == Start::All
        && situation.why.as_ref().map(|why| why.name) == Some(Loss::FirstStart(Start::All).name());
    for captured in known.iter_mut().filter(|_| wants_everything) {
        (captured.record.since, captured.record.floor) = (None, 0);
    }
    for (table, captured) in settings.tables.iter().zip(&known) {
        let resolving = TableReader::resolve(&sql, table, project, captured);
        let reader = sql.answer(resolving).await?;
        let window = ScanWindow::unresolved(captured, situation.records);
        let window = if situation.is_foreign() {
            // The floor counts transactions of another cluster, so no row here is resolved because
            // of the floor.
            ScanWindow {
                from_xid: 0,
                ..window
            }
        } else {
            window
        };
        let unrecorded = Unrecorded::of(&sql, reader, table, window, &firsts).await?;
        tables.push(read(unrecorded, table.table.to_string(), limit).await?);
    }
    Ok(tables)
}

async fn read(mut unrecorded: Unrecorded<'_>, name: String, limit: u64) -> Result<TablePreview> {
    // The mapping needs a position. Any position will do, because nothing is published or recorded.
    let place = CommitLsn::new(Lsn::new(1));
    let mut table = TablePreview {
        table: name,
        rows: 0,
        topics: BTreeMap::new(),
        unmappable: 0,
        first_error: None,
    };
    while table.rows < limit
        && let Some(row) = unrecorded.next().await?
    {
        let Some(event) = unrecorded.event(&row, place, 1) else {
            continue;
        };
        table.rows += 1;
        match event {
            Ok(event) => {
                if !table.topics.contains_key(&*event.topic) {
                    table
                        .topics
                        .insert(event.topic.to_string(), Topic::default());
                }
                let topic = table
                    .topics
                    .get_mut(&*event.topic)
                    .expect("invariant: inserted just now");
                topic.rows += 1;
                topic.bytes += event.event.message.len() as u64;
                if topic.first_event_ids.len() < SHOWN_IDS {
                    topic
                        .first_event_ids
                        .push(event.event.origin.event_id.to_string());
                }
                if let Some(at) = unrecorded.occurred_at(&row.values) {
                    topic.happened(at);
                }
            }
            Err(error) => {
                table.unmappable += 1;
                table.first_error.get_or_insert_with(|| error.to_string());
            }
        }
    }
    Ok(table)
}

impl Topic {
    /// Updates the earliest and latest time. Compares them as text, because all times of one session have
    /// the same format.
    fn happened(&mut self, at: &str) {
        if self.oldest.as_deref().is_none_or(|oldest| at < oldest) {
            self.oldest = Some(at.to_owned());
        }
        if self.newest.as_deref().is_none_or(|newest| at > newest) {
            self.newest = Some(at.to_owned());
        }
    }
}

fn text(preview: &Preview<'_>, situation: &Situation) -> String {
    let mut text = match &situation.why {
        Some(Why { name, what, .. }) => format!(
            "slot {}: recovery is needed ({name}): {}\n\n",
            preview.slot_name,
            printable(what)
        ),
        None => format!("slot {}: recovery is not needed\n\n", preview.slot_name),
    };
    if situation.slot.as_ref().is_some_and(|slot| slot.active) {
        text +=
            "A relay is running: its events in flight have no record yet and are counted here.\n\n";
    }
    text += "Rows without a record in outbox.dispatch, which a recovery would publish now:\n";
    for table in &preview.tables {
        text += &format!("\n{}: {}\n", table.table, figures::count(table.rows, "row"));
        for (name, topic) in &table.topics {
            text += &topic_text(name, topic);
        }
        if let Some(error) = &table.first_error {
            text += &format!(
                "  {} cannot become a message; the first error: {}\n",
                figures::count(table.unmappable, "row"),
                printable(error)
            );
        }
    }
    text + "\nNothing was changed.\n"
}

fn topic_text(name: &str, topic: &Topic) -> String {
    let mut text = format!(
        "  -> {}: {}, {}\n",
        printable(name),
        figures::count(topic.rows, "message"),
        figures::bytes(topic.bytes)
    );
    if let (Some(oldest), Some(newest)) = (&topic.oldest, &topic.newest) {
        text += &format!(
            "     occurred from {} to {}\n",
            printable(oldest),
            printable(newest)
        );
    }
    let first = topic.first_event_ids.join(", ");
    text + &format!("     first ids {}\n", printable(&first))
}
