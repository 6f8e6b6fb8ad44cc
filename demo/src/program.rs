//! Finds the program `postrider`, which the demonstration runs as the relay.
//!
//! Does not search in `PATH`, because an installed `postrider` might have another version.

use std::path::{Path, PathBuf};

use crate::error::{Result, failed};

const NAME: &str = "postrider";

/// Returns the file that `--postrider` names. Without `--postrider`, returns the file next to this
/// program, where cargo puts it.
///
/// # Errors
/// Returns an error if there is no such file.
pub(crate) fn find(named: Option<&Path>) -> Result<PathBuf> {
    let program = match named {
        Some(named) => std::path::absolute(named),
        None => std::env::current_exe().map(|own| own.with_file_name(NAME)),
    };
    let program = program.map_err(|e| failed("cannot find the program postrider").caused_by(e))?;
    if program.is_file() {
        return Ok(program);
    }
    let what = format!("there is no program {}", program.display());
    Err(failed(what).hint(match named {
        Some(_) => "name the file of the program postrider with --postrider",
        None => {
            "run `make demo`, which builds postrider; or run `cargo build --package postrider`; or \
             name its file with --postrider"
        }
    }))
}

/// The command that starts `program` from a shell. The command is just `postrider` if the program's
/// folder is in `PATH`.
pub(crate) fn shell_command(program: &Path) -> String {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_in_path = program.file_name().is_some_and(|name| name == NAME)
        && std::env::split_paths(&path).any(|folder| Some(&*folder) == program.parent());
    if is_in_path {
        NAME.into()
    } else {
        program.display().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_exist_is_refused_with_a_hint() {
        let error = find(Some(Path::new("/nowhere/postrider"))).expect_err("no such file");
        assert_eq!(error.to_string(), "there is no program /nowhere/postrider");
    }

    #[test]
    fn a_program_outside_of_the_search_path_is_shown_with_its_folder() {
        let program = Path::new("/nowhere/postrider");
        assert_eq!(shell_command(program), "/nowhere/postrider");
    }
}
