//! Formats events as text.

use printable::{printable, start_of};

use crate::cli::figures;
use crate::event::SHOWN_CHARS;
use crate::ops::event::list::EventListing;
use crate::ops::event::{EarlierMessage, EventReport, EventState};

/// Maximum number of characters of a key in the list, so that a line with a uuid fits into 80 columns.
const KEY_CHARS: usize = 13;
/// Maximum length in bytes of an id in the list: the length of a uuid. If the id is longer, the list shows the
/// event's uuid instead.
const NAME_CHARS: usize = 36;

/// Formats all details of each event.
pub(super) fn details(events: &[EventReport]) -> String {
    let texts: Vec<String> = events.iter().map(detail).collect();
    texts.join("\n")
}

fn detail(event: &EventReport) -> String {
    let none = || "none".to_owned();
    let line = |text: &str| start_of(&printable(text), 4 * SHOWN_CHARS);
    let name = event.source_id.as_deref().unwrap_or(&event.event_id);
    let mut lines = vec![("event", line(name))];
    if event.source_id.is_some() {
        lines.push(("uuid", event.event_id.clone()));
    }
    lines.push(("state", event.state.name().to_owned()));
    lines.push(("", printable(&event.meaning).into_owned()));
    lines.push(("topic", event.topic.as_deref().map_or_else(none, line)));
    lines.push(("key", event.ordering_key.as_deref().map_or_else(none, line)));
    if let Some(message_id) = &event.message_id {
        let by = event.replay.as_ref();
        let by = by.map_or(String::new(), |replay| format!(", replay {replay}"));
        lines.push(("message", line(&format!("{message_id}{by}"))));
    }
    lines.extend(event.earlier_messages.iter().map(earlier));
    if event.replay.is_some() && event.earlier_messages.is_empty() {
        let lost = "unknown: it was not kept before migration 0021";
        lines.push(("original", lost.to_owned()));
    }
    match &event.record {
        Some(record) => {
            lines.extend(figures::requests(record.attempts, &record.state));
            if let Some(error) = &record.error {
                lines.push(("error", line(error)));
            }
            lines.push(("committed", record.committed_at.clone()));
            lines.push(("recorded", record.recorded_at.clone()));
            lines.push(("position", record.position.to_string()));
        }
        None => lines.push(("record", none())),
    }
    match &event.row {
        Some(row) => {
            let seq = row.seq.map(|seq| format!(", seq {seq}"));
            let xid = row.inserted_xid.as_ref();
            let xid = xid.map(|xid| format!(", transaction {xid}"));
            let more = [seq, xid].into_iter().flatten().collect::<String>();
            lines.push(("row", format!("{}{more}", line(&row.table))));
            if let Some(at) = &row.occurred_at {
                lines.push(("occurred", line(at)));
            }
        }
        None => lines.push((
            "row",
            "not in the outbox: pruned, deleted or moved away".to_owned(),
        )),
    }
    let named = |(name, value)| format!("{name:<10} {value}\n");
    lines.into_iter().map(named).collect()
}

/// Returns the label and the text of the line for an earlier message of a replayed event.
fn earlier(message: &EarlierMessage) -> (&'static str, String) {
    let at = message.published_at.as_ref();
    let at = at.map_or(String::new(), |at| format!(", published at {at}"));
    let (label, replay) = match &message.replay {
        Some(replay) => ("earlier", format!(", replay {replay}")),
        None => ("original", String::new()),
    };
    let text = format!("message {}{replay}{at}", message.message_id);
    (label, start_of(&printable(&text), 4 * SHOWN_CHARS))
}

pub(super) fn not_found(id: &str) -> String {
    format!(
        "No event {} is in the outbox or in outbox.dispatch. Its row and its record were pruned, its \
         transaction was rolled back, or its table is not captured (the settings name the tables). If that is \
         an ordering key and not an id, `postrider event --key KEY` lists the events of the key.\n",
        start_of(&printable(id), SHOWN_CHARS)
    )
}

/// Formats one line for each event, followed by notes on what the list leaves out.
pub(super) fn list(listing: &EventListing) -> String {
    let mut text = String::new();
    if listing.events.is_empty() {
        text += "No event matches.\n";
    } else {
        text += &row("COMMITTED", "STATE", "KEY", "EVENT");
    }
    for event in &listing.events {
        let committed = event.record.as_ref().map(|record| &record.committed_at);
        // Leave out year, `T` and milliseconds of `2026-11-27T08:30:00.123Z`.
        let committed =
            committed.and_then(|at| Some(format!("{} {}", at.get(5..10)?, at.get(11..19)?)));
        let name = event
            .source_id
            .as_deref()
            .filter(|id| id.len() <= NAME_CHARS);
        text += &row(
            committed.as_deref().unwrap_or("-"),
            event.state.name(),
            event.ordering_key.as_deref().unwrap_or("-"),
            name.unwrap_or(&event.event_id),
        );
    }
    if listing.records.may_lack_records() {
        text += "With dispatch = exceptions only events with a record are listed: published events get \
                 no record, and waiting events cannot be distinguished from them.\n";
    }
    if listing.more_wait {
        text += "More events may wait than are listed: `postrider status` counts them.\n";
    }
    let waits = |event: &EventReport| event.state == EventState::Waiting;
    if listing.events.iter().any(waits) {
        text += "Events that wait have no commit time here, so --since does not apply to them.\n";
    }
    if !listing.events.is_empty() {
        text += "Newest first, times in UTC. `postrider event ID` shows everything about one.\n";
    }
    text
}

fn row(committed: &str, state: &str, key: &str, name: &str) -> String {
    let key = start_of(&printable(key), KEY_CHARS);
    let name = printable(name);
    format!("{committed:<14}  {state:<11}  {key:<KEY_CHARS$}  {name}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::EventPosition;
    use crate::ops::event::EventOutcome;
    use crate::ops::event::list::RecordKeeping;

    fn published(key: &str) -> EventReport {
        EventReport {
            event_id: "0190163d-8694-739b-aea5-966c26f8ad91".into(),
            source_id: None,
            state: EventState::Published,
            meaning: "published".into(),
            topic: Some("projects/p/topics/order.events".into()),
            ordering_key: Some(key.into()),
            message_id: Some("17".into()),
            replay: None,
            earlier_messages: Vec::new(),
            row: None,
            record: Some(EventOutcome {
                state: "published".into(),
                position: EventPosition::for_tests(0x10, 1),
                committed_at: "2026-11-27T08:30:00.123Z".into(),
                recorded_at: "2026-11-27T08:30:00.163Z".into(),
                took_ms: 40.0,
                attempts: 1,
                error: None,
                error_code: None,
            }),
        }
    }

    #[test]
    fn a_line_of_the_list_fits_into_80_columns_and_has_no_control_characters() {
        let listing = EventListing {
            events: vec![published("a very long key\x1b[2J indeed")],
            records: RecordKeeping::COMPLETE,
            more_wait: false,
        };
        let text = list(&listing);
        let line = text.lines().nth(1).unwrap();
        assert_eq!(
            line,
            "11-27 08:30:00  published    a very long..  0190163d-8694-739b-aea5-966c26f8ad91"
        );
        assert!(text.lines().take(2).all(|line| line.chars().count() <= 80));
        let control = list(&EventListing {
            events: vec![published("\x1b[2J")],
            ..listing
        });
        assert!(!control.contains('\x1b'), "{control}");
    }

    #[test]
    fn details_show_the_original_message_and_each_replay() {
        let message = |id: &str, replay: Option<&str>| EarlierMessage {
            message_id: id.into(),
            published_at: Some("2026-11-27T08:30:00.163Z".into()),
            replay: replay.map(str::to_owned),
        };
        let mut event = EventReport {
            replay: Some("third".into()),
            earlier_messages: vec![message("15", None), message("16", Some("second"))],
            ..published("o-1")
        };
        let text = details(std::slice::from_ref(&event));
        for part in [
            "message    17, replay third\n",
            "original   message 15, published at 2026-11-27T08:30:00.163Z\n",
            "earlier    message 16, replay second, published at ",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        event.earlier_messages.clear();
        assert!(details(&[event]).contains("original   unknown"));
    }

    #[test]
    fn details_show_message_and_commit() {
        let text = details(&[published("o-1")]);
        for part in [
            "message    17\n",
            "position   commit 0/10, ordinal 1\n",
            "pruned, deleted or moved away",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
