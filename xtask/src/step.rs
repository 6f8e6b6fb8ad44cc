//! Runs a program in the root folder of the repository and shows the program's output while it
//! runs.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A command that calls the same cargo that runs xtask, in the root folder of the repository.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root());
    command
}

/// The root folder of the repository.
pub fn root() -> &'static Path {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    root.expect("invariant: xtask is a folder of the root")
}

/// The folder in which cargo puts its output: `CARGO_TARGET_DIR` if it is set, otherwise `target`.
pub fn target_folder() -> PathBuf {
    let folder = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    root().join(folder)
}

/// The folder for downloaded tools. It is in the home folder, because other users could write to a
/// shared folder.
pub fn tools_folder() -> Option<PathBuf> {
    let home = std::env::var_os("HOME").filter(|home| !home.is_empty())?;
    Some(Path::new(&home).join(".cache/postrider-tools"))
}

/// Runs the command until it exits.
///
/// # Errors
/// Returns an error if the command cannot be started or fails. The error contains the command, so
/// that a developer can run it by hand.
pub fn run(mut command: Command) -> Result<(), String> {
    let words: Vec<_> = command
        .get_args()
        .map(|word| word.to_string_lossy())
        .collect();
    let program = Path::new(command.get_program())
        .file_name()
        .unwrap_or_default();
    let by_hand = format!("{} {}", program.to_string_lossy(), words.join(" "));
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{by_hand}` failed ({status})")),
        Err(error) => Err(format!("`{by_hand}` did not start: {error}")),
    }
}
