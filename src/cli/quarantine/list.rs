//! `postrider quarantine list`: shows each key with its first event and the error of that event.

use std::process::ExitCode;
use std::time::Duration;

use printable::{printable, start_of};
use slot_manager::Severity;

use super::{session, short};
use crate::cli::paint::Paint;
use crate::cli::{figures, output};
use crate::error::Result;
use crate::ops::quarantine;
use crate::ops::quarantine::list::QuarantineListing;
use crate::ops::quarantine::select::QuarantineSelection;
use crate::settings::Settings;

/// Maximum number of characters of a key on the screen.
const SHOWN_KEY_CHARS: usize = 36;

/// The arguments of `postrider quarantine list`.
#[derive(Debug, clap::Args)]
pub(super) struct QuarantineListArgs {
    /// Only this ordering key
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Only this topic
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// Maximum number of keys, longest waiting first
    #[arg(long, value_name = "N", default_value_t = 50,
          value_parser = clap::value_parser!(i64).range(1..=100_000))]
    limit: i64,
    /// Print JSON: {keys: [...], total_keys, total_events}
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(settings: &Settings, args: &QuarantineListArgs) -> Result<ExitCode> {
    let sql = session(settings).await?;
    let selection = QuarantineSelection {
        key: args.key.as_deref(),
        topic: args.topic.as_deref(),
    };
    let listing = quarantine::list::list(&sql, selection, args.limit).await?;
    if args.json {
        output::write_json(&listing)
    } else {
        output::write_wrapped(&text(&listing, Paint::stdout()))
    }
    Ok(ExitCode::SUCCESS)
}

fn text(listing: &QuarantineListing, paint: Paint) -> String {
    if listing.keys.is_empty() {
        return "Nothing is in quarantine.\n".to_owned();
    }
    let mut text = String::new();
    for key in &listing.keys {
        let name = key.ordering_key.as_deref().unwrap_or("(no key)");
        let topic = printable(key.topic.as_deref().map_or("(no topic)", short));
        let events = figures::count(key.events.unsigned_abs(), "event");
        let age = figures::time(Duration::from_secs(key.since_seconds));
        let state = match key.released {
            0 => paint.severity(Severity::Error, "waiting"),
            _ => paint.severity(Severity::Warning, "being released"),
        };
        let error = printable(key.error.as_deref().unwrap_or_default());
        text += &format!(
            "{}  {topic}  {events} {state} for {age}\n    {}\n    {}\n",
            printable(&start_of(name, SHOWN_KEY_CHARS)),
            printable(&key.first_event),
            paint.faint(&error),
        );
    }
    let shown = listing.keys.len() as u64;
    let keys = listing.total_keys.unsigned_abs();
    let more = if keys > shown {
        format!(", {shown} shown (--limit)")
    } else {
        String::new()
    };
    text += &format!(
        "\n{} of {}{more}. `postrider quarantine show ID` shows details; `release` publishes, \
         `discard` drops.\n",
        figures::count(listing.total_events.unsigned_abs(), "event"),
        figures::count(keys, "key"),
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::quarantine::list::ListedKey;

    #[test]
    fn a_key_shows_its_event_count_age_and_first_error() {
        let listing = QuarantineListing {
            keys: vec![ListedKey {
                topic: Some("projects/p/topics/order.events".into()),
                ordering_key: Some("o-7".into()),
                events: 12,
                released: 0,
                first_event: "4f2a".into(),
                since_seconds: 303,
                error: Some("event-refused: InvalidArgument".into()),
            }],
            total_keys: 3,
            total_events: 40,
        };
        assert_eq!(
            text(&listing, Paint::PLAIN),
            "o-7  order.events  12 events waiting for 5 min 3 s\n    \
             4f2a\n    event-refused: InvalidArgument\n\n\
             40 events of 3 keys, 1 shown (--limit). `postrider quarantine show ID` shows details; \
             `release` publishes, `discard` drops.\n"
        );
    }

    #[test]
    fn the_whole_error_is_shown_with_control_characters_escaped() {
        let reason = format!(
            "event-invalid: {} end",
            "its attribute is too long ".repeat(15)
        );
        let listing = QuarantineListing {
            keys: vec![ListedKey {
                topic: Some("projects/p/topics/a\x1b]0;b".into()),
                ordering_key: Some("ctl\nx\x1b[31mred".into()),
                events: 1,
                released: 0,
                first_event: "public.a:7\r".into(),
                since_seconds: 1,
                error: Some(format!("{reason}\x07")),
            }],
            total_keys: 1,
            total_events: 1,
        };
        let text = text(&listing, Paint::PLAIN);
        assert!(
            text.starts_with("ctl\\nx\\u{1b}[31mred  a\\u{1b}]0;b  "),
            "{text}"
        );
        assert!(text.contains("    public.a:7\\r\n"), "{text}");
        assert!(text.contains(&format!("{reason}\\u{{7}}\n")), "{text}");
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'));
    }

    #[test]
    fn an_empty_quarantine_says_so() {
        let listing = QuarantineListing {
            keys: Vec::new(),
            total_keys: 0,
            total_events: 0,
        };
        assert_eq!(text(&listing, Paint::PLAIN), "Nothing is in quarantine.\n");
    }
}
