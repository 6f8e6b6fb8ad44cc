//! Checks the server's encoding, the columns that identify and order rows, which slot captures the
//! tables, and whether the slot is older than the publication.

use slot_manager::table_shape::{self, SeqColumn};
use slot_manager::{Finding, Severity, SlotName, cluster, quoted_identifier, slots};

use crate::capture::claim;
use crate::capture::shape::{self, FoundTable, Shape, UnfitColumn};
use crate::capture::tops;
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
            Ok(Some(shape)) => {
                findings.extend(columns(table, &shape));
                match sequence(sql, table, &shape).await {
                    Ok(found) => findings.extend(found),
                    Err(error) => findings.push(from_error(&error)),
                }
            }
            // The check of the publication reports a missing table, so this one does not.
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
    if shape.is_subscribed && shape.has_inserted_xid {
        let what = format!(
            "a subscription of logical replication writes into table {name}: if its rows contain the \
             inserted_xid of the other server, a recovery mistakes them for rows older than capturing \
             and does not publish them"
        );
        let remedy = format!(
            "on the server that sends the rows, leave inserted_xid and seq out of the publication's column \
             list (PostgreSQL 15 or later): `alter publication ... set table {name} (id, ...)`; this \
             warning remains, because a subscription does not show its columns"
        );
        warn("table-subscribed", what, &remedy);
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

/// Returns a code, a description and a remedy if the column that numbers the rows is missing, has no
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
                    "alter table {name} rename column seq to old_seq, because it is not an integer (or name \
                     another column in `columns.seq`); then {INIT}"
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
                "column {column} of {name} has no index: a recovery reads the whole table, instead of only its new rows"
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

/// Returns a finding if the sequence that fills the column `seq` is behind the highest `seq` of the table. Needs one
/// look-up in the index on `seq`. Finds nothing if our role has no right to read the table or the sequence.
pub(crate) async fn sequence(
    sql: &Sql,
    table: &TableSettings,
    shape: &Shape,
) -> Result<Option<Finding>> {
    let Some(seq) = shape.seq.as_ref().filter(|seq| seq.is_steady) else {
        return Ok(None);
    };
    let found = FoundTable {
        table: table.table.clone(),
        shape: shape.clone(),
    };
    // Read the sequence after the rows. In the other order, a row that is inserted in between would make the
    // sequence look as if it were behind.
    let tops = tops::tops(sql, &[found]).await?;
    let Some(top) = tops.seqs.first().and_then(Option::as_ref) else {
        return Ok(None);
    };
    let Some(sequence) = table_shape::sequence(sql, seq).await? else {
        return Ok(None);
    };
    let (name, column) = (&table.table, quoted_identifier(&seq.column));
    let (highest, next) = (top.seq, sequence.next);
    if next > highest {
        return Ok(None);
    }
    let sequence = sequence.name;
    let what = format!(
        "sequence {sequence} is behind column {column} of {name}: the next number is {next}, but a row has {highest}. A \
         recovery publishes the events of a key in the order of {column}, so later events come before earlier ones"
    );
    let literal = sequence.to_string().replace('\'', "''");
    let remedy = format!(
        "select setval('{literal}', (select max({column}) from {name})); rows that were inserted meanwhile keep their \
         numbers, so let the relay deliver them before the slot is lost or dropped"
    );
    Ok(Some(finding_with_remedy(
        Severity::Warning,
        "seq-behind",
        what,
        &remedy,
    )))
}

/// Returns a finding if the slot is older than the publication. Ignores errors of the statements, because
/// other checks report missing tables.
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
        // Other checks report missing tables and columns, so this one ignores the error.
        Ok(()) | Err(_) => None,
    }
}
