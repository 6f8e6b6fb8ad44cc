//! `postrider replay`: publishes events again.

use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

use printable::printable;

use super::audit::ProgressLine;
use super::report::refuse;
use super::{block_on, figures, output, report, signals};
use crate::error::{Code, Error, Result};
use crate::ops::replay::{
    self, ReplayCriteria, ReplayReport, ReplayRow, ReplaySelection, ReplayStep, ReplayWait,
};
use crate::ops::since::Since;
use crate::postgres::{Sql, connect_patiently};
use crate::settings::Settings;

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Exit code if there was no event to publish again, or if some events were not published again.
const LEFT: u8 = 1;

/// Maximum length of a replay's name, which becomes an attribute of its messages.
const NAME_CHARS: usize = 100;

/// The arguments of `postrider replay`.
#[derive(Debug, clap::Args)]
pub(super) struct ReplayArgs {
    /// One event: the id in its table, its uuid (attribute `event_id`), or `schema.table:id`
    #[arg(value_name = "ID", conflicts_with_all = ["key", "topic", "since", "until", "from_lsn", "to_lsn"])]
    id: Option<String>,
    /// Only events of this ordering key
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Only events of this topic
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// Only events committed since: a duration such as 10min, or a time such as 2026-11-27T08:30:00Z
    #[arg(long, value_name = "TIME")]
    since: Option<Since>,
    /// Only events committed before this time
    #[arg(long, value_name = "TIME")]
    until: Option<Since>,
    /// Only events committed at this position in the WAL or later, such as 16/B374D848
    #[arg(long, value_name = "LSN")]
    from_lsn: Option<String>,
    /// Only events committed at this position in the WAL or earlier
    #[arg(long, value_name = "LSN")]
    to_lsn: Option<String>,
    /// Name of the replay, which its messages carry in the attribute `replay` [default: the time]
    #[arg(long, value_name = "NAME", value_parser = name)]
    name: Option<String>,
    /// Maximum number of events per second; all events of a key are released at once, so a key with many events exceeds this for a moment
    #[arg(long, value_name = "EVENTS", default_value_t = 1_000,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate: u32,
    /// Only count the events that would be published again
    #[arg(long, conflicts_with_all = ["yes", "resume", "cancel"])]
    dry_run: bool,
    /// Publish the events again; required unless --dry-run is given
    #[arg(long)]
    yes: bool,
    /// Continue a replay that was stopped
    #[arg(long, value_name = "NAME", conflicts_with_all = ["id", "key", "topic", "since", "until",
          "from_lsn", "to_lsn", "name", "cancel"])]
    resume: Option<String>,
    /// End a replay that was stopped; the relay still publishes the events that are already released
    #[arg(long, value_name = "NAME", conflicts_with_all = ["id", "key", "topic", "since", "until",
          "from_lsn", "to_lsn", "name"])]
    cancel: Option<String>,
    /// Print JSON: {finished, events, oldest, first_ids, in_quarantine} with --dry-run, otherwise {name,
    /// finished, sent, quarantined, not_sent, waiting}
    #[arg(long)]
    json: bool,
}

/// Checks the name of a replay, which becomes the value of an attribute.
fn name(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    if text.is_empty() || text.len() > NAME_CHARS || !text.chars().all(is_plain) {
        return Err(format!(
            "use up to {NAME_CHARS} letters, digits, and the characters - _ . :"
        ));
    }
    Ok(text.to_owned())
}

pub(super) fn run(settings: &Settings, args: &ReplayArgs) -> Result<ExitCode> {
    block_on(async {
        let target = settings.database()?;
        let sql = connect_patiently(target, "postrider replay", STATEMENT_TIMEOUT).await?;
        let is_stopped = signals::watch_steps()?;
        let mut line = ProgressLine::new();
        let mut on_step = |step: &ReplayStep| {
            if let ReplayStep::Unrecorded = step {
                report::write(UNRECORDED);
            } else {
                line.show(&progress(step));
            }
            if let ReplayStep::Sending { wait, .. } = step
                && let Some(reason) = waits_for(wait)
            {
                line.note_once(&reason, &progress(step));
            }
            !is_stopped.load(Ordering::Relaxed)
        };
        if args.dry_run {
            let found = replay::preview(&sql, settings, &criteria(args)?, &mut on_step).await;
            line.clear();
            return Ok(preview(&found?, args.json));
        }
        let row = match args.resume.as_ref().or(args.cancel.as_ref()) {
            Some(name) => replay::find(&sql, name).await?,
            None => begin(&sql, settings, args).await?,
        };
        let ran = match &args.cancel {
            Some(_) => replay::cancel(&sql, &row, &mut on_step).await,
            None => replay::run(&sql, settings, &row, args.rate, &mut on_step)
                .await
                .map(|report| (0, report)),
        };
        line.clear();
        let (given_up, report) = ran.map_err(|error| resumable(error, &row.name))?;
        if args.json {
            output::write_json(&report);
        } else {
            output::write_wrapped(&text(&report, given_up));
        }
        Ok(exit(&report))
    })
}

/// Returns success if there were events and all of them were published again.
fn exit(report: &ReplayReport) -> ExitCode {
    let is_complete =
        report.finished && report.quarantined + report.not_sent == 0 && report.sent > 0;
    ExitCode::from(if is_complete { 0 } else { LEFT })
}

/// Returns the criteria that the arguments give. Ends the command if they give none.
fn criteria(args: &ReplayArgs) -> Result<ReplayCriteria> {
    let criteria = ReplayCriteria {
        id: args.id.clone(),
        key: args.key.clone(),
        topic: args.topic.clone(),
        since: args.since.as_ref().map(ToString::to_string),
        until: args.until.as_ref().map(ToString::to_string),
        from_lsn: args.from_lsn.clone(),
        to_lsn: args.to_lsn.clone(),
    };
    if criteria == ReplayCriteria::default() {
        refuse(
            "choose the events: give the ID of one event, or at least one of --key, --topic, --since, --until, \
             --from-lsn and --to-lsn",
        );
    }
    Ok(criteria)
}

async fn begin(sql: &Sql, settings: &Settings, args: &ReplayArgs) -> Result<ReplayRow> {
    let criteria = criteria(args)?;
    if !args.yes {
        let what =
            "replaying sends events to all subscribers again and needs --yes; nothing was done";
        return Err(Error::new(Code::ConfirmationMissing, what)
            .hint("--dry-run shows how many events match; then use --yes instead"));
    }
    replay::begin(sql, settings, args.name.as_deref(), &criteria).await
}

/// Adds to the hint of the error how to resume the replay.
fn resumable(error: Error, name: &str) -> Error {
    let hint = format!(
        "{}; then run `postrider replay --resume {name}` to continue",
        error.hint_text()
    );
    error.hint(hint)
}

/// The note of [`ReplayStep::Unrecorded`].
const UNRECORDED: &str = "some events that were committed before the replay may have no record yet. The replay does not \
                          send them, but may send later events of the same keys. `postrider status` may show what \
                          delays the records";

fn progress(step: &ReplayStep) -> String {
    match step {
        ReplayStep::Unrecorded => UNRECORDED.to_owned(),
        ReplayStep::Selecting { examined, selected } => {
            format!("{selected} events match, {examined} records read")
        }
        ReplayStep::Sending { sent, of, wait } => {
            let bar = figures::bar(*sent as f64 / (*of).max(1) as f64);
            let waits = waits_for(wait).map_or_else(String::new, |reason| format!("; {reason}"));
            format!("{bar}{sent} of {of} events published again{waits}")
        }
    }
}

/// Says what a replay waits for. `None` if it does not wait.
fn waits_for(wait: &ReplayWait) -> Option<String> {
    match wait {
        ReplayWait::None => None,
        ReplayWait::Relay => Some(
            "waiting for a relay to publish them: start `postrider run`, or see `postrider status`"
                .to_owned(),
        ),
        ReplayWait::Others(others) => Some(format!(
            "waiting until the relay has published the events of the same keys that {} released: see `postrider \
             status`",
            others_named(others)
        )),
    }
}

/// Names the operations that released the events: a replay by its name, and `postrider quarantine release` for `None`.
fn others_named(others: &[Option<String>]) -> String {
    let named = others.iter().map(|other| match other {
        Some(replay) => format!("the replay {replay}"),
        None => "`postrider quarantine release`".to_owned(),
    });
    named.collect::<Vec<_>>().join(" and ")
}

fn preview(found: &ReplaySelection, json: bool) -> ExitCode {
    if json {
        output::write_json(found);
    } else {
        output::write_wrapped(&preview_text(found));
    }
    ExitCode::from(if found.events > 0 { 0 } else { LEFT })
}

fn preview_text(found: &ReplaySelection) -> String {
    let mut text = format!(
        "{} would be published again",
        figures::count(found.events, "event")
    );
    if let Some(oldest) = &found.oldest {
        text += &format!(", the oldest from {oldest}");
    }
    text += "\n";
    for id in &found.first_ids {
        text += &format!("    {}\n", printable(id));
    }
    let shown = found.first_ids.len() as u64;
    if found.events > shown {
        text += &format!("    and {} more\n", found.events - shown);
    }
    if found.in_quarantine > 0 {
        text += &format!(
            "{} in quarantine: `postrider quarantine release` publishes them\n",
            figures::count_more(found.in_quarantine, "event")
        );
    }
    text + match (found.finished, found.events) {
        (false, _) => "\nStopped before the end. Nothing was done.\n",
        (true, 0) => "\nOnly events that were published, and have a record, can be replayed.\n",
        (true, _) => "\nNothing was done: replace --dry-run with --yes to replay.\n",
    }
}

fn text(report: &ReplayReport, given_up: u64) -> String {
    if *report == none(&report.name) && given_up == 0 {
        return format!(
            "Replay {}: no event was published again. No published event matches: see --dry-run\n",
            report.name
        );
    }
    let mut text = format!(
        "Replay {}: {} published again\n",
        report.name,
        figures::count(report.sent, "event")
    );
    if given_up > 0 {
        text += &format!("{} given up\n", figures::count(given_up, "event"));
    }
    if report.not_sent > 0 {
        text += &format!(
            "{} not sent: the event is no longer recorded as published, its row is gone, or an earlier event \
             of its key was refused\n",
            figures::count(report.not_sent, "event"),
        );
    }
    if report.quarantined > 0 {
        text += &format!(
            "{} refused: see `postrider quarantine list`\n",
            figures::count(report.quarantined, "event")
        );
    }
    if !report.finished {
        text += &format!(
            "{} not published yet: the replay was stopped, or the key has events in quarantine or in another \
             replay. Continue with `postrider replay --resume {}`\n",
            figures::count(report.waiting, "event"),
            report.name
        );
    }
    text
}

/// Returns the report of a replay without events.
fn none(name: &str) -> ReplayReport {
    ReplayReport {
        name: name.to_owned(),
        finished: true,
        sent: 0,
        quarantined: 0,
        not_sent: 0,
        waiting: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_shows_how_many_events_are_published_again() {
        let step = |sent, wait| ReplayStep::Sending { sent, of: 40, wait };
        assert_eq!(
            progress(&step(10, ReplayWait::None)),
            "[#####...............] 10 of 40 events published again"
        );
        assert!(progress(&step(40, ReplayWait::Relay)).contains("start `postrider run`"));
        let others = ReplayWait::Others(vec![Some("r1".to_owned()), None]);
        let waits = progress(&step(40, others));
        assert!(
            waits.contains("that the replay r1 and `postrider quarantine release` released"),
            "{waits}"
        );
    }

    #[test]
    fn a_replay_name_must_be_short_ascii_without_blanks_or_quotes() {
        assert_eq!(name("after-the-fix"), Ok("after-the-fix".to_owned()));
        for refused in ["", "a b", "a'b", "ä", &"x".repeat(101)] {
            assert!(name(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn a_report_says_what_is_left_and_how_to_go_on() {
        let report = ReplayReport {
            name: "n1".into(),
            finished: false,
            sent: 3,
            quarantined: 0,
            not_sent: 1,
            waiting: 2,
        };
        assert_eq!(
            text(&report, 0),
            "Replay n1: 3 events published again\n\
             1 event not sent: the event is no longer recorded as published, its row is gone, or an \
             earlier event of its key was refused\n\
             2 events not published yet: the replay was stopped, or the key has events in quarantine \
             or in another replay. Continue with `postrider replay --resume n1`\n"
        );
        assert!(text(&none("n2"), 0).contains("No published event matches"));
        assert!(text(&none("n2"), 7).contains("7 events given up"));
    }
}
