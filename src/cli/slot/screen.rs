//! Formats the state of a slot for one screen: first the state and what to do, then the details.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use printable::printable;
use slot_manager::{Severity, Slot, WalStatus};

use crate::cli::figures;
use crate::cli::paint::{self, Paint};
use crate::cli::wrap::wrapped;
use crate::condition::{State, TopicCondition, Verdict};
use crate::ops::pending::AgeClock;
use crate::ops::slot::{Rates, SlotSnapshot};

/// Exit code for a slot that is missing or cannot be inspected, by the Nagios convention.
pub(in crate::cli) const UNKNOWN: u8 = 3;

/// Width of the labels.
const LABEL: usize = 10;

/// Returns the whole text, wrapped at `width`.
pub(super) fn text(snapshot: &SlotSnapshot, paint: Paint, width: Option<usize>) -> String {
    let verdict = &snapshot.verdict;
    let mut text = format!(
        "slot {}, database {}, PostgreSQL {}\n\n",
        snapshot.name,
        printable(&snapshot.cluster.database),
        snapshot.cluster.major_version()
    );
    let word = word(verdict);
    let painted = paint.severity(verdict.severity, &word);
    let state = value_text(&headline(&word, verdict), width);
    // Colour the state only after wrapping, because escape codes would count as columns.
    text += &format!(
        "{:LABEL$}  {}\n",
        "state",
        state.replacen(&word, &painted, 1)
    );
    for (label, value) in lines(snapshot) {
        let value = value_text(&value, width);
        let value = if value.starts_with("-> ") {
            paint.faint(&value)
        } else {
            value
        };
        text += &format!("{label:LABEL$}  {value}\n");
    }
    text
}

/// Returns the state in capital letters, with spaces instead of hyphens.
pub(in crate::cli) fn word(verdict: &Verdict) -> String {
    verdict.state.name().to_uppercase().replace('-', " ")
}

/// Returns the line about the time until the relay has caught up. `None` if the relay is not catching
/// up.
pub(in crate::cli) fn caught_up(verdict: &Verdict) -> Option<(&'static str, String)> {
    let text = match verdict.caught_up_in {
        Some(time) => format!("in about {}, at the present rate", figures::time(time)),
        None if verdict.state == State::CatchingUp => {
            "unknown: the lag does not shrink, or the relay has not measured it yet".to_owned()
        }
        None => return None,
    };
    Some(("caught up", text))
}

/// Returns the exit code of a state, by the Nagios convention.
pub(in crate::cli) fn exit_code(verdict: &Verdict) -> ExitCode {
    ExitCode::from(match (verdict.state, verdict.severity) {
        (State::Missing, _) => UNKNOWN,
        (_, Severity::Ok | Severity::Info) => 0,
        (_, Severity::Warning) => 1,
        (_, Severity::Error) => 2,
    })
}

/// Formats the state, how long it has lasted, and its meaning.
pub(in crate::cli) fn headline(word: &str, verdict: &Verdict) -> String {
    let lasts = verdict.lasts.map(figures::time);
    let lasts = lasts.map_or(String::new(), |time| format!(" for {time}"));
    format!("{word}{lasts}: {}", verdict.meaning)
}

/// Formats a value to be printed after its label.
fn value_text(value: &str, width: Option<usize>) -> String {
    wrapped(&printable(value), LABEL + 2, width)
}

/// Returns the label and the value of each line below the state.
fn lines(snapshot: &SlotSnapshot) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let Some(remedy) = &snapshot.verdict.remedy {
        lines.push(("do", remedy.clone()));
    }
    lines.extend(caught_up(&snapshot.verdict));
    lines.extend(warning("warning", snapshot));
    let relay = snapshot.relay.as_ref();
    let condition = relay.and_then(|relay| relay.condition.as_ref());
    for topic in condition.iter().flat_map(|condition| &condition.topics) {
        lines.push(("topic", topic_line(topic)));
    }
    lines.extend(recovery(snapshot));
    if relay.is_some_and(|relay| relay.records.may_lack_records()) {
        let records = "quarantined events only (dispatch = exceptions)";
        lines.push(("records", records.to_owned()));
    }
    let Some(slot) = &snapshot.slot else {
        return lines;
    };
    lines.push(("lag", lag(snapshot, slot)));
    if let Some(figures) = snapshot.rates {
        lines.push(("rates", rates(figures)));
    }
    lines.push(("position", position(snapshot, slot)));
    lines.push(("reader", reader(snapshot, slot)));
    lines.push(("WAL kept", kept(snapshot, slot)));
    for (i, holder) in snapshot.holders.iter().enumerate() {
        lines.push((if i == 0 { "held by" } else { "" }, holder.to_string()));
        lines.push(("", format!("-> {}", holder.remedy())));
    }
    if snapshot.holders.is_empty() {
        let nothing = "nothing but this slot's own position";
        lines.push(("held by", nothing.to_owned()));
    }
    lines
}

/// Returns the line about a recovery that is due or running. If topics are failing, the line also says that the
/// recovery waits for them, and that rows which the stream has missed are published only after the recovery.
pub(in crate::cli) fn recovery(snapshot: &SlotSnapshot) -> Option<(&'static str, String)> {
    let relay = snapshot.relay.as_ref()?;
    let why = relay.recovering.as_deref()?;
    let mut text = format!("due or running ({why}): rows from the tables are published first");
    let condition = relay.condition.as_ref();
    if condition.is_some_and(|condition| condition.failing_topics > 0) {
        text += "; it can end only after the failing topics accept their events. Until then no audit runs, so rows \
                 that the stream has missed wait too, for example after the table was taken out of the publication";
    }
    Some(("recovery", text))
}

/// Returns the lines of the warning about a slot that is older than the publication, with the remedy.
pub(in crate::cli) fn warning(
    label: &'static str,
    snapshot: &SlotSnapshot,
) -> Vec<(&'static str, String)> {
    let Some(warning) = &snapshot.warning else {
        return Vec::new();
    };
    let remedy = warning.remedy.as_deref().unwrap_or_default();
    vec![
        (label, format!("{} ({})", warning.what, warning.code)),
        ("", format!("-> {remedy}")),
    ]
}

/// Returns the text. If standard output is a terminal that can clear its screen, the text begins with the
/// escape code that clears it.
pub(in crate::cli) fn replacing(text: &str) -> String {
    if std::io::stdout().is_terminal() && !paint::is_dumb() {
        format!("\x1b[H\x1b[2J{text}")
    } else {
        format!("{text}\n")
    }
}

/// Formats a failing topic on one line.
pub(in crate::cli) fn topic_line(topic: &TopicCondition) -> String {
    let seconds =
        |seconds: f64| figures::time(Duration::try_from_secs_f64(seconds).unwrap_or_default());
    let oldest = topic.oldest_seconds.map_or(String::new(), |age| {
        format!(", the oldest {} old", seconds(age))
    });
    format!(
        "{}  {} for {}, {}, {} waiting{oldest}",
        topic.short_name(),
        topic.code,
        seconds(topic.for_seconds),
        figures::count(topic.failures, "failure"),
        figures::count(topic.waiting_events, "event"),
    )
}

pub(in crate::cli) fn lag(snapshot: &SlotSnapshot, slot: &Slot) -> String {
    let bytes = slot.lag_bytes.map_or("unknown".to_owned(), figures::bytes);
    let mut text = format!("{bytes} of WAL not confirmed");
    let Some(pending) = snapshot.pending else {
        return text + "; age unknown (see the relay's /metrics)";
    };
    let least = figures::at_least(pending.is_lower_bound);
    let events = figures::count(pending.events, "event");
    match pending.oldest {
        // Events wait for failing topics, although every event in the tables has a record. These events were recorded
        // earlier: they are repeated events, or an operator has released or replayed them. So do not say that no event
        // is waiting.
        _ if pending.events == 0 && snapshot.waiting_for_topics() > 0 => {
            text += "; every event in the tables has a record";
        }
        _ if pending.events == 0 => text += ", no event is waiting",
        Some(oldest) => {
            let by = match oldest.by {
                AgeClock::Commit => "",
                AgeClock::OccurredAt => " by occurred_at",
            };
            let oldest = figures::time(oldest.age);
            text +=
                &format!("; {least}{events} not recorded yet, the oldest {least}{oldest} old{by}");
        }
        None => text += &format!("; {least}{events} not recorded yet"),
    }
    text
}

pub(in crate::cli) fn rates(rates: Rates) -> String {
    format!(
        "{}/s written, {}/s confirmed",
        figures::bytes(rates.written_bytes_per_second),
        figures::bytes(rates.confirmed_bytes_per_second)
    )
}

pub(in crate::cli) fn position(snapshot: &SlotSnapshot, slot: &Slot) -> String {
    let lsn = |lsn: Option<decoder::Lsn>| lsn.map_or("unknown".to_owned(), |lsn| lsn.to_string());
    format!(
        "confirmed {}, server {}, timeline {}",
        lsn(slot.confirmed_flush_lsn),
        lsn(slot.server_lsn),
        snapshot.cluster.timeline
    )
}

pub(in crate::cli) fn reader(snapshot: &SlotSnapshot, slot: &Slot) -> String {
    if let Some(holder) = &slot.holder {
        return holder.to_string();
    }
    let mut text = match &slot.inactive_since {
        Some(since) => format!("none since {since}"),
        None => "none".to_owned(),
    };
    match &snapshot.relay {
        Some(relay) => text += &format!("; last {} (started {})", relay.instance, relay.since),
        None => text += "; no relay has served it yet",
    }
    text
}

pub(in crate::cli) fn kept(snapshot: &SlotSnapshot, slot: &Slot) -> String {
    let kept = slot
        .retained_bytes
        .map_or("unknown".to_owned(), figures::bytes);
    let status = match slot.wal_status {
        Some(WalStatus::Reserved) | None => "",
        Some(WalStatus::Extended) => " (more than max_wal_size)",
        Some(WalStatus::Unreserved) => " (no longer protected)",
        Some(WalStatus::Lost) => " (lost)",
    };
    let room = match (slot.safe_wal_size, snapshot.time_to_loss) {
        (None, _) if slot.wal_status == Some(WalStatus::Lost) => String::new(),
        (None, _) => "; no limit (max_slot_wal_keep_size): watch the disk".to_owned(),
        (Some(left), time) => {
            let time = time.map(|time| format!(", in about {}", figures::time(time)));
            let left = figures::bytes(u64::try_from(left).unwrap_or(0));
            format!("; lost after {left} more{}", time.unwrap_or_default())
        }
    };
    format!("{kept}{status}{room}")
}
