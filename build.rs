//! Records the commit of the source code, for `postrider --version`, the relay's log and the metrics.
//!
//! In a git checkout of this repository, the script records HEAD. The build of a release sets the variables
//! `POSTRIDER_COMMIT` and `POSTRIDER_COMMIT_DATE`, and their values take precedence. A build from an archive
//! without `.git` and without the variables records nothing.

use std::path::Path;
use std::process::Command;

/// The variables that the program reads at compile time, each with the git format for its value.
const RECORDED: [(&str, &str); 2] = [("POSTRIDER_COMMIT", "%H"), ("POSTRIDER_COMMIT_DATE", "%cs")];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for (variable, _) in RECORDED {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    if RECORDED.iter().all(|(variable, _)| is_given(variable)) || !is_our_checkout() {
        return;
    }
    // Run the script again when HEAD moves. A commit, a checkout or a reset changes at least one of these files:
    // HEAD, its reflog, or the branch's ref.
    let branch = git(&["rev-parse", "--symbolic-full-name", "HEAD"]).unwrap_or_default();
    for file in ["HEAD", "logs/HEAD", &branch] {
        let path = git(&["rev-parse", "--git-path", file]);
        let path = path.filter(|path| Path::new(path).exists());
        if let Some(path) = path {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    for (variable, format) in RECORDED {
        let format = format!("--format={format}");
        let value = git(&["show", "--no-patch", &format, "HEAD"]);
        if let Some(value) = value.filter(|_| !is_given(variable)) {
            println!("cargo:rustc-env={variable}={value}");
        }
    }
}

/// Whether the environment sets the variable to a real value. The container's build sets the placeholder
/// `unknown`.
fn is_given(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| !value.is_empty() && value != "unknown")
}

/// Whether this folder is the top of a git checkout. If it is a copy inside another repository, that
/// repository's HEAD is not our commit.
fn is_our_checkout() -> bool {
    let Some(top) = git(&["rev-parse", "--show-toplevel"]) else {
        return false;
    };
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).canonicalize();
    match (Path::new(&top).canonicalize(), here) {
        (Ok(top), Ok(here)) => top == here,
        _ => false,
    }
}

/// Returns the output of git, without the line break at its end, or `None` if git is not installed or
/// fails.
fn git(arguments: &[&str]) -> Option<String> {
    let ran = Command::new("git").args(arguments).output().ok()?;
    let output = String::from_utf8(ran.stdout).ok()?;
    let line = output.trim();
    (ran.status.success() && !line.is_empty()).then(|| line.to_owned())
}
