//! Checks that `explain` knows every code that `check`, `init` and `slot` can print.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use regex_lite::Regex;

use crate::support::{assert_contains, postrider};

/// The source files that create findings.
const SOURCES: [&str; 7] = [
    "slot-manager/src/preflight",
    "slot-manager/src/preflight.rs",
    "slot-manager/src/publication/problem.rs",
    "src/cli/init",
    "src/ops/check",
    "src/ops/recover/mod.rs",
    "src/ops/slot",
];

/// Patterns that match the code of a finding where the sources create the finding.
const CALLS: [&str; 6] = [
    r#"(?:Finding::(?:ok|info|warning|error)|connections_left|warn)\(\s*"([a-z0-9-]+)""#,
    r#"finding(?:_with_remedy)?\(\s*Severity::\w+,\s*"([a-z0-9-]+)""#,
    r#"Some\(\(\s*"([a-z0-9-]+)","#,
    r#"check: "([a-z0-9-]+)""#,
    r#"code: "([a-z0-9-]+)""#,
    r#"=> "([a-z]+-[a-z0-9-]+)","#,
];

fn rust_files(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let entries = std::fs::read_dir(path).unwrap();
    entries
        .flat_map(|entry| rust_files(&entry.unwrap().path()))
        .collect()
}

/// The codes of all findings in the sources.
fn codes() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = SOURCES
        .iter()
        .flat_map(|source| rust_files(&root.join(source)));
    let texts: Vec<String> = files
        .map(|file| std::fs::read_to_string(file).unwrap())
        .collect();
    let mut codes = BTreeSet::new();
    for call in CALLS {
        let call = Regex::new(call).unwrap();
        let found = texts.iter().flat_map(|text| call.captures_iter(text));
        let before = codes.len();
        codes.extend(found.map(|found| found[1].to_owned()));
        assert!(codes.len() > before, "no code was recognised by {call}");
    }
    codes
}

#[tokio::test]
async fn every_code_of_a_check_can_be_explained() {
    let codes = codes();
    assert!(
        codes.len() > 50,
        "only {} codes were recognised",
        codes.len()
    );
    for code in &codes {
        let ran = postrider(&["explain", code], &[]).await;
        ran.assert_status(0);
        assert_contains(ran.stdout.lines().next().unwrap(), code);
    }
    // Every section of the page must be about a code that a check can print.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/checks.md");
    let page = std::fs::read_to_string(path).unwrap();
    let headings = page.lines().filter(|line| line.starts_with("## "));
    for code in headings.flat_map(|line| line.split('`').skip(1).step_by(2)) {
        assert!(codes.contains(code), "no check prints {code}");
    }
}

#[tokio::test]
async fn an_unknown_code_is_refused_with_a_suggestion() {
    let ran = postrider(&["explain", "slot-mising"], &[]).await;
    ran.assert_status(2);
    assert_contains(&ran.stderr, "did you mean `slot-missing`?");
}
