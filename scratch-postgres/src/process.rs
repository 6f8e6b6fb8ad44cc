//! Helper programs, signals and the process table, without `unsafe`.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::Error;

/// How long [`wait_until`] pauses between two checks of its condition.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Runs a program until it exits. If the program fails, the error contains its output.
pub(crate) fn run(command: &mut Command) -> Result<(), Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(Error::io(format!("running {program}")))?;
    if output.status.success() {
        return Ok(());
    }
    let output_text = format!("{}{}", text(&output.stdout), text(&output.stderr));
    Err(Error::Program {
        program,
        status: output.status,
        output: output_text,
    })
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Sends a signal with the shell's built-in `kill`, because slim images have no `/bin/kill`.
pub(crate) fn signal(name: &str, pids: &[u32]) -> Result<(), Error> {
    let mut command = Command::new("sh");
    command.args(["-c", r#"kill -s "$@""#, "sh", name]);
    command.args(pids.iter().map(ToString::to_string));
    run(&mut command)
}

/// Checks a condition repeatedly until it holds or the time is up. Returns whether it held.
pub(crate) fn wait_until(timeout: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + timeout;
    loop {
        if holds() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The living (not zombie) processes whose parent is `parent`.
pub(crate) fn children_of(parent: u32) -> Vec<u32> {
    table()
        .iter()
        .filter(|p| p.parent == parent && p.alive)
        .map(|p| p.pid)
        .collect()
}

/// Whether any of these processes still runs. A zombie does not count: it holds no resources.
pub(crate) fn any_alive(pids: &[u32]) -> bool {
    table().iter().any(|p| p.alive && pids.contains(&p.pid))
}

struct Process {
    pid: u32,
    parent: u32,
    alive: bool,
}

/// Every process: from `/proc` on Linux, otherwise from `ps`.
fn table() -> Vec<Process> {
    match std::fs::read_dir("/proc/self").and_then(|_| std::fs::read_dir("/proc")) {
        Ok(entries) => entries
            .filter_map(|entry| {
                parse_stat(&std::fs::read_to_string(entry.ok()?.path().join("stat")).ok()?)
            })
            .collect(),
        Err(_) => Command::new("ps")
            .args(["-A", "-o", "pid=,ppid=,stat="])
            .output()
            .map(|output| {
                text(&output.stdout)
                    .lines()
                    .filter_map(parse_ps_line)
                    .collect()
            })
            .unwrap_or_default(),
    }
}

/// Parses a line of the form `pid (name) state ppid ...`. The name can contain spaces and
/// parentheses.
fn parse_stat(stat: &str) -> Option<Process> {
    let (pid, rest) = stat.split_once(" (")?;
    let (_, rest) = rest.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    Some(Process {
        pid: pid.parse().ok()?,
        parent,
        alive: !matches!(state, "Z" | "X"),
    })
}

fn parse_ps_line(line: &str) -> Option<Process> {
    let mut fields = line.split_whitespace();
    let pid = fields.next()?.parse().ok()?;
    let parent = fields.next()?.parse().ok()?;
    Some(Process {
        pid,
        parent,
        alive: !fields.next()?.starts_with('Z'),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_with_parentheses_is_parsed() {
        let process = parse_stat("77 (odd) name) (x) S 12 77 77 0").expect("parsed");
        assert_eq!((process.pid, process.parent, process.alive), (77, 12, true));
    }

    #[test]
    fn a_zombie_does_not_count_as_alive() {
        assert!(!parse_stat("77 (postgres) Z 12 77").expect("parsed").alive);
        assert!(!parse_ps_line(" 77 12 Z+").expect("parsed").alive);
    }

    #[test]
    fn our_own_child_is_found_and_its_end_is_noticed() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("spawn");
        assert!(children_of(std::process::id()).contains(&child.id()));
        signal("KILL", &[child.id()]).expect("signal");
        assert!(wait_until(Duration::from_secs(10), || !any_alive(&[
            child.id()
        ])));
        child.wait().expect("wait");
    }
}
