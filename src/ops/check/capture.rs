//! Checks the server's encoding, the columns that identify and order rows, which slot captures the
//! tables, and whether the slot is older than the publication.

use slot_manager::table_shape::SeqColumn;
use slot_manager::{Finding, Severity, SlotName, cluster, quoted_identifier, slots};

use crate::capture::claim;
use crate::capture::shape::{self, Shape, UnfitColumn};
use crate::error::{Code, Result};
use crate::mapping::TableSettings;
use crate::ops::finding::{finding, finding_with_remedy, from_error};
use crate::ops::slot::before_publication;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::capture_record;

/// The remedy for a missing column.
const INIT: &str = "run `postrider init --apply` as the owner of the table; \
                    docs/explanation/recovery.md explains the cost of a missing column";

/// Checks the server's encoding, all captured tables, which slot owns them, and where the slot
/// begins.
pub(super) async fn check(sql: &Sql, settings: &Settings) -> Result<Vec<Finding>> {
    let mut findings = vec![encoding(sql).await?];
    for table in &settings.tables {
        match shape::read(sql, table).await {
            Ok(Some(shape)) => findings.extend(columns(table, &shape)),
            // The check of the publication reports a missing table.
            Ok(None) => {}
            Err(error) => findings.push(from_error(&error)),
        }
    }
    findings.extend(owner(sql, settings, &settings.slot).await);
    findings.extend(slot_start(sql, &settings.slot).await);
    Ok(findings)
}

/// Checks the server's encoding. If it is not UTF-8, PostgreSQL converts all text for the relay, and the
/// conversion may fail.
async fn encoding(sql: &Sql) -> Result<Finding> {
    let encoding = cluster::server_encoding(sql).await?;
    let what = format!("server_encoding is {encoding}");
    Ok(match encoding.as_str() {
        "UTF8" => finding(Severity::Ok, "server-encoding", what),
        _ => finding_with_remedy(
            Severity::Warning,
            "server-encoding",
            format!(
                "{what}: PostgreSQL converts every row to UTF-8, and an event with bytes that it cannot \
                 convert goes into quarantine"
            ),
            "store only text that converts to UTF-8, or move to a database with encoding UTF8; \
             `postrider quarantine list` shows the affected events",
        ),
    })
}

/// Returns the findings about the columns of one table.
pub(crate) fn columns(table: &TableSettings, shape: &Shape) -> Vec<Finding> {
    let name = &table.table;
    let mut findings = Vec::new();
    let mut warn = |code, what: String, remedy: &str| {
        findings.push(finding_with_remedy(Severity::Warning, code, what, remedy));
    };
    if let Some(unfit) = shape.unfit_inserted_xid {
        let is = match unfit {
            UnfitColumn::Type => "is not of type xid8",
            UnfitColumn::Value => "is not `not null default pg_current_xact_id()`",
        };
        let what = format!(
            "column inserted_xid of {name} {is}, so it is not used: rows that were moved or copied are \
             published again, and a recovery relies on the row's xmin"
        );
        let remedy = format!(
            "alter table {name} rename column inserted_xid to old_inserted_xid; then {INIT}"
        );
        warn("inserted-xid-unfit", what, &remedy);
    } else if !shape.has_inserted_xid {
        let id = table.columns.id.as_deref().unwrap_or("id");
        let is_numbered = shape.seq.as_ref().is_some_and(|seq| seq.column == id);
        let numbers = if is_numbered {
            ", new events are lost if the numbers of its ids begin again"
        } else {
            ""
        };
        let what = format!(
            "table {name} has no column inserted_xid: rows that were moved or copied are published \
             again{numbers}, and a recovery relies on the row's xmin"
        );
        warn("inserted-xid-missing", what, INIT);
    }
    if let Some((code, what, remedy)) = seq_fault(table, shape) {
        warn(code, what, &remedy);
    }
    if findings.is_empty() {
        let what = format!("table {name} has columns that identify and order its rows");
        findings.push(finding(Severity::Ok, "capture-columns", what));
    }
    findings
}

/// Returns code, description and remedy if the column that numbers the rows is missing, has no
/// index, or is not filled by a sequence with `cache 1`.
fn seq_fault(table: &TableSettings, shape: &Shape) -> Option<(&'static str, String, String)> {
    let name = &table.table;
    match &shape.seq {
        None => {
            let what = format!(
                "table {name} has no column that numbers its rows: a recovery reads the whole table, and \
                 orders the events of a key by their transactions"
            );
            let remedy = match (&table.columns.seq, shape.has_column_seq) {
                (Some(_), _) => format!("leave `columns.seq` out, then {INIT}"),
                (None, true) => format!(
                    "alter table {name} rename column seq to old_seq, because it is no whole number (or \
                     name another column in `columns.seq`); then {INIT}"
                ),
                (None, false) => INIT.to_owned(),
            };
            Some(("seq-missing", what, remedy))
        }
        Some(SeqColumn {
            column,
            is_indexed: false,
            ..
        }) => {
            let what = format!(
                "column {column} of {name} has no index: a recovery sorts the table for each page"
            );
            let concurrently = if shape.is_partitioned() {
                ""
            } else {
                " concurrently"
            };
            let column = quoted_identifier(column);
            let remedy = format!("create index{concurrently} on {name} ({column})");
            Some(("seq-without-index", what, remedy))
        }
        Some(SeqColumn {
            column,
            is_steady: false,
            ..
        }) => {
            let what = format!(
                "column {column} of {name} has no default from a sequence with `cache 1`: an audit reads the \
                 whole table, and a recovery keeps the order of a key only if {column} grows with each insert"
            );
            let remedy = "give it a default from a sequence with `cache 1`, or name another column in \
                          `columns.seq`";
            Some(("seq-unsteady", what, remedy.to_owned()))
        }
        Some(_) => None,
    }
}

/// Returns a finding if the slot is older than the publication. Ignores errors, because other checks
/// report missing tables.
async fn slot_start(sql: &Sql, slot: &SlotName) -> Option<Finding> {
    let slot = slots::find(sql, slot).await.ok()??;
    let records = capture_record::read(&**sql).await.ok()?;
    before_publication(&slot, &records)
}

/// Returns a finding if another slot owns one of the tables.
async fn owner(sql: &Sql, settings: &Settings, slot: &SlotName) -> Option<Finding> {
    let looking = async {
        let found = claim::find_tables(sql, &settings.tables).await?;
        let records = capture_record::read(&**sql).await?;
        claim::refuse_others(&found, &records, slot)
    };
    match looking.await {
        Err(error) if error.code() == Code::TableCaptured => Some(from_error(&error)),
        // Other checks report missing tables and columns.
        Ok(()) | Err(_) => None,
    }
}
