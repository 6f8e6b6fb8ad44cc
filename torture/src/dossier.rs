//! Reports a failed schedule: prints the most important parts on the terminal, and writes
//! everything to a file.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::PathBuf;

use pubsub_emulator::Attempt;
use xtask::step;

use crate::schedule::Outcome;
use crate::verdict::{Event, Evidence, Violation};

/// How many violations of each kind the summary shows. The summary must be short, because people
/// usually keep only the end of a log.
const VIOLATIONS_SHOWN: usize = 2;
const LOG_LINES_SHOWN: usize = 60;
const LOG_LINES_SUMMED_UP: usize = 4;
const LINE_SUMMED_UP: usize = 300;

/// Writes everything to a file and prints the end of the relays' logs. Returns a summary: the plan,
/// what happened, the last log lines, the violations, and the command that replays the schedule.
/// The most important parts come last, because people often keep only the end of a log.
pub(crate) fn show(seed: u64, outcome: &Outcome, server_log: &str) -> String {
    let index = outcome.plan.index;
    let file = step::target_folder()
        .join("torture")
        .join(format!("seed-{seed}-schedule-{index}.txt"));
    let head = head(seed, outcome);
    let log = &outcome.relay_log;
    let violations = &outcome.verdict.violations;
    let all: Vec<String> = violations.iter().map(ToString::to_string).collect();
    eprintln!("\n-- the end of the relays' logs");
    for line in last(log, LOG_LINES_SHOWN) {
        eprintln!("{line}");
    }
    let whole = format!(
        "{head}-- violations\n{}\n-- the relays' logs\n{}\n-- events: topic, key, version, id, transaction, its end, places, attempts\n{}\n\
         -- attempts to publish\n{}\n\
         -- PostgreSQL's log\n{server_log}\n",
        all.join("\n"),
        log.join("\n"),
        outcome.history.join("\n"),
        attempts(&outcome.attempts),
    );
    match write(&file, &whole) {
        Ok(()) => eprintln!("-- all of it: {}", file.display()),
        Err(error) => eprintln!("-- {} was not written: {error}", file.display()),
    }
    let short = |line: &String| line.chars().take(LINE_SUMMED_UP).collect();
    let log_end: Vec<String> = last(log, LOG_LINES_SUMMED_UP).iter().map(short).collect();
    format!(
        "{head}-- the end of the relays' logs\n{}\n-- {} violations\n{}\n\
         schedule {index}, again: cargo xtask torture --seed {seed} --only {index}",
        log_end.join("\n"),
        all.len(),
        of_each_kind(violations).join("\n"),
    )
}

fn last(lines: &[String], count: usize) -> &[String] {
    &lines[lines.len().saturating_sub(count)..]
}

/// Returns one line for each of the first violations of each kind. If a kind has more violations, one more
/// line counts them.
fn of_each_kind(violations: &[Violation]) -> Vec<String> {
    let mut kinds: Vec<(_, Vec<&Violation>)> = Vec::new();
    for violation in violations {
        let kind = violation.kind();
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, found)) => found.push(violation),
            None => kinds.push((kind, vec![violation])),
        }
    }
    let lines = |(_, found): &(_, Vec<&Violation>)| {
        let shown = found.len().min(VIOLATIONS_SHOWN);
        let more = found.len() - shown;
        let mut lines: Vec<String> = found[..shown].iter().map(ToString::to_string).collect();
        if more > 0 {
            lines.push(format!("  and {more} more of this kind"));
        }
        lines
    };
    kinds.iter().flat_map(lines).collect()
}

fn write(file: &PathBuf, text: &str) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(file, text)
}

fn head(seed: u64, outcome: &Outcome) -> String {
    let index = outcome.plan.index;
    let mut text = format!(
        "== schedule {index} of seed {seed} failed\n{}\n\
         -- what happened, seconds on the journal's clock\n",
        outcome.plan
    );
    for occurrence in &outcome.occurrences {
        // Writing to a String cannot fail, here and in the calls below.
        let _ = writeln!(
            text,
            "{:8.3} to {:8.3}  {}",
            occurrence.from.as_secs_f64(),
            occurrence.to.as_secs_f64(),
            occurrence.fault
        );
    }
    text
}

/// Returns one line per event with everything that happened to the event, sorted by topic, key and
/// version.
pub(crate) fn history(evidence: &Evidence) -> Vec<String> {
    let mut sent: HashMap<&str, Vec<u64>> = HashMap::new();
    for attempt in &evidence.attempts {
        for id in attempt.event_ids.iter().flatten() {
            sent.entry(id).or_default().push(attempt.sequence);
        }
    }
    let mut places: HashMap<&str, Vec<String>> = HashMap::new();
    for record in &evidence.records {
        let place = format!("{:X}/{}", record.commit_lsn, record.ordinal);
        places.entry(&record.event_id).or_default().push(place);
    }
    let mut events: Vec<&Event> = evidence.events.iter().collect();
    events.sort_by_key(|event| (&event.topic, &event.key, event.version));
    let line = |event: &&Event| {
        let id = event.id.as_str();
        format!(
            "{} {:?} {} {id} {} {:X?} {:?} {:?}",
            event.topic,
            event.key,
            event.version,
            event.transaction,
            evidence.committed_by.get(&event.transaction),
            places.get(id),
            sent.get(id),
        )
    };
    events.iter().map(line).collect()
}

fn attempts(attempts: &[Attempt]) -> String {
    let mut text = String::new();
    for attempt in attempts {
        let _ = writeln!(
            text,
            "{:6} {:?} since {:?} {:8.3} stored {:?} ended {:?} {:?} {} key {:?}: {} events, first {:?}",
            attempt.sequence,
            attempt.peer,
            attempt.connected,
            attempt.received.as_secs_f64(),
            attempt.stored,
            attempt.ended,
            attempt.answer,
            attempt.topic,
            attempt.ordering_key,
            attempt.event_ids.len(),
            attempt.event_ids.first(),
        );
    }
    text
}
