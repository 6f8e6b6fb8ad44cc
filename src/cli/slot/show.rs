//! `postrider slot show`: shows the slot once or repeatedly, for an operator or for an alert.

use std::process::ExitCode;
use std::time::Duration;

use slot_manager::health::Thresholds;

use super::{STATEMENT_TIMEOUT, screen, session};
use crate::cli::paint::Paint;
use crate::cli::report::write_error;
use crate::cli::wrap::terminal_width;
use crate::cli::{figures, for_command, output};
use crate::error::{Error, Report, Result};
use crate::ops::rights::Purpose;
use crate::ops::slot::SlotSnapshot;
use crate::postgres::Sql;
use crate::settings::Settings;

/// The arguments of `postrider slot show`.
#[derive(Debug, Default, clap::Args)]
pub(super) struct ShowArgs {
    /// Print one JSON object; with --watch, one per line
    #[arg(long)]
    json: bool,
    /// Refresh every SECONDS until interrupted, and show rates
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2",
          value_parser = figures::parse_interval)]
    watch: Option<u64>,
    /// Warn at this much unconfirmed WAL, such as 256MB [default: 256MB]
    #[arg(long, value_name = "SIZE", value_parser = figures::parse_bytes)]
    warn_bytes: Option<u64>,
    /// Critical at this much unconfirmed WAL
    #[arg(long, value_name = "SIZE", value_parser = figures::parse_bytes)]
    critical_bytes: Option<u64>,
    /// Warn at this age of the oldest undelivered event [default: 300]
    #[arg(long, value_name = "SECONDS")]
    warn_seconds: Option<u64>,
    /// Critical at this age of the oldest undelivered event
    #[arg(long, value_name = "SECONDS")]
    critical_seconds: Option<u64>,
}

impl ShowArgs {
    /// Fills unset arguments from `other`: `slot --json show` is the same as `slot show --json`.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            json: self.json || other.json,
            watch: self.watch.or(other.watch),
            warn_bytes: self.warn_bytes.or(other.warn_bytes),
            critical_bytes: self.critical_bytes.or(other.critical_bytes),
            warn_seconds: self.warn_seconds.or(other.warn_seconds),
            critical_seconds: self.critical_seconds.or(other.critical_seconds),
        }
    }

    fn thresholds(&self) -> Thresholds {
        let default = Thresholds::default();
        Thresholds {
            warn_lag_bytes: self.warn_bytes.unwrap_or(default.warn_lag_bytes),
            error_lag_bytes: self.critical_bytes,
            warn_lag: self
                .warn_seconds
                .map_or(default.warn_lag, Duration::from_secs),
            error_lag: self.critical_seconds.map(Duration::from_secs),
        }
    }
}

pub(super) async fn run(settings: &Settings, args: ShowArgs) -> Result<ExitCode> {
    if let Some(seconds) = args.watch {
        // The loop retries every error. If the settings have no `database_url`, no retry can succeed, so fail now.
        settings.database()?;
        watch(settings, &args, Duration::from_secs(seconds)).await;
    }
    match read(settings, &args).await {
        Ok(snapshot) => {
            if args.json {
                output::write_json(&snapshot.json())
            } else {
                output::write(&screen::text(&snapshot, Paint::stdout(), terminal_width()))
            }
            Ok(screen::exit_code(&snapshot.verdict))
        }
        Err(error) => {
            let error = for_command(error, settings, Purpose::Read).await;
            if args.json {
                output::write_json(&unknown(settings, &error));
            }
            Ok(write_error(&error, args.json))
        }
    }
}

async fn read(settings: &Settings, args: &ShowArgs) -> Result<SlotSnapshot> {
    let sql = session(settings, STATEMENT_TIMEOUT).await?;
    SlotSnapshot::take(&sql, settings, &args.thresholds(), None).await
}

/// Refreshes until the process is interrupted, and reconnects after each error.
async fn watch(settings: &Settings, args: &ShowArgs, interval: Duration) -> ! {
    let mut sql: Option<Sql> = None;
    let mut before: Option<SlotSnapshot> = None;
    loop {
        match read_again(settings, args, &mut sql, before.as_ref()).await {
            Ok(snapshot) => {
                show_again(&snapshot, args);
                before = Some(snapshot);
            }
            Err(error) => {
                (sql, before) = (None, None);
                let error = for_command(error, settings, Purpose::Read).await;
                if args.json {
                    output::write_json_line(&unknown(settings, &error))
                } else {
                    output::write(&screen::replacing(&format!("{}\n", Report(&error))))
                }
            }
        }
        tokio::time::sleep(interval).await;
    }
}

async fn read_again(
    settings: &Settings,
    args: &ShowArgs,
    sql: &mut Option<Sql>,
    before: Option<&SlotSnapshot>,
) -> Result<SlotSnapshot> {
    let sql = match sql {
        Some(sql) => sql,
        None => sql.insert(session(settings, STATEMENT_TIMEOUT).await?),
    };
    SlotSnapshot::take(sql, settings, &args.thresholds(), before).await
}

fn show_again(snapshot: &SlotSnapshot, args: &ShowArgs) {
    if args.json {
        output::write_json_line(&snapshot.json())
    } else {
        output::write(&screen::replacing(&screen::text(
            snapshot,
            Paint::stdout(),
            terminal_width(),
        )))
    }
}

fn unknown(settings: &Settings, error: &Error) -> serde_json::Value {
    serde_json::json!({
        "slot_name": settings.slot,
        "state": "unknown",
        "error": error.json(),
    })
}
