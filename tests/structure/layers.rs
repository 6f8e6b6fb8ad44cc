//! Checks that imports point downwards and form no cycles, and that no folder is too large.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::crates::product;
use crate::source::{SourceFile, modules, modules_in, read, root, rust_files, shown};

/// The modules of `src`, from the bottom layer to the top. Each module may import only earlier
/// ones.
const LAYERS: [&str; 22] = [
    "build_info",
    "environment",
    "server_clock",
    "event",
    "mapping",
    "error",
    "throttled_log",
    "postgres",
    "settings",
    "condition",
    "metrics",
    "lanes",
    "traces",
    "store",
    "capture",
    "delivery",
    "recovery",
    "audit",
    "session",
    "ops",
    "http",
    "cli",
];

/// Maximum share of the lines of `src` in one folder, in percent. A larger folder is about several
/// subjects and should be split.
const FOLDER_PERCENT_MAX: usize = 20;

/// Lists the paths in a use tree: `a::{b, c::D}` becomes `a::b` and `a::c::D`.
fn paths_in(prefix: &str, tree: &str, paths: &mut Vec<String>) {
    let tree = tree.trim();
    let Some((head, rest)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        paths.push(format!("{prefix}{path}"));
        return;
    };
    let prefix = format!("{prefix}{head}");
    let (mut depth, mut start) = (0, 0);
    for (at, character) in rest.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                if !rest[start..at].trim().is_empty() {
                    paths_in(&prefix, &rest[start..at], paths);
                }
                start = at + 1;
                if character == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
}

/// The paths that a file imports or names from `crate` or `super`, as paths from the root of the
/// crate.
pub(crate) fn imports(file: &SourceFile) -> Vec<Vec<String>> {
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let mut paths = Vec::new();
    let mut rest = file.code.as_str();
    while let Some(at) = ["crate::", "super::"]
        .iter()
        .filter_map(|start| rest.find(start))
        .min()
    {
        let found = &rest[at..];
        let end = found.find(|c| !is_path(c)).unwrap_or(found.len());
        // A path with braces is a use tree, which extends to the end of its statement.
        let end = match found[end..].chars().next() {
            Some('{') => found.find(';').unwrap_or(found.len()),
            _ => end,
        };
        paths_in("", &found[..end], &mut paths);
        rest = &found[end..];
    }
    let absolute = |path: String| {
        let mut names = path.split("::").map(str::to_owned).peekable();
        let mut module = file.module.clone();
        if names.next_if(|name| name == "crate").is_some() {
            module.clear();
        }
        while names.next_if(|name| name == "super").is_some() {
            module.pop();
        }
        module.extend(names);
        module
    };
    paths.into_iter().map(absolute).collect()
}

#[test]
fn a_folder_imports_only_folders_of_lower_layers() {
    let layer = |name: &str| LAYERS.iter().position(|layer| *layer == name);
    let mut report = BTreeSet::new();
    for file in modules() {
        let folder = &file.module[0];
        let Some(own) = layer(folder) else {
            report.insert(format!("  {folder} is not in LAYERS"));
            continue;
        };
        for import in imports(&file) {
            let above = import.first().filter(|name| layer(name) > Some(own));
            report.extend(above.map(|above| format!("  {} imports {above}", shown(&file.path))));
        }
    }
    let report: Vec<String> = report.into_iter().collect();
    assert!(
        report.is_empty(),
        "imports that point upwards; see LAYERS:\n{}",
        report.join("\n")
    );
}

/// Follows the imports of the last module in `trail`. Returns true if they lead to a cycle, and then leaves
/// only the modules of this cycle in `trail`.
fn circle<'a>(
    edges: &BTreeMap<&'a [String], BTreeSet<&'a [String]>>,
    trail: &mut Vec<&'a [String]>,
    done: &mut BTreeSet<&'a [String]>,
) -> bool {
    let Some(last) = trail.last().copied() else {
        return false;
    };
    for next in edges.get(last).into_iter().flatten() {
        let known = trail.iter().position(|module| module == next);
        if let Some(begin) = known {
            trail.drain(..begin);
            return true;
        }
        if !done.contains(next) {
            trail.push(next);
            if circle(edges, trail, done) {
                return true;
            }
            trail.pop();
        }
    }
    done.insert(last);
    false
}

#[test]
fn sibling_modules_form_no_circle() {
    let edges: Vec<usize> = product()
        .iter()
        .map(|folder| check_circles(folder))
        .collect();
    let of_the_root = edges.iter().max().copied().unwrap_or_default();
    assert!(of_the_root > 80, "only {of_the_root} modules import");
    assert!(edges.iter().sum::<usize>() > 100, "{edges:?}");
}

/// Checks that modules with the same parent do not import each other in a cycle. Returns how many
/// modules import such a sibling.
fn check_circles(folder: &Path) -> usize {
    let files = modules_in(folder);
    let imported: Vec<(&SourceFile, Vec<Vec<String>>)> =
        files.iter().map(|file| (file, imports(file))).collect();
    let is_module = |path: &[String]| files.iter().any(|file| file.module.starts_with(path));
    let mut edges: BTreeMap<&[String], BTreeSet<&[String]>> = BTreeMap::new();
    for (file, imports) in &imported {
        for import in imports {
            let same = file.module.iter().zip(import).take_while(|(a, b)| a == b);
            let end = same.count() + 1;
            if let (Some(from), Some(to)) = (file.module.get(..end), import.get(..end))
                && is_module(to)
            {
                edges.entry(from).or_default().insert(to);
            }
        }
    }
    let mut done = BTreeSet::new();
    for module in edges.keys() {
        let mut trail = vec![*module];
        if !done.contains(module) && circle(&edges, &mut trail, &mut done) {
            let back = trail.iter().chain(trail.first());
            let names: Vec<String> = back.map(|module| module.join("::")).collect();
            panic!(
                "{}: modules import each other in a circle: {}",
                shown(folder),
                names.join(" -> ")
            );
        }
    }
    edges.len()
}

#[test]
fn no_folder_is_larger_than_the_limit() {
    let folder = root().join("src");
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    for path in rust_files(&folder) {
        let below = path.strip_prefix(&folder).unwrap_or(&path);
        let name = below.iter().next().unwrap_or_default().to_string_lossy();
        *lines.entry(name.into_owned()).or_default() += read(&path).lines().count();
    }
    let all: usize = lines.values().sum();
    for (name, lines) in &lines {
        let percent = lines * 100 / all;
        assert!(
            percent <= FOLDER_PERCENT_MAX,
            "src/{name} has {percent} % of the lines of src; split it by subject"
        );
    }
}
