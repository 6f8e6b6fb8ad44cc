//! Finds `initdb` and `postgres` on this machine.
//!
//! Searches in this order: the folder in `POSTRIDER_PG_BIN`, the highest major version in Debian's
//! layout, `PATH`. If the variable names a folder without the programs, the search stops with an error,
//! because a test matrix must not silently test another major version.

use std::path::{Path, PathBuf};

use crate::Error;

pub(crate) const FOLDER_VARIABLE: &str = "POSTRIDER_PG_BIN";

const DEBIAN_LAYOUT: &str = "/usr/lib/postgresql";

/// The paths of the two programs that we need. We do not need `pg_ctl`, because we use signals and
/// the pid file instead.
#[derive(Debug, Clone)]
pub(crate) struct Binaries {
    pub(crate) initdb: PathBuf,
    pub(crate) postgres: PathBuf,
}

impl Binaries {
    pub(crate) fn find() -> Result<Self, Error> {
        let named = std::env::var_os(FOLDER_VARIABLE).filter(|v| !v.is_empty());
        let path = std::env::var_os("PATH").unwrap_or_default();
        let on_path: Vec<PathBuf> = std::env::split_paths(&path).collect();
        Self::search(named.map(PathBuf::from), Path::new(DEBIAN_LAYOUT), &on_path)
    }

    /// Finds the programs in this folder. Does not search anywhere else.
    pub(crate) fn in_named_folder(folder: &Path) -> Result<Self, Error> {
        Self::in_folder(folder).ok_or_else(|| Error::NoServerPrograms {
            looked_in: folder.display().to_string(),
        })
    }

    /// The folder that contains both programs.
    pub(crate) fn folder(&self) -> &Path {
        self.postgres
            .parent()
            .expect("invariant: a file in a folder")
    }

    fn search(named: Option<PathBuf>, debian: &Path, on_path: &[PathBuf]) -> Result<Self, Error> {
        if let Some(folder) = named {
            return Self::in_folder(&folder).ok_or_else(|| Error::NoServerPrograms {
                looked_in: format!("{FOLDER_VARIABLE}={}", folder.display()),
            });
        }
        debian_folders(debian)
            .iter()
            .chain(on_path)
            .find_map(|folder| Self::in_folder(folder))
            .ok_or_else(|| Error::NoServerPrograms {
                looked_in: format!("{FOLDER_VARIABLE}, {}/*/bin, PATH", debian.display()),
            })
    }

    fn in_folder(folder: &Path) -> Option<Self> {
        // The server runs in another working directory, so the paths must be absolute.
        let folder = folder.canonicalize().ok()?;
        let found = Self {
            initdb: folder.join("initdb"),
            postgres: folder.join("postgres"),
        };
        (found.initdb.is_file() && found.postgres.is_file()).then_some(found)
    }
}

/// Lists the folders `<layout>/<major>/bin`, with the highest major version first.
fn debian_folders(layout: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(layout) else {
        return Vec::new();
    };
    let mut majors: Vec<u32> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    majors.sort_unstable_by(|a, b| b.cmp(a));
    majors
        .iter()
        .map(|major| layout.join(major.to_string()).join("bin"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake_install(folder: &Path) {
        std::fs::create_dir_all(folder).expect("create");
        for program in ["initdb", "postgres"] {
            std::fs::write(folder.join(program), "").expect("write");
        }
    }

    #[test]
    fn the_highest_major_of_the_debian_layout_wins_over_the_path() {
        let temp = tempfile::tempdir().expect("tempdir");
        let root = temp.path().canonicalize().expect("canonicalize");
        for major in ["9", "10", "17"] {
            fake_install(&root.join("debian").join(major).join("bin"));
        }
        fake_install(&root.join("path"));
        let found = Binaries::search(None, &root.join("debian"), &[root.join("path")]);
        assert_eq!(
            found.expect("found").initdb,
            root.join("debian/17/bin/initdb")
        );
    }

    #[test]
    fn the_path_is_used_when_there_is_no_debian_layout() {
        let temp = tempfile::tempdir().expect("tempdir");
        let root = temp.path().canonicalize().expect("canonicalize");
        fake_install(&root.join("path"));
        let found = Binaries::search(None, &root.join("none"), &[root.join("path")]);
        assert_eq!(found.expect("found").postgres, root.join("path/postgres"));
    }

    #[test]
    fn a_named_folder_without_the_programs_is_an_error_even_when_others_exist() {
        let temp = tempfile::tempdir().expect("tempdir");
        fake_install(&temp.path().join("path"));
        let named = Some(temp.path().join("empty"));
        let error = Binaries::search(named, Path::new("/none"), &[temp.path().join("path")])
            .expect_err("must not fall back");
        assert!(
            error.to_string().contains("apt-get install postgresql"),
            "{error}"
        );
    }
}
