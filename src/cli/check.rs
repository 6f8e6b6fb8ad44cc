//! `postrider check`: prints the findings of `ops::check`.

use std::process::ExitCode;

use slot_manager::Severity;

use super::findings::Findings;
use super::output;
use crate::error::Result;
use crate::ops::check;
pub(super) use crate::ops::check::capture;
use crate::settings::Settings;

/// The arguments of `postrider check`.
#[derive(Debug, clap::Args)]
pub(super) struct CheckArgs {
    /// Print JSON: {findings: [{code, severity, what, remedy}], worst}
    #[arg(long)]
    json: bool,
    /// Also list the checks that passed
    #[arg(long, conflicts_with = "json")]
    all: bool,
    /// Check only the settings, without any connection
    #[arg(long)]
    offline: bool,
}

pub(super) fn run(settings: &Settings, args: &CheckArgs) -> Result<ExitCode> {
    let sections = if args.offline {
        check::settings_alone(settings)
    } else {
        super::block_on(async { Ok(check::everything(settings).await) })?
    };
    let mut findings = Findings::default();
    for section in sections {
        findings.section(section.heading, section.findings);
    }
    if args.json {
        findings.print_json();
    } else {
        if args.all {
            findings.print();
        } else {
            findings.print_problems();
        }
        output::write(&match findings.worst() {
            Severity::Ok | Severity::Info if args.offline => {
                "The settings are in order; nothing else was checked.\n".to_owned()
            }
            Severity::Ok | Severity::Info => "Ready for `postrider run`.\n".to_owned(),
            Severity::Warning => format!("{}; `postrider run` would start.\n", findings.summary()),
            Severity::Error => format!("{}; `postrider run` would not work.\n", findings.summary()),
        });
    }
    Ok(findings.exit_code())
}
