//! Whether the captured tables tell which of their rows are ours, and in what order.

use slot_manager::{Finding, Severity, SlotName};

use crate::capture::claim;
use crate::capture::record;
use crate::capture::shape::{self, Seq, Shape};
use crate::cli::findings::{finding, finding_with_remedy, from_error};
use crate::error::{Code, Result};
use crate::map::TableSettings;
use crate::postgres::Sql;
use crate::settings::Settings;

/// What `postrider init --apply` would do.
const INIT: &str = "run `postrider init --apply` as the owner of the table; \
                    docs/explanation/recovery.md says what is missing without it";

/// Looks at all captured tables, and at who owns them.
pub(super) async fn check(sql: &Sql, settings: &Settings) -> Result<Vec<Finding>> {
    let mut findings = vec![encoding(sql).await?];
    for table in &settings.tables {
        match shape::look(sql, table).await {
            Ok(Some(shape)) => findings.extend(columns(table, &shape)),
            // Missing: the publication's check says so.
            Ok(None) => {}
            Err(error) => findings.push(from_error(&error)),
        }
    }
    findings.extend(owner(sql, settings, &settings.slot).await);
    Ok(findings)
}

/// Text goes out as UTF-8, whatever the database holds it in.
async fn encoding(sql: &Sql) -> Result<Finding> {
    let row = sql.query_one("show server_encoding", &[]).await?;
    let encoding: &str = row.get(0);
    let what = format!("server_encoding is {encoding}");
    Ok(match encoding {
        "UTF8" => finding(Severity::Ok, "server-encoding", what),
        _ => finding_with_remedy(
            Severity::Warning,
            "server-encoding",
            format!(
                "{what}: PostgreSQL converts every row to UTF-8, and an event with bytes that have no \
                 UTF-8 is set aside in quarantine"
            ),
            "keep to text that has UTF-8, or move to a database in UTF8; `postrider quarantine list` \
             shows what was set aside",
        ),
    })
}

fn columns(table: &TableSettings, shape: &Shape) -> Vec<Finding> {
    let name = &table.table;
    let mut findings = Vec::new();
    let mut warn = |code, what: String, remedy: &str| {
        findings.push(finding_with_remedy(Severity::Warning, code, what, remedy));
    };
    if !shape.has_inserted_xid {
        let what = format!(
            "table {name} has no column inserted_xid: rows that were moved or copied are published \
             again, and a recovery goes by the row's xmin"
        );
        warn("inserted-xid-missing", what, INIT);
    }
    match &shape.seq {
        None => {
            let what = format!(
                "table {name} has no column that numbers its rows: a recovery reads the whole table, and \
                 orders the events of a key by their transactions"
            );
            warn("seq-missing", what, INIT);
        }
        Some(Seq {
            column,
            is_indexed: false,
            ..
        }) => {
            let what = format!(
                "column {column} of {name} has no index: a recovery sorts the table for each page"
            );
            let remedy = format!("create index concurrently on {name} ({column})");
            warn("seq-without-index", what, &remedy);
        }
        Some(Seq {
            column,
            is_steady: false,
            ..
        }) => {
            let what = format!(
                "column {column} of {name} does not come from a sequence without cache: an audit reads the \
                 whole table, and a recovery keeps the order of a key only if {column} grows with each insert"
            );
            let remedy = "let a sequence with `cache 1` be its default, or name another column in \
                          `columns.seq`";
            warn("seq-unsteady", what, remedy);
        }
        Some(_) => {}
    }
    if findings.is_empty() {
        let what = format!("table {name} tells its rows apart, and their order");
        findings.push(finding(Severity::Ok, "capture-columns", what));
    }
    findings
}

/// Whether another slot owns one of the tables.
async fn owner(sql: &Sql, settings: &Settings, slot: &SlotName) -> Option<Finding> {
    let looking = async {
        let found = claim::look(sql, &settings.tables).await?;
        let records = record::read(&**sql).await?;
        claim::refuse_others(&claim::matched(&found, &records), slot)
    };
    match looking.await {
        Err(error) if error.code() == Code::TableCaptured => Some(from_error(&error)),
        // Tables and columns that are missing are found elsewhere.
        Ok(()) | Err(_) => None,
    }
}
