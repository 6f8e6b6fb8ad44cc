//! `postrider audit`: checks that every row of the captured tables has an outcome.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use printable::printable;
use slot_manager::Severity;
use textwrap::core::display_width;

use super::paint::{self, Paint};
use super::{block_on, figures, output, report, wrap};
use crate::error::Result;
use crate::ops::LOCK_TIMEOUT;
use crate::ops::audit::{
    self, AuditReport, AuditResult, EventCount, FormerTableAudit, TableAudit, UnreadableTable,
};
use crate::ops::since::Since;
use crate::postgres::{connect, limiting_lock_waits};
use crate::settings::Settings;

/// Statement timeout for one page of rows.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Minimum time between two updates of the progress line.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// Maximum number of notes. A command writes notes if standard error cannot show its progress line
/// ([`ProgressLine::note_once`]).
const NOTES_MAX: usize = 20;

/// The arguments of `postrider audit`.
#[derive(Debug, clap::Args)]
pub(super) struct AuditArgs {
    /// Only rows from this time on: a duration such as 2d, or a time such as 2026-11-27T08:30:00Z
    #[arg(long, value_name = "TIME")]
    since: Option<Since>,
    /// Print JSON: {result, dispatch, slot_has_passed, tables: [...], quarantined_elsewhere, unreadable: [...]}
    #[arg(long)]
    json: bool,
}

pub(super) fn run(settings: &Settings, args: &AuditArgs) -> Result<ExitCode> {
    block_on(async {
        let sql = connect(settings.database()?, "postrider audit", STATEMENT_TIMEOUT).await?;
        sql.wait_without_limit();
        let mut line = ProgressLine::new();
        let report = audit::run(&sql, settings, args.since.as_ref(), |table, rows| {
            line.show(&format!("{table}: {rows} rows compared"));
        });
        let report = limiting_lock_waits(&sql, LOCK_TIMEOUT, report).await;
        line.clear();
        let report = report?;
        if args.json {
            output::write_json(&report);
        } else {
            output::write_wrapped(&text(&report, Paint::stdout()));
        }
        Ok(ExitCode::from(match report.result {
            AuditResult::Complete => 0,
            AuditResult::Waiting => 1,
            AuditResult::Missing => 2,
        }))
    })
}

/// A progress line on standard error, which is rewritten in place. Shown only on a terminal that can rewrite a line.
pub(super) struct ProgressLine {
    can_rewrite: bool,
    shown: Option<Instant>,
    /// Number of terminal rows that the line fills above its last row. 0 unless the line is wider than the terminal.
    rows_above: usize,
    /// The `reason` of each note that [`note_once`](Self::note_once) has written.
    noted: Vec<String>,
}

impl ProgressLine {
    pub(super) fn new() -> Self {
        Self {
            can_rewrite: std::io::stderr().is_terminal() && !paint::is_dumb(),
            shown: None,
            rows_above: 0,
            noted: Vec::new(),
        }
    }

    /// Replaces the line, unless it was last replaced less than [`PROGRESS_INTERVAL`] ago.
    pub(super) fn show(&mut self, text: &str) {
        let is_due = |shown: Instant| shown.elapsed() >= PROGRESS_INTERVAL;
        if self.can_rewrite && self.shown.is_none_or(is_due) {
            let text = printable(text);
            report::write_part(&format!("{}{text}", self.erasing()));
            let last = display_width(&text).saturating_sub(1);
            self.rows_above = wrap::error_width().map_or(0, |width| last / width);
            self.shown = Some(Instant::now());
        }
    }

    /// If the progress line cannot be shown, writes `text` instead, once for each `reason`.
    pub(super) fn note_once(&mut self, reason: &str, text: &str) {
        if !self.can_rewrite && self.is_new(reason) {
            report::write(text);
        }
    }

    /// Whether to write a note with this reason. False if an earlier note had the same reason, or if [`NOTES_MAX`]
    /// notes were written already. If true, also remembers the reason.
    fn is_new(&mut self, reason: &str) -> bool {
        let is_new =
            self.noted.len() < NOTES_MAX && !self.noted.iter().any(|known| known == reason);
        if is_new {
            self.noted.push(reason.to_owned());
        }
        is_new
    }

    /// Removes the line.
    pub(super) fn clear(&mut self) {
        if self.shown.take().is_some() {
            report::write_part(&self.erasing());
        }
    }

    /// The control sequences that erase the line and move the cursor to its beginning.
    fn erasing(&self) -> String {
        match self.rows_above {
            0 => "\r\x1b[K".to_owned(),
            rows => format!("\x1b[{rows}A\r\x1b[J"),
        }
    }
}

fn text(report: &AuditReport, paint: Paint) -> String {
    let tables = report.tables.iter().map(|table| of_table(table, paint));
    let mut text: String = tables.collect();
    let elsewhere = &report.quarantined_elsewhere;
    for FormerTableAudit { table, quarantined } in &elsewhere.former_tables {
        let number = paint.severity(Severity::Warning, &format!("{quarantined:>10}"));
        text += &format!(
            "{} (no longer captured; only its events in quarantine were counted)\n{number}  in quarantine\n",
            printable(table)
        );
    }
    if elsewhere.without_row > 0 {
        let number = paint.severity(Severity::Warning, &format!("{:>10}", elsewhere.without_row));
        text += &format!(
            "outbox.dispatch\n{number}  in quarantine, and their rows are in none of these tables, or without \
             a readable id: `postrider quarantine list` shows the events\n"
        );
    }
    for UnreadableTable { table, why, remedy } in &report.unreadable {
        let why = format!("cannot be read: {}", printable(why));
        text += &format!(
            "{}: {}\n            hint: {}\n",
            printable(table),
            paint.severity(Severity::Warning, &why),
            printable(remedy)
        );
    }
    let (severity, conclusion) = match report.result {
        AuditResult::Waiting if !report.unreadable.is_empty() => (
            Severity::Warning,
            "Not complete: some former tables cannot be searched, and may have rows of unpublished events.",
        ),
        AuditResult::Waiting if !report.slot_has_passed => (
            Severity::Warning,
            "The events above wait. The slot has not yet passed the newest rows, so nobody knows whether the \
             stream has left out any of them: `postrider slot show` says why.",
        ),
        AuditResult::Complete => (Severity::Ok, "Complete: every event has its outcome."),
        AuditResult::Waiting => (
            Severity::Warning,
            "Nothing is missing; the events above wait.",
        ),
        AuditResult::Missing => (
            Severity::Error,
            "Missing: the slot has passed events that have no record. A running relay publishes them within \
             minutes, except rows below the floor of their table (outbox.capture); `postrider event ID` \
             shows each.",
        ),
    };
    text += &format!("\n{}\n", paint.severity(severity, conclusion));
    if report.records.may_lack_records() {
        text += "With dispatch = exceptions published events have no record, so this audit cannot \
                 find a missing event: it counts every row that the slot has passed as published.\n";
    }
    if !report.slot_has_passed && report.result != AuditResult::Waiting {
        text += "The slot has not yet passed the newest rows, so those without a record count as \
                 waiting: `postrider slot show` says why.\n";
    }
    text
}

fn of_table(table: &TableAudit, paint: Paint) -> String {
    let rows = figures::count(table.rows, "row");
    let mut text = format!("{}: {rows}\n", printable(&table.table));
    let mut line = |count: &EventCount, severity, what: &str| {
        if count.events == 0 {
            return;
        }
        let number = paint.severity(severity, &format!("{:>10}", count.events));
        text += &format!("{number}  {what}\n");
        if severity == Severity::Ok || severity == Severity::Info {
            return;
        }
        if let Some(oldest) = &count.oldest {
            text += &format!("            oldest from {oldest}\n");
        }
        for id in &count.first_ids {
            text += &format!("            {}\n", printable(id));
        }
    };
    line(&table.published, Severity::Ok, "published");
    line(
        &table.published_without_record,
        Severity::Ok,
        "published, without a record (dispatch = exceptions)",
    );
    line(&table.discarded, Severity::Ok, "discarded by an operator");
    line(
        &table.not_captured,
        Severity::Info,
        "committed before capturing began: never published",
    );
    line(
        &table.without_id,
        Severity::Warning,
        "without an id: look for them in `postrider quarantine list`",
    );
    line(&table.quarantined, Severity::Warning, "in quarantine");
    line(
        &table.released,
        Severity::Warning,
        "released from quarantine, not published yet",
    );
    line(&table.waiting, Severity::Warning, "waiting for the relay");
    line(&table.missing, Severity::Error, "missing");
    for (events, ids, what) in [
        (
            table.sent_again,
            &table.first_ids_sent_again,
            "were sent again because the first answer was lost, so Pub/Sub may have stored them twice",
        ),
        (
            table.recorded_twice,
            &table.first_ids_recorded_twice,
            "are recorded as published under more than one commit, so Pub/Sub has stored them twice",
        ),
    ] {
        if events == 0 {
            continue;
        }
        text += &format!("{events:>10}  {what}\n");
        for id in ids {
            text += &format!("            {}\n", printable(id));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_written_once_for_each_reason() {
        let mut line = ProgressLine::new();
        let noted = ["r1", "r2", "r1", "r2", "r3"].map(|reason| line.is_new(reason));
        assert_eq!(noted, [true, true, false, false, true]);
        let noted = (0..NOTES_MAX).filter(|n| line.is_new(&n.to_string()));
        assert_eq!(noted.count(), NOTES_MAX - 3);
    }
}
