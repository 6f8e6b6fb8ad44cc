//! `postrider slot list`: lists every slot of the cluster.

use std::process::ExitCode;

use printable::printable;
use slot_manager::{Slot, slots};

use super::{STATEMENT_TIMEOUT, session};
use crate::cli::wrap::{lines, terminal_width};
use crate::cli::{figures, output};
use crate::error::Result;
use crate::postgres::require_primary;
use crate::settings::Settings;

/// The arguments of `postrider slot list`.
#[derive(Debug, clap::Args)]
pub(super) struct SlotListArgs {
    /// Print JSON: {slots: [...]}
    #[arg(long)]
    json: bool,
}

const HEADINGS: [&str; 7] = ["SLOT", "PLUGIN", "DATABASE", "WAL", "LAG", "KEPT", "READER"];

pub(super) async fn run(settings: &Settings, args: &SlotListArgs) -> Result<ExitCode> {
    let sql = session(settings, STATEMENT_TIMEOUT).await?;
    let slots = slots::list(&sql).await?;
    if args.json {
        output::write_json(&serde_json::json!({ "slots": slots }));
    } else if slots.is_empty() {
        require_primary(&sql).await?;
        output::write("There are no replication slots. `postrider init --apply` creates one.\n");
    } else {
        let rows: Vec<[String; 7]> = slots.iter().map(row).collect();
        output::write(&fitting(&rows, terminal_width()));
    }
    Ok(ExitCode::SUCCESS)
}

fn row(slot: &Slot) -> [String; 7] {
    let bytes = |count: Option<u64>| count.map_or("-".to_owned(), figures::bytes);
    let status = serde_json::to_value(slot.wal_status).ok();
    [
        slot.slot_name.clone(),
        slot.plugin
            .clone()
            .unwrap_or_else(|| slot.slot_type.clone()),
        slot.database.clone().unwrap_or_else(|| "-".to_owned()),
        status
            .as_ref()
            .and_then(|s| s.as_str())
            .unwrap_or("-")
            .to_owned(),
        bytes(slot.lag_bytes),
        bytes(slot.retained_bytes),
        slot.holder
            .as_ref()
            .map_or("none".to_owned(), ToString::to_string),
    ]
}

/// Formats the slots as a table. On a terminal that is too narrow for the table, formats one block of lines
/// per slot.
fn fitting(rows: &[[String; 7]], width: Option<usize>) -> String {
    let table = aligned(rows);
    let widest = table.lines().map(|line| line.chars().count()).max();
    let Some(columns) = width.filter(|columns| widest > Some(*columns)) else {
        return table;
    };
    let block = |row: &[String; 7]| {
        let named = HEADINGS.iter().zip(row);
        let lines = named.map(|(heading, cell)| format!("{heading:<8}  {}\n", printable(cell)));
        lines.collect::<String>()
    };
    let blocks: Vec<String> = rows.iter().map(block).collect();
    lines(&blocks.join("\n"), Some(columns))
}

/// Aligns the values in columns as wide as their longest value. The last column is not padded. Escapes the values,
/// because the name of a database may contain control characters.
fn aligned(rows: &[[String; 7]]) -> String {
    let headings = HEADINGS.map(str::to_owned);
    let escaped = rows
        .iter()
        .map(|row| row.each_ref().map(|cell| printable(cell).into_owned()));
    let rows: Vec<[String; 7]> = escaped.collect();
    let all = || std::iter::once(&headings).chain(&rows);
    let width = |i: usize| all().map(|row| row[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEADINGS.len()).map(width).collect();
    all()
        .map(|row| {
            let cells = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"));
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_terminal_gets_one_block_per_slot() {
        let row = |slot: &str| {
            let reader = "process 4711 (postrider run, user shop_relay, from 10.0.0.7)";
            [slot, "pgoutput", "shop", "reserved", "0 B", "56 B", reader].map(str::to_owned)
        };
        let text = fitting(&[row("a"), row("b")], Some(60));
        assert!(
            text.lines().all(|line| line.chars().count() <= 60),
            "{text}"
        );
        assert!(text.contains("SLOT      b\nPLUGIN    pgoutput\n"), "{text}");
        assert!(fitting(&[row("a")], None).starts_with("SLOT  PLUGIN"));
    }

    #[test]
    fn columns_line_up_under_their_headings() {
        let row = [
            "a_long_slot_name",
            "pgoutput",
            "shop\u{1b}[2J",
            "reserved",
            "0 B",
            "56 B",
            "none",
        ];
        let text = aligned(&[row.map(str::to_owned)]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0].find("PLUGIN"), lines[1].find("pgoutput"));
        assert_eq!(lines[0].find("READER"), lines[1].find("none"));
        assert!(lines[1].contains("shop\\u{1b}[2J"), "{text:?}");
    }
}
