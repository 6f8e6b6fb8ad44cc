//! Formats the state of the relay for one screen: first the state and what to do, then the details.

use std::time::Duration;

use printable::printable;

use crate::cli::figures;
use crate::cli::paint::Paint;
use crate::cli::slot::screen as slot_screen;
use crate::cli::wrap::wrapped;
use crate::condition::{KeyCondition, PruneRun};
use crate::ops::slot::{BlockedKeyStatus, QuarantineStatus};
use crate::ops::status::{EventRates, RelayStatus, ShownPruning};

/// Width of the labels.
const LABEL: usize = 11;

/// Maximum number of failing topics that are listed.
const TOPICS_SHOWN: usize = 8;

/// Returns the whole text, wrapped at `width`.
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

/// Returns the label and the value of each line below the verdict.
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
    lines.extend(slot_screen::recovery(snapshot));
    lines.push(("publication", publication(status)));
    topics(status, &mut lines);
    let kept = snapshot.quarantine.as_ref();
    lines.push(("quarantine", quarantine(kept)));
    let keys = kept.iter().flat_map(|kept| &kept.keys);
    lines.extend(keys.map(|key| ("", blocked_key_line(key))));
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
        0 if publication.is_locked => format!(
            "{}: unknown, because a lock on a captured table prevents the check",
            publication.name
        ),
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
        lines.extend(topic.keys.iter().map(|key| ("", key_line(key))));
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

/// Formats the line of a key whose events wait for a failing topic.
fn key_line(key: &KeyCondition) -> String {
    format!(
        "key {:?}: {}, the oldest {} old",
        key.ordering_key,
        figures::count(key.waiting_events, "event"),
        seconds(key.oldest_seconds)
    )
}

fn seconds(seconds: f64) -> String {
    figures::time(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

/// Formats the line of a key whose events wait in quarantine.
fn blocked_key_line(key: &BlockedKeyStatus) -> String {
    let topic = key.topic.rsplit('/').next().unwrap_or_default();
    let name = match (topic, key.ordering_key.as_str()) {
        ("", "") => "without a topic and a key".to_owned(),
        ("", key) => format!("key {key:?}"),
        (topic, "") => format!("{topic}, without a key"),
        (topic, key) => format!("{topic}, key {key:?}"),
    };
    format!(
        "{name}: {}{}, the oldest {} old, first {}",
        figures::at_least(key.has_more()),
        figures::count(key.events, "event"),
        seconds(key.oldest_seconds),
        key.first_event
    )
}

fn quarantine(quarantine: Option<&QuarantineStatus>) -> String {
    let Some(QuarantineStatus { events, keys }) = quarantine else {
        return "unknown: outbox.dispatch is missing, locked or not readable".to_owned();
    };
    let events = figures::count(*events, "event");
    match keys.len() {
        0 if events.starts_with("0 ") => "empty".to_owned(),
        0 => format!("{events} released"),
        _ => {
            format!("{events}; `postrider quarantine list` shows why; the keys that wait longest:")
        }
    }
}

pub(super) fn event_rates(rates: EventRates) -> String {
    format!(
        "{:.0}/s written, {:.0}/s recorded",
        rates.written_per_second, rates.recorded_per_second
    )
}
