//! Checks the structure of the code:
//!
//! - This file: each type name is unique, no file is too long, and the lock file of the fuzzers is complete.
//! - `crates`: each crate uses only the crates that it may use.
//! - `layers`: imports point downwards and form no cycles, and no folder is too large.
//! - `sql`: only `src/store` and `src/cli/init` contain SQL on our own tables. Only `slot-manager` and a few other
//!   files query PostgreSQL's catalogue.
//! - `views`: `src/cli` and `src/http` contain no SQL, and get everything that they show from `src/ops`.
//! - `dispatch_mode`: only few files name the mode of the setting `dispatch`.

mod crates;
mod dispatch_mode;
mod layers;
mod source;
mod sql;
mod views;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use source::{read, root, rust_files, test_modules, without_tests};

/// The only type name that several crates may define: each may have an alias for results with its own error.
const ALIAS_PER_CRATE: &str = "Result";

/// Maximum number of lines of a file. A longer file is about two ideas: split `x.rs` into `x.rs` and
/// `x/part.rs`.
const LINES_MAX: usize = 400;

/// The name of the type or trait that a line defines. Associated types do not count.
fn defined(line: &str) -> Option<&str> {
    let is_indented = line.starts_with(' ');
    let line = line.trim_start();
    let line = match line.strip_prefix("pub(") {
        Some(rest) => rest.split_once(") ")?.1,
        None => line.strip_prefix("pub ").unwrap_or(line),
    };
    let (keyword, rest) = line.split_once(' ')?;
    let is_definition = match keyword {
        "struct" | "enum" | "trait" => true,
        "type" => !is_indented,
        _ => false,
    };
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
    let name = &rest[..end.unwrap_or(rest.len())];
    (is_definition && name.starts_with(char::is_uppercase)).then_some(name)
}

#[test]
fn every_type_of_the_product_has_a_name_of_its_own() {
    let files: Vec<(PathBuf, String)> = crates::product()
        .iter()
        .flat_map(|folder| rust_files(folder))
        .map(|path| (path.clone(), read(&path)))
        .collect();
    let tests: Vec<PathBuf> = files
        .iter()
        .flat_map(|(path, text)| test_modules(path, text))
        .collect();
    let is_test = |path: &Path| tests.iter().any(|test| path.starts_with(test));

    let mut places: BTreeMap<&str, Vec<&Path>> = BTreeMap::new();
    for (path, text) in files.iter().filter(|(path, _)| !is_test(path)) {
        let defined = without_tests(text).into_iter().filter_map(defined);
        for name in defined.filter(|name| *name != ALIAS_PER_CRATE) {
            places.entry(name).or_default().push(path);
        }
    }
    assert!(places.len() > 300, "only {} types found", places.len());

    let mut report = String::new();
    for (name, paths) in places.iter().filter(|(_, paths)| paths.len() > 1) {
        let _ = writeln!(report, "{name}");
        for path in paths {
            let path = path.strip_prefix(root()).unwrap_or(path);
            let _ = writeln!(report, "  {}", path.display());
        }
    }
    assert!(
        report.is_empty(),
        "types with the same name; say in each name which one is meant:\n{report}"
    );
}

#[test]
fn no_file_is_longer_than_the_limit() {
    let mut report = String::new();
    for path in rust_files(root()) {
        let lines = read(&path).lines().count();
        if lines > LINES_MAX {
            let path = path.strip_prefix(root()).unwrap_or(&path);
            let _ = writeln!(report, "  {lines} {}", path.display());
        }
    }
    assert!(
        report.is_empty(),
        "files with more than {LINES_MAX} lines; split them by idea:\n{report}"
    );
}

/// The names after `[dependencies]` in a manifest.
fn dependencies(manifest: &str) -> Vec<&str> {
    let section = manifest
        .split("\n[dependencies]\n")
        .nth(1)
        .unwrap_or_default();
    let section = section.split("\n[").next().unwrap_or_default();
    let names = section.lines().filter(|line| !line.starts_with('#'));
    names
        .filter_map(|line| line.split(['.', ' ', '=']).next())
        .filter(|name| !name.is_empty())
        .collect()
}

#[test]
fn the_lock_file_of_the_fuzzers_has_the_dependencies_of_the_product() {
    let lock = read(&root().join("fuzz/Cargo.lock"));
    let ours = lock
        .split("\nname = \"postrider\"\n")
        .nth(1)
        .unwrap_or_default();
    let ours = ours.split("\n[[package]]").next().unwrap_or_default();
    let manifest = read(&root().join("Cargo.toml"));
    let names = dependencies(&manifest);
    assert!(names.len() > 20, "{names:?}");
    let is_locked = |name: &&&str| {
        ours.contains(&format!("\n \"{name}\"")) || ours.contains(&format!("\n \"{name} "))
    };
    let missing: Vec<&&str> = names.iter().filter(|name| !is_locked(name)).collect();
    assert!(
        missing.is_empty(),
        "run `cargo metadata --manifest-path fuzz/Cargo.toml` to lock {missing:?}"
    );
}
