//! Formats the state of the relay for one screen: first the state and what to do, then the details.

use std::time::Duration;

use printable::printable;

use crate::cli::figures;
use crate::cli::paint::Paint;
use crate::cli::slot::screen as slot_screen;
use crate::cli::wrap::wrapped;
use crate::condition::PruneRun;
use crate::ops::slot::QuarantineStatus;
use crate::ops::status::{EventRates, RelayStatus, ShownPruning};

/// Width of the labels.
const LABEL: usize = 11;

/// Maximum number of failing topics that are listed.
const TOPICS_SHOWN: usize = 8;

/// The whole text, wrapped at `width`.
pub(super) fn text(status: &RelayStatus, paint: Paint, width: Option<usize>) -> String {
    let verdict = &status.slot.verdict;
    let word = slot_screen::word(verdict);
    let painted = paint.severity(verdict.severity, &word);
    // Colour the state only after wrapping, because escape codes would count as columns.
    let headline = slot_screen::headline(&word, verdict);
    let verdict_text = wrapped(&printable(&headline), 0, width);
    let mut text = format!("{}\n", verdict_text.replacen(&word, &painted, 1));
    if let Some(remedy) = &verdict.remedy {
        let remedy = wrapped(&printable(remedy), "-> ".len(), width);
        text += &format!("-> {remedy}\n");
    }
    text += "\n";
    for (label, value) in lines(status) {
        let value = wrapped(&printable(&value), LABEL + 2, width);
        text += &format!("{label:LABEL$}  {value}\n");
    }
    text
}

/// Label and value of each line below the verdict.
pub(super) fn lines(status: &RelayStatus) -> Vec<(&'static str, String)> {
    let snapshot = &status.slot;
    let server = snapshot.cluster.major_version();
    let mut lines = vec![(
        "database",
        format!("{}, PostgreSQL {server}", snapshot.cluster.database),
    )];
    lines.extend(slot_screen::caught_up(&snapshot.verdict));
    if let Some(slot) = &snapshot.slot {
        let reader = format!("{}: {}", snapshot.name, slot_screen::reader(snapshot, slot));
        lines.push(("slot", reader));
        lines.extend(slot_screen::warning("warning", snapshot));
        lines.push(("lag", slot_screen::lag(snapshot, slot)));
        if let Some(rates) = status.rates {
            lines.push(("events", event_rates(rates)));
        }
        if let Some(rates) = snapshot.rates {
            lines.push(("WAL", slot_screen::rates(rates)));
        }
        lines.push(("WAL kept", slot_screen::kept(snapshot, slot)));
        for (i, holder) in snapshot.holders.iter().enumerate() {
            lines.push((if i == 0 { "held by" } else { "" }, holder.to_string()));
            lines.push(("", format!("-> {}", holder.remedy())));
        }
    } else {
        lines.push(("slot", format!("{} does not exist", snapshot.name)));
    }
    if let Some(why) = snapshot
        .relay
        .as_ref()
        .and_then(|row| row.recovering.as_deref())
    {
        lines.push(("recovery", format!("due or running ({why})")));
    }
    lines.push(("publication", publication(status)));
    topics(status, &mut lines);
    lines.push(("quarantine", quarantine(snapshot.quarantine.as_ref())));
    if let Some(ShownPruning {
        ended_seconds_ago,
        run,
    }) = status.pruning()
    {
        lines.push(("pruning", pruning(run, *ended_seconds_ago)));
        lines.extend(run.notes.iter().map(|note| ("", note.clone())));
        lines.extend(run.hint.iter().map(|hint| ("", format!("-> {hint}"))));
    }
    lines
}

fn pruning(run: &PruneRun, seconds_ago: f64) -> String {
    let ago = Duration::try_from_secs_f64(seconds_ago).unwrap_or_default();
    let ago = figures::time(ago);
    if let Some(code) = &run.code {
        let what = run.what.as_deref().unwrap_or_default();
        return format!("failed {ago} ago ({code}): {what}");
    }
    let mut text = format!(
        "{ago} ago: {} and {} deleted",
        figures::count(run.rows, "row"),
        figures::count(run.records, "record")
    );
    if let Some(why) = &run.postponed {
        text += &format!("; old records stay for now: {why}");
    }
    text
}

fn publication(status: &RelayStatus) -> String {
    let publication = &status.slot.publication;
    match publication.problems.len() {
        0 => format!(
            "{} covers all rows of {}",
            publication.name,
            status.tables.join(", ")
        ),
        problems => format!(
            "{}: {}; `postrider check` shows the statements that correct it",
            publication.name,
            figures::count(problems as u64, "problem")
        ),
    }
}

fn topics(status: &RelayStatus, lines: &mut Vec<(&'static str, String)>) {
    let Some(condition) = status.condition() else {
        return;
    };
    for (i, topic) in condition.topics.iter().take(TOPICS_SHOWN).enumerate() {
        let label = if i == 0 { "topics" } else { "" };
        lines.push((label, slot_screen::topic_line(topic)));
        lines.push(("", format!("-> {}", topic.hint)));
    }
    let more = condition.failing_topics.saturating_sub(TOPICS_SHOWN);
    if more > 0 {
        lines.push((
            "",
            format!("and {} more", figures::count(more as u64, "failing topic")),
        ));
    }
}

fn quarantine(quarantine: Option<&QuarantineStatus>) -> String {
    let Some(QuarantineStatus { events, keys }) = quarantine else {
        return "unknown: outbox.dispatch is missing or not readable".to_owned();
    };
    let Some(first) = keys.first() else {
        return match events {
            0 => "empty".to_owned(),
            events => format!("{} released", figures::count(*events, "event")),
        };
    };
    format!(
        "{}, first of key {:?}: {}; `postrider quarantine list` shows why",
        figures::count(*events, "event"),
        first.ordering_key,
        first.first_event
    )
}

pub(super) fn event_rates(rates: EventRates) -> String {
    format!(
        "{:.0}/s written, {:.0}/s recorded",
        rates.written_per_second, rates.recorded_per_second
    )
}
