//! Lists the rows that a recovery would publish now. Reads and maps the rows with the recovery's code.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use slot_manager::SlotName;

use super::situation::Situation;
use super::transactions;
use crate::capture::blocked::FirstQuarantined;
use crate::capture::detached::{self, DetachedTable};
use crate::capture::table::TableReader;
use crate::capture::unrecorded::Unrecorded;
use crate::capture::{ScanWindow, claim, scan};
use crate::error::Result;
use crate::event::EventPosition;
use crate::postgres::connect_patiently;
use crate::recovery::slot_verdict::RecoveryCause;
use crate::settings::{Settings, Start};

/// Maximum number of event ids listed for each topic.
const LISTED_IDS: usize = 5;

/// The output of `recover --dry-run --json`; programs depend on it.
#[derive(Debug, Serialize)]
pub(crate) struct RecoveryPreview<'a> {
    pub(crate) slot_name: &'a SlotName,
    /// Whether a relay would recover at its next session.
    pub(crate) needed: bool,
    /// The reason in kebab case, such as `slot-missing`.
    pub(crate) why: Option<&'static str>,
    pub(crate) what: Option<&'a str>,
    pub(crate) tables: Vec<TablePreview>,
}

/// The unrecorded rows of one table.
#[derive(Debug, Serialize)]
pub(crate) struct TablePreview {
    pub(crate) table: String,
    pub(crate) rows: u64,
    pub(crate) topics: BTreeMap<String, TopicPreview>,
    /// Rows that cannot be mapped to a message.
    pub(crate) unmappable: u64,
    /// The error of the first such row.
    pub(crate) first_error: Option<String>,
}

/// The unrecorded rows of one table for one topic.
#[derive(Debug, Default, Serialize)]
pub(crate) struct TopicPreview {
    pub(crate) rows: u64,
    /// Total size of the encoded messages.
    pub(crate) bytes: u64,
    /// Earliest `occurred_at`; `None` if no row has a time in this column.
    pub(crate) oldest: Option<String>,
    /// Latest `occurred_at`; `None` if no row has a time in this column.
    pub(crate) newest: Option<String>,
    pub(crate) first_event_ids: Vec<String>,
}

/// Lists the rows that a recovery would publish now. Changes nothing.
///
/// # Errors
/// `project-missing`; `foreign-cluster` if the cluster's transaction ids are lower than the transaction ids
/// in the rows; database errors.
pub(crate) async fn read<'a>(
    situation: &'a Situation,
    settings: &'a Settings,
) -> Result<RecoveryPreview<'a>> {
    let tables = tables(situation, settings, settings.project()?, u64::MAX).await?;
    let why = situation.why.as_ref();
    Ok(RecoveryPreview {
        slot_name: &settings.slot,
        needed: why.is_some(),
        why: why.map(|why| why.name),
        what: why.map(|why| why.what.as_str()),
        tables,
    })
}

/// Whether a recovery would publish anything.
///
/// # Errors
/// Database errors.
pub(super) async fn any_row_waits(situation: &Situation, settings: &Settings) -> Result<bool> {
    // Only topic names contain the project, and this count shows no topics, so any project will do.
    let project = settings.project().unwrap_or("no-project");
    let tables = tables(situation, settings, project, 1).await?;
    Ok(tables.iter().any(|table| table.rows > 0))
}

/// Returns the rows that a recovery would publish, up to `limit` rows of each table.
async fn tables(
    situation: &Situation,
    settings: &Settings,
    project: &str,
    limit: u64,
) -> Result<Vec<TablePreview>> {
    let sql = connect_patiently(settings.database()?, "postrider recover", Duration::ZERO).await?;
    scan::prepare(&sql).await?;
    if situation.may_have_higher_ids() {
        // The capture records contain transaction ids of another cluster, or of a later state of this cluster. If the
        // ids of this cluster are lower, new rows look as if they were inserted before the capture began, and the
        // preview would leave them out.
        transactions::refuse_lower(&sql, settings).await?;
    }
    // The preview does not read which keys are blocked, because it does not need to know: a recovery publishes the rows of
    // blocked keys too, only with other positions.
    let firsts = FirstQuarantined::default();
    let mut tables = Vec::new();
    let mut known =
        claim::as_if_claimed(&sql, &settings.slot, &settings.tables, settings.start).await?;
    let wants_everything = settings.start == Start::All
        && situation.why.as_ref().map(|why| why.name)
            == Some(RecoveryCause::FirstStart(Start::All).name());
    for captured in known.iter_mut().filter(|_| wants_everything) {
        (captured.record.since, captured.record.floor) = (None, 0);
    }
    for captured in known.iter_mut().filter(|_| situation.is_foreign()) {
        captured.record.is_adopted = true;
        // Read the settled tables too. All their rows had an outcome in the later state, but may have none in this one.
        let settled = std::mem::take(&mut captured.record.settled);
        captured.record.detached.extend(settled.into_keys());
    }
    let detached = if situation.is_foreign() && !situation.is_of_a_later_state() {
        // The recorded OIDs belong to another cluster or database, so they cannot identify detached partitions
        // here.
        Vec::new()
    } else {
        detached::find(&sql, &settings.tables, &known).await?
    };
    let former = detached.iter().filter_map(DetachedTable::rows);
    let former = former.map(|rows| (&rows.settings, &rows.captured, Some(rows)));
    let current = settings.tables.iter().zip(&known);
    let current = current.map(|(table, captured)| (table, captured, None));
    for (table, captured, former) in current.chain(former) {
        let reader = TableReader::resolve(&sql, table, project, captured).await?;
        let window = ScanWindow::unresolved(captured, situation.records);
        let window = if situation.is_foreign() {
            // The floor comes from another cluster or database, or from a later state. So it does not show that a
            // row here is resolved.
            ScanWindow {
                from_xid: 0,
                ..window
            }
        } else {
            window
        };
        let window = former.map_or(window, |former| former.bounded(window));
        let unrecorded = Unrecorded::of(&sql, reader, table, window, &firsts).await?;
        tables.push(read_table(unrecorded, table.table.to_string(), limit).await?);
    }
    Ok(tables)
}

async fn read_table(
    mut unrecorded: Unrecorded<'_>,
    name: String,
    limit: u64,
) -> Result<TablePreview> {
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
        // Any position will do, because nothing is published or recorded.
        let Some(event) = unrecorded.event(&row, EventPosition::default()) else {
            continue;
        };
        table.rows += 1;
        match event {
            Ok(event) => {
                if !table.topics.contains_key(&*event.topic) {
                    table
                        .topics
                        .insert(event.topic.to_string(), TopicPreview::default());
                }
                let topic = table
                    .topics
                    .get_mut(&*event.topic)
                    .expect("invariant: inserted just now");
                topic.rows += 1;
                topic.bytes += event.event.message.len() as u64;
                if topic.first_event_ids.len() < LISTED_IDS {
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

impl TopicPreview {
    /// Updates the earliest and latest time. Compares the times as text, because all times of one SQL session
    /// have the same format.
    fn happened(&mut self, at: &str) {
        if self.oldest.as_deref().is_none_or(|oldest| at < oldest) {
            self.oldest = Some(at.to_owned());
        }
        if self.newest.as_deref().is_none_or(|newest| at > newest) {
            self.newest = Some(at.to_owned());
        }
    }
}
