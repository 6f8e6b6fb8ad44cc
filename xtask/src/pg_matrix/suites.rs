//! Builds the suites once, runs them as programs, and counts their tests from the output of the
//! test harness.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use xtask::step;

/// The test targets that run on each major version. `integration` belongs to slot-manager, and the others
/// belong to the root package.
const SUITES: [&str; 4] = ["relay", "cli", "migrations", "integration"];

/// A suite whose test program is built.
pub(super) struct Suite {
    pub(super) name: &'static str,
    program: PathBuf,
    /// The folder in which cargo would run the test program.
    folder: PathBuf,
}

/// The result of running a suite.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    passed: usize,
    skipped: usize,
    pub(super) failures: Vec<String>,
    /// Whether the test program ended without printing its summary line.
    broken: bool,
}

impl Outcome {
    pub(super) fn is_bad(&self) -> bool {
        self.broken || !self.failures.is_empty()
    }

    /// Formats the counts as `passed / failed / skipped`.
    pub(super) fn short(&self) -> String {
        if self.broken {
            "no result".into()
        } else {
            format!(
                "{} / {} / {}",
                self.passed,
                self.failures.len(),
                self.skipped
            )
        }
    }

    /// Reads the output of a test harness that ran with `--show-output`.
    fn read(output: &str) -> Self {
        let mut outcome = Self {
            broken: true,
            ..Self::default()
        };
        for line in output.lines() {
            if let Some(name) = line.strip_prefix("test ").and_then(failed) {
                outcome.failures.push(name.to_owned());
            } else if line.starts_with("SKIPPED") {
                outcome.skipped += 1;
            } else if let Some(sums) = line.strip_prefix("test result: ") {
                outcome.broken = false;
                let count = |what: &str| {
                    let words: Vec<_> = sums.split([' ', ';']).collect();
                    let at = words.iter().position(|word| *word == what)?;
                    words.get(at.checked_sub(1)?)?.parse::<usize>().ok()
                };
                outcome.passed = count("passed").unwrap_or(0);
                outcome.skipped += count("ignored").unwrap_or(0);
            }
        }
        // The harness counts a skipped test as passed, so subtract the skipped tests.
        outcome.passed = outcome.passed.saturating_sub(outcome.skipped);
        outcome
    }
}

fn failed(line: &str) -> Option<&str> {
    line.strip_suffix(" ... FAILED")
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.broken {
            return f.write_str("ended without a result");
        }
        let (passed, failed, skipped) = (self.passed, self.failures.len(), self.skipped);
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// The part that we need of a line of `cargo test --message-format json`.
#[derive(Debug, Deserialize)]
struct Artifact {
    executable: Option<PathBuf>,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// Builds the suites whose names are wanted.
pub(super) fn build(wanted: impl Fn(&str) -> bool) -> Result<Vec<Suite>, String> {
    let suites: Vec<_> = SUITES.into_iter().filter(|name| wanted(name)).collect();
    if suites.is_empty() {
        return Err("no suite has this name".into());
    }
    // Build with the features of the whole workspace, so that cargo reuses the artifacts of its
    // tests.
    let mut command = step::cargo(&["test", "--locked", "--workspace", "--no-run"]);
    command.args(["--message-format", "json-render-diagnostics"]);
    for name in &suites {
        command.args(["--test", name]);
    }
    let done = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("cargo did not start: {e}"))?;
    if !done.status.success() {
        return Err("the suites do not build".into());
    }
    let output = String::from_utf8_lossy(&done.stdout);
    suites
        .into_iter()
        .map(|name| find(&output, name).ok_or_else(|| format!("cargo built no test {name}")))
        .collect()
}

fn find(output: &str, name: &'static str) -> Option<Suite> {
    output
        .lines()
        .filter_map(|line| serde_json::from_str::<Artifact>(line).ok())
        .find_map(|artifact| {
            let target = artifact.target?;
            let is_it = target.name == name && target.kind.iter().any(|kind| kind == "test");
            Some(Suite {
                name,
                program: is_it.then_some(artifact.executable?)?,
                folder: artifact.manifest_path?.parent()?.to_owned(),
            })
        })
}

impl Suite {
    /// Runs the suite with the server programs in `pg_bin`. All output goes to `log`.
    pub(super) fn run(
        &self,
        pg_bin: &Path,
        log: &Path,
        threads: usize,
        test: Option<&str>,
    ) -> Result<Outcome, String> {
        let failure = |e| format!("{}: {e}", log.display());
        let file = fs::File::create(log).map_err(failure)?;
        let errors = file.try_clone().map_err(failure)?;
        Command::new(&self.program)
            .args(test)
            .args(["--show-output", "--test-threads", &threads.to_string()])
            .env("POSTRIDER_PG_BIN", pg_bin)
            // Without this variable the tests start their own servers and never use the caller's
            // server.
            .env_remove("DATABASE_URL")
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(errors)
            .status()
            .map_err(|e| format!("{}: {e}", self.program.display()))?;
        let output = fs::read(log).map_err(failure)?;
        Ok(Outcome::read(&String::from_utf8_lossy(&output)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_named_and_skipped_claims_do_not_count_as_passed() {
        let outcome = Outcome::read(
            "running 4 tests\ntest a::b ... ok\ntest c ... FAILED\ntest d ... ok\n\
             test e ... ignored\nSKIPPED slots fail over: needs 17\n\
             test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(outcome.short(), "0 / 1 / 2");
        assert_eq!(outcome.failures, ["c"]);
        assert!(outcome.is_bad());
    }

    #[test]
    fn a_suite_that_dies_before_its_summary_is_bad() {
        let outcome = Outcome::read("running 4 tests\ntest a ... ok\n");
        assert!(outcome.is_bad());
        assert_eq!(outcome.short(), "no result");
    }
}
