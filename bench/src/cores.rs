//! Which cores a drain may use: all cores for everything, or one core for the database and another
//! core for the rest.
//!
//! With shared cores, a comparison of the relay with a program that sends from memory is unfair on a small
//! machine: only the relay shares the CPU time with the server. If the database has its own core, as it has its
//! own machine in production, both programs have the same CPU time for their requests.

use std::process::{Command, Stdio};

use crate::database::Database;
use crate::process::usage;

/// The util-linux program that sets the cores on which a process may run.
const TASKSET: &str = "taskset";

const ALLOWED: &str = "Cpus_allowed_list:";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cores {
    /// All processes on all cores.
    Shared,
    /// The server on the first core, the program and the emulator together on the second.
    DatabaseApart,
}

impl Cores {
    /// Moves the server to these cores. Processes that the server starts later run on the same
    /// cores.
    pub(crate) async fn settle(self, database: &Database) -> Result<(), String> {
        let cores = match self {
            Self::Shared => allowed()?,
            Self::DatabaseApart => two()?.0.to_string(),
        };
        for pid in database.pids().await? {
            let mut command = Command::new(TASKSET);
            command.args(["-acp", &cores, &pid.to_string()]);
            let ended = command.stdout(Stdio::null()).status();
            let ended = ended.map_err(|e| format!("{TASKSET}: {e}"))?;
            // Ignore a failure for a process that has ended since it was listed.
            if !ended.success() && usage(pid).is_some() {
                return Err(format!("{TASKSET} of process {pid} ended with {ended}"));
            }
        }
        Ok(())
    }

    /// Returns the command that starts the program on these cores. The caller must still set its
    /// input and output.
    pub(crate) fn of_program(self, command: Command) -> Result<Command, String> {
        if self == Self::Shared {
            return Ok(command);
        }
        // `taskset` replaces itself with the program, so the process id stays the same.
        let mut placed = Command::new(TASKSET);
        placed.args(["-c", &two()?.1.to_string()]);
        placed.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => placed.env(name, value),
                None => placed.env_remove(name),
            };
        }
        Ok(placed)
    }
}

/// The cores that we may use, in the notation of the kernel and `taskset`.
fn allowed() -> Result<String, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|e| e.to_string())?;
    let line = status.lines().find_map(|line| line.strip_prefix(ALLOWED));
    line.map(|cores| cores.trim().to_owned())
        .ok_or_else(|| format!("no {ALLOWED} in /proc/self/status"))
}

/// The first two allowed cores.
fn two() -> Result<(u32, u32), String> {
    first_two(&allowed()?).ok_or_else(|| "this needs two cores".into())
}

fn first_two(allowed: &str) -> Option<(u32, u32)> {
    let ranges = allowed.split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    let mut cores = ranges.flatten();
    Some((cores.next()?, cores.next()?))
}

#[cfg(test)]
mod tests {
    use super::first_two;

    #[test]
    fn the_first_two_cores_are_found_in_every_notation() {
        assert_eq!(first_two("0-1"), Some((0, 1)));
        assert_eq!(first_two("3,8-11"), Some((3, 8)));
        assert_eq!(first_two("5"), None);
        assert_eq!(first_two(""), None);
    }
}
