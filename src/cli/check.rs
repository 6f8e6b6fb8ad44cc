//! `postrider check`: prints the findings of `ops::check`.

use std::process::ExitCode;

use serde::Serialize;
use slot_manager::Severity;

use super::findings::{Findings, FindingsJson};
use super::output;
use crate::error::Result;
use crate::ops::check;
pub(super) use crate::ops::check::capture;
use crate::ops::check::forecast::Forecast;
use crate::settings::Settings;

/// The arguments of `postrider check`.
#[derive(Debug, clap::Args)]
pub(super) struct CheckArgs {
    /// Print JSON: {findings: [{code, severity, what, remedy}], worst, run: {stops, waits, recovers, ...}}
    #[arg(long)]
    json: bool,
    /// Also list the checks that passed
    #[arg(long, conflicts_with = "json")]
    all: bool,
    /// Check only the settings, without any connection
    #[arg(long)]
    offline: bool,
}

/// The output of `check --json`; programs depend on it.
#[derive(Serialize)]
struct CheckJson<'a> {
    #[serde(flatten)]
    findings: FindingsJson<'a>,
    /// What `postrider run` would do.
    run: &'a Forecast,
}

pub(super) fn run(settings: &Settings, args: &CheckArgs) -> Result<ExitCode> {
    let (sections, forecast) = if args.offline {
        let sections = check::settings_alone(settings);
        let forecast = Forecast::of(&sections, None, settings);
        (sections, forecast)
    } else {
        super::block_on(async { Ok(check::everything(settings).await) })?
    };
    let mut findings = Findings::default();
    for section in sections {
        findings.section(section.heading, section.findings);
    }
    if args.json {
        output::write_json(&CheckJson {
            findings: findings.json(),
            run: &forecast,
        });
    } else {
        if args.all {
            findings.print();
        } else {
            findings.print_problems();
        }
        let sentence = forecast.sentence();
        output::write_wrapped(&match findings.worst() {
            Severity::Ok | Severity::Info if args.offline => {
                "The settings are in order; nothing else was checked.\n".to_owned()
            }
            Severity::Ok | Severity::Info => {
                format!("Ready: `postrider run` {sentence}.\n")
            }
            _ => format!("{}; `postrider run` {sentence}.\n", findings.summary()),
        });
    }
    Ok(findings.exit_code())
}
