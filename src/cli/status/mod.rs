//! `postrider status`: shows the whole relay on one screen, once or live.
//!
//! `screen` formats the text. `live` is the full-screen view of `--watch` on a terminal.

mod live;
mod screen;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use super::paint::{self, Paint};
use super::report::write_error;
use super::slot::screen as slot_screen;
use super::wrap::terminal_width;
use super::{block_on, figures, for_command, output};
use crate::error::{Error, Report, Result};
use crate::ops::rights::Purpose;
use crate::ops::status::RelayStatus;
use crate::postgres::{Sql, connect};
use crate::settings::Settings;

/// Statement timeout. It is short, because during an incident an early answer is better than a complete
/// one.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The arguments of `postrider status`.
#[derive(Debug, clap::Args)]
pub(super) struct StatusArgs {
    /// Print one JSON object; with --watch, one per line
    #[arg(long)]
    json: bool,
    /// Refresh every SECONDS until interrupted; on a terminal, a live view with graphs
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1",
          value_parser = figures::parse_interval)]
    watch: Option<u64>,
}

pub(super) fn run(settings: &Settings, args: &StatusArgs) -> Result<ExitCode> {
    if args.watch.is_some() {
        // The loop retries every error. If the settings have no `database_url`, no retry can succeed, so fail now.
        settings.database()?;
    }
    block_on(async {
        let mut observer = Observer::new(settings);
        match args.watch.map(Duration::from_secs) {
            None => Ok(once(&mut observer, args).await),
            Some(interval)
                if !args.json && std::io::stdout().is_terminal() && !paint::is_dumb() =>
            {
                live::run(&mut observer, interval).await
            }
            Some(interval) => repeat(&mut observer, args, interval).await,
        }
    })
}

/// The part of the command that takes snapshots of the relay. It keeps its SQL session until an error occurs.
struct Observer<'a> {
    settings: &'a Settings,
    sql: Option<Sql>,
    last: Option<RelayStatus>,
}

impl<'a> Observer<'a> {
    fn new(settings: &'a Settings) -> Self {
        Self {
            settings,
            sql: None,
            last: None,
        }
    }

    /// Takes a snapshot. After an error, the next snapshot uses a new SQL session and has no rates.
    async fn observe(&mut self) -> Result<&RelayStatus> {
        match self.try_observe().await {
            Ok(status) => Ok(self.last.insert(status)),
            Err(error) => {
                (self.sql, self.last) = (None, None);
                Err(for_command(error, self.settings, Purpose::Read).await)
            }
        }
    }

    async fn try_observe(&mut self) -> Result<RelayStatus> {
        let sql = match &self.sql {
            Some(sql) => sql,
            None => {
                let target = self.settings.database()?;
                let sql = connect(target, "postrider status", STATEMENT_TIMEOUT).await?;
                self.sql.insert(sql)
            }
        };
        RelayStatus::take(sql, self.settings, self.last.as_ref()).await
    }
}

async fn once(observer: &mut Observer<'_>, args: &StatusArgs) -> ExitCode {
    let settings = observer.settings;
    match observer.observe().await {
        Ok(status) => {
            if args.json {
                output::write_json(&status.json());
            } else {
                output::write(&screen::text(status, Paint::stdout(), terminal_width()));
            }
            slot_screen::exit_code(&status.slot.verdict)
        }
        Err(error) => {
            if args.json {
                output::write_json(&unknown(settings, &error));
            }
            write_error(&error, args.json)
        }
    }
}

/// Prints a snapshot at each interval, until the process is interrupted.
async fn repeat(
    observer: &mut Observer<'_>,
    args: &StatusArgs,
    interval: Duration,
) -> Result<ExitCode> {
    let settings = observer.settings;
    loop {
        match (observer.observe().await, args.json) {
            (Ok(status), true) => output::write_json_line(&status.json()),
            (Ok(status), false) => {
                output::write(&format!(
                    "{}\n",
                    screen::text(status, Paint::stdout(), terminal_width())
                ));
            }
            (Err(error), true) => output::write_json_line(&unknown(settings, &error)),
            (Err(error), false) => output::write(&format!("{}\n\n", Report(&error))),
        }
        tokio::time::sleep(interval).await;
    }
}

fn unknown(settings: &Settings, error: &Error) -> serde_json::Value {
    serde_json::json!({
        "state": "unknown",
        "slot": { "slot_name": settings.slot },
        "error": error.json(),
    })
}
