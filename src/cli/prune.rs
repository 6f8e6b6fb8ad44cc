//! `postrider prune`: deletes old events with a final outcome, and old records.

use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

use printable::printable;

use super::audit::ProgressLine;
use super::{block_on, figures, output, signals};
use crate::error::{Code, Error, Result};
use crate::ops::prune::{
    self, PruneReport, PruneRequest, PruneStep, PrunedDay, PrunedTable, Pruning,
};
use crate::postgres::connect;
use crate::settings::{Settings, parse_duration};

/// Statement timeout of one chunk.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Exit code if the run was stopped, or if some old records cannot be deleted yet.
const POSTPONED: u8 = 1;

/// The arguments of `postrider prune`.
#[derive(Debug, clap::Args)]
pub(super) struct PruneArgs {
    /// Only events whose outcome was recorded longer ago than this, such as 30d, 12h or 90min
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    older_than: Duration,
    /// Only count: how many rows of which table would be deleted
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// Delete the rows; required unless --dry-run is given
    #[arg(long)]
    yes: bool,
    /// Rows that one step reads; each step is one short transaction
    #[arg(long, value_name = "ROWS", default_value_t = prune::CHUNK,
          value_parser = clap::value_parser!(u32).range(100..=100_000))]
    chunk: u32,
    /// Pause after each step that deleted something
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = parse_duration)]
    pause: Duration,
    /// Print JSON: {dry_run, finished, tables: [...], dispatch}
    #[arg(long)]
    json: bool,
}

pub(super) fn run(settings: &Settings, args: &PruneArgs) -> Result<ExitCode> {
    if !args.dry_run && !args.yes {
        let what = "deleting old events needs --yes; nothing was done";
        return Err(Error::new(Code::ConfirmationMissing, what)
            .hint("--dry-run shows how many rows would be deleted; then use --yes instead"));
    }
    block_on(async {
        let sql = connect(settings.database()?, "postrider prune", STATEMENT_TIMEOUT).await?;
        sql.wait_without_limit();
        let request = PruneRequest {
            older_than: args.older_than,
            chunk: args.chunk,
            pause: args.pause,
            who: Pruning::Command {
                dry_run: args.dry_run,
            },
        };
        let is_stopped = signals::watch_steps()?;
        let mut line = ProgressLine::new();
        let mut on_step = |step: &PruneStep<'_>| {
            line.show(&progress(step, args.dry_run));
            if step.what == prune::WAITING {
                line.note_once(prune::WAITING, prune::WAITING);
            }
            !is_stopped.load(Ordering::Relaxed)
        };
        let report = prune::run(&sql, settings, &request, &mut on_step).await;
        line.clear();
        let report = report?;
        if args.json {
            output::write_json(&report);
        } else {
            output::write_wrapped(&text(&report));
        }
        Ok(if report.finished && report.dispatch.postponed.is_none() {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(POSTPONED)
        })
    })
}

fn progress(step: &PruneStep<'_>, is_dry_run: bool) -> String {
    if step.examined == 0 {
        return step.what.to_owned();
    }
    let deleted = if is_dry_run { "to delete" } else { "deleted" };
    let bar = step.share.map_or_else(String::new, figures::bar);
    format!(
        "{bar}{}: {} rows {deleted}, {} read",
        step.what, step.deleted, step.examined
    )
}

fn text(report: &PruneReport) -> String {
    let mut text = if report.dry_run {
        "Rows that would be deleted:\n".to_owned()
    } else {
        "Rows deleted:\n".to_owned()
    };
    let of_tables = report.tables.iter();
    text.extend(of_tables.map(|table| of_table(table, report.dry_run)));
    let dispatch = &report.dispatch;
    text += &format!("{:>10}  outbox.dispatch", dispatch.rows);
    if let Some(oldest) = &dispatch.oldest {
        text += &format!(", the oldest recorded at {oldest}");
    }
    text += "\n";
    if dispatch.of_rows > 0 {
        text += &format!(
            "            kept: {} of rows that stay in an outbox table\n",
            figures::count(dispatch.of_rows, "old record"),
        );
    }
    for note in &dispatch.notes {
        text += &format!("            note: {}\n", printable(note));
    }
    if let Some(why) = &dispatch.postponed {
        text += &format!(
            "            the other records stay for now: {}\n",
            printable(why)
        );
    }
    let is_untouched = |table: &PrunedTable| table.rows == 0 && table.days.is_empty();
    let is_empty = dispatch.rows == 0 && report.tables.iter().all(is_untouched);
    text += match (report.dry_run, report.finished) {
        (false, true) if is_empty => "\nNo row can be deleted now.\n",
        (true, true) => "\nNothing was deleted: replace --dry-run with --yes to delete.\n",
        (true, false) => "\nStopped. Nothing was deleted.\n",
        (false, true) => "\nDeleted. Autovacuum frees the space for new rows.\n",
        (false, false) => "\nStopped before the end: run the command again to continue.\n",
    };
    text
}

fn of_table(table: &PrunedTable, is_dry_run: bool) -> String {
    let mut text = format!("{:>10}  {}", table.rows, printable(&table.table));
    if let Some(oldest) = &table.oldest {
        text += &format!(", the oldest from {oldest}");
    }
    text += "\n";
    let whole = if is_dry_run {
        "would be dropped as a whole"
    } else {
        "dropped as a whole"
    };
    for PrunedDay { day, rows } in &table.days {
        text += &format!(
            "            {}: {whole}, {}\n",
            printable(day),
            figures::count(*rows, "row")
        );
    }
    for day in &table.days_added {
        text += &format!("            {}: partition added\n", printable(day));
    }
    for note in &table.notes {
        text += &format!("            note: {}\n", printable(note));
    }
    let kept = &table.kept;
    for (rows, why) in [
        (kept.quarantined, "in quarantine"),
        (kept.waiting, "without an outcome"),
        (
            kept.unconfirmed,
            "published, but not yet confirmed by the slot",
        ),
        (
            kept.above_floor,
            "published, but newer than the last audit of the table: a running relay audits every five \
             minutes, so prune again later",
        ),
        (
            kept.not_captured,
            "from before the relay captured the table",
        ),
        (
            kept.without_time,
            "without a record, in a table without a column `occurred_at` to say how old they are",
        ),
    ] {
        if rows > 0 {
            text += &format!("            kept: {} {why}\n", figures::count(rows, "row"));
        }
    }
    text
}
