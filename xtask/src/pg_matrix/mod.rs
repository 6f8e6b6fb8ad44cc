//! `cargo xtask pg-matrix`: runs the test suites `relay`, `cli`, `migrations` and `integration` on every
//! supported major version of PostgreSQL.
//!
//! The test programs are built once and run for each major version. The variable `POSTRIDER_PG_BIN`
//! tells them which server to start. Servers that this machine lacks are downloaded (`servers`).
//! The result is a table with a row per major version and a column per suite. The full output of
//! each run is in `target/pg-matrix/`.
//!
//! Each test decides for itself whether it applies to a major version. If not, the test ends early and prints
//! a line that begins with `SKIPPED`. The table counts such a test as skipped.

mod servers;
mod suites;

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;

use suites::{Outcome, Suite};

use xtask::step;

#[derive(Debug, Args)]
pub(crate) struct PgMatrixArgs {
    /// Only these major versions of PostgreSQL
    #[arg(long, value_delimiter = ',', default_values_t = servers::MAJORS)]
    majors: Vec<u32>,
    /// The folder with initdb and postgres of a major version, such as 16=/opt/pg16/bin; may be repeated. The
    /// variable POSTRIDER_PG_BIN_16 does the same
    #[arg(long, value_name = "MAJOR=FOLDER", value_parser = parse_folder)]
    pg_bin: Vec<(u32, PathBuf)>,
    /// Only suites whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Only tests whose name contains this
    #[arg(long, value_name = "TEXT")]
    test: Option<String>,
    /// Tests that run in parallel
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// Never download a server: a major version that is not on this machine is an error
    #[arg(long)]
    offline: bool,
}

fn parse_folder(text: &str) -> Result<(u32, PathBuf), String> {
    let (major, folder) = text
        .split_once('=')
        .ok_or("write it as MAJOR=FOLDER, such as 16=/opt/pg16/bin")?;
    let major = major
        .parse()
        .map_err(|_| format!("`{major}` is not a major version"))?;
    Ok((major, folder.into()))
}

/// One row of the printed table.
struct Row {
    major: u32,
    version: String,
    cells: Vec<(&'static str, Outcome, f64)>,
}

pub(crate) fn run(args: &PgMatrixArgs) -> Result<(), String> {
    let logs = step::root().join("target/pg-matrix");
    std::fs::create_dir_all(&logs).map_err(|e| format!("{}: {e}", logs.display()))?;
    let wanted = args.only.as_deref().unwrap_or_default();
    let suites = suites::build(|name| name.contains(wanted))?;
    let mut rows = Vec::new();
    for &major in &args.majors {
        let folder = servers::folder(major, &args.pg_bin, args.offline)?;
        let version = servers::version(&folder)?;
        println!("\n== {version} in {}", folder.display());
        let mut cells = Vec::new();
        for suite in &suites {
            let began = Instant::now();
            let log = logs.join(format!("{major}-{}.log", suite.name));
            let outcome = suite.run(&folder, &log, args.threads, args.test.as_deref())?;
            let seconds = began.elapsed().as_secs_f64();
            println!("{:<14} {outcome} in {seconds:.0} s", suite.name);
            for name in &outcome.failures {
                println!("    FAILED {name} ({})", log.display());
            }
            cells.push((suite.name, outcome, seconds));
        }
        rows.push(Row {
            major,
            version,
            cells,
        });
    }
    print_table(&suites, &rows);
    if rows.iter().flat_map(|row| &row.cells).any(|c| c.1.is_bad()) {
        Err("not every suite passes on every major".into())
    } else {
        Ok(())
    }
}

/// Prints the table as Markdown, so that it can be pasted into docs/reference/matrix.md.
fn print_table(suites: &[Suite], rows: &[Row]) {
    println!("\nPassed / failed / skipped, and seconds:\n");
    let names: Vec<_> = suites.iter().map(|suite| suite.name).collect();
    println!("| PostgreSQL | {} |", names.join(" | "));
    println!("|---|{}", "---|".repeat(names.len()));
    for row in rows {
        let cells: Vec<_> = row
            .cells
            .iter()
            .map(|(_, outcome, seconds)| format!("{} ({seconds:.0} s)", outcome.short()))
            .collect();
        println!(
            "| {} ({}) | {} |",
            row.major,
            row.version,
            cells.join(" | ")
        );
    }
}
