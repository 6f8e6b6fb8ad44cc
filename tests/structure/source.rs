//! Reads the source of the product.

use std::path::{Path, PathBuf};

use regex_lite::Regex;

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The Rust files below a folder, except in build output and dot folders.
pub(crate) fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                found.extend(rust_files(&path));
            }
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
    found
}

pub(crate) fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The name of the module that a line declares or opens.
pub(crate) fn module(line: &str) -> Option<&str> {
    let (visibility, rest) = line.split_once("mod ")?;
    let is_declaration = visibility.is_empty() || visibility.starts_with("pub");
    is_declaration.then(|| rest.trim_end_matches([';', '{', ' ']))
}

/// The files and folders of the test modules that the file `path` declares.
pub(crate) fn test_modules(path: &Path, text: &str) -> Vec<PathBuf> {
    let is_root = ["mod.rs", "lib.rs", "main.rs"]
        .iter()
        .any(|name| path.ends_with(name));
    let folder = if is_root {
        path.with_file_name("")
    } else {
        path.with_extension("")
    };
    let lines: Vec<&str> = text.lines().collect();
    let declared = lines.windows(2).filter(|pair| pair[0] == "#[cfg(test)]");
    declared
        .filter_map(|pair| module(pair[1]))
        .flat_map(|name| [folder.join(name), folder.join(format!("{name}.rs"))])
        .collect()
}

/// The lines of a file, without its inline test modules.
pub(crate) fn without_tests(text: &str) -> Vec<&str> {
    let mut kept = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let opens_tests = |next: &&str| module(next).is_some() && next.ends_with('{');
        if line == "#[cfg(test)]" && lines.peek().is_some_and(opens_tests) {
            lines.by_ref().find(|line| *line == "}");
        } else {
            kept.push(line);
        }
    }
    kept
}

/// A file of the product, without its tests.
pub(crate) struct SourceFile {
    pub(crate) path: PathBuf,
    /// The path of the module, for example `["capture", "scan"]` for `src/capture/scan.rs`.
    pub(crate) module: Vec<String>,
    /// The text of the file without comment lines.
    pub(crate) code: String,
}

pub(crate) fn shown(path: &Path) -> String {
    let path = path.strip_prefix(root()).unwrap_or(path);
    path.display().to_string()
}

/// The modules of the root package, except test modules and the crate roots.
pub(crate) fn modules() -> Vec<SourceFile> {
    modules_in(&root().join("src"))
}

/// The modules of the crate with this source folder, except test modules and the crate roots.
pub(crate) fn modules_in(folder: &Path) -> Vec<SourceFile> {
    let files: Vec<(PathBuf, String)> = rust_files(folder)
        .into_iter()
        .map(|path| (path.clone(), read(&path)))
        .collect();
    let tests: Vec<PathBuf> = files
        .iter()
        .flat_map(|(path, text)| test_modules(path, text))
        .collect();
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let files = files.into_iter().filter_map(|(path, text)| {
        let below = path.strip_prefix(folder).ok()?.with_extension("");
        let parts = below.iter().map(|part| part.to_string_lossy().into_owned());
        let mut module: Vec<String> = parts.collect();
        module.pop_if(|last| last == "mod");
        let is_root = matches!(module.join("/").as_str(), "lib" | "main");
        let is_test = tests.iter().any(|test| path.starts_with(test));
        let lines = without_tests(&text).into_iter().filter(is_code);
        let code = lines.collect::<Vec<_>>().join("\n");
        (!is_root && !is_test).then_some(SourceFile { path, module, code })
    });
    files.collect()
}

/// The string literals in code, without their quotes. Escapes stay as they are.
pub(crate) fn literals(code: &str) -> Vec<&str> {
    // Matches a comment, a character or a string, but not a lifetime. Only a match of a string has a
    // second group.
    let token = r#"//[^\n]*|'(\\.|[^'\\])'|"((?:\\[\s\S]|[^"\\])*)""#;
    let token = Regex::new(token).expect("a valid pattern");
    let found = token.captures_iter(code).filter_map(|found| found.get(2));
    found.map(|literal| literal.as_str()).collect()
}
