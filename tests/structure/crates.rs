//! Checks the rules for the crates of the product: which crates of the workspace each crate may use, and
//! which dependencies it must not have.

use std::path::PathBuf;

use crate::dependencies;
use crate::source::{read, root, rust_files, shown};

const POSTGRES: [&str; 4] = [
    "decoder",
    "postgres-protocol",
    "slot-manager",
    "tokio-postgres",
];
const PUBSUB: [&str; 7] = [
    "google-cloud-auth",
    "google-cloud-pubsub",
    "googleapis-tonic-google-pubsub-v1",
    "h2",
    "outbox-event",
    "publisher",
    "tonic",
];

/// The rule for a library crate of the product, or for a tool in `crates/`.
struct CrateRule {
    folder: &'static str,
    /// The crates of this workspace that the crate may use.
    uses: &'static [&'static str],
    /// Forbidden dependencies. For example, a crate that only reads from PostgreSQL must not need Pub/Sub.
    never: &'static [&'static str],
}

const CRATES: [CrateRule; 7] = [
    CrateRule {
        folder: "decoder",
        uses: &[],
        never: &PUBSUB,
    },
    CrateRule {
        folder: "slot-manager",
        uses: &["decoder"],
        never: &PUBSUB,
    },
    // A tool for the repository. No package of the product may depend on it.
    CrateRule {
        folder: "crates/book",
        uses: &["xtask"],
        never: &PUBSUB,
    },
    CrateRule {
        folder: "crates/outbox-event",
        uses: &[],
        never: &["tokio-postgres", "postgres-protocol", "h2", "tonic"],
    },
    CrateRule {
        folder: "crates/publisher",
        uses: &[],
        never: &POSTGRES,
    },
    CrateRule {
        folder: "crates/printable",
        uses: &[],
        never: &[],
    },
    CrateRule {
        folder: "crates/replication",
        uses: &["decoder", "printable"],
        never: &PUBSUB,
    },
];

/// The source folders (`src`) of the root package and of each crate in [`CRATES`].
pub(crate) fn product() -> Vec<PathBuf> {
    let crates = CRATES.iter().map(|rule| root().join(rule.folder));
    let folders = std::iter::once(root().to_owned()).chain(crates);
    folders.map(|folder| folder.join("src")).collect()
}

/// The packages of this workspace on which the package with this manifest depends.
fn our_packages(manifest: &str) -> Vec<&str> {
    let ours = manifest.lines().filter(|line| line.contains("{ path = "));
    ours.filter_map(|line| line.split(' ').next()).collect()
}

#[test]
fn every_crate_in_the_folder_crates_has_a_rule() {
    for entry in std::fs::read_dir(root().join("crates")).expect("the folder of the crates") {
        let path = entry.expect("an entry").path();
        let folder = shown(&path);
        let is_known = CRATES.iter().any(|rule| rule.folder == folder);
        assert!(is_known, "add {folder} to CRATES");
    }
}

#[test]
fn a_crate_uses_only_the_crates_that_its_rule_allows() {
    let workspace = read(&root().join("Cargo.toml"));
    let ours = our_packages(&workspace);
    assert!(ours.contains(&"publisher"), "{ours:?}");
    assert!(ours.contains(&"replication"), "{ours:?}");
    let mut seen = 0;
    for rule in &CRATES {
        let manifest = read(&root().join(rule.folder).join("Cargo.toml"));
        for used in dependencies(&manifest) {
            let is_above = ours.contains(&used) && !rule.uses.contains(&used);
            let is_banned = rule.never.contains(&used);
            assert!(!is_above && !is_banned, "{} uses {used}", rule.folder);
            seen += 1;
        }
    }
    assert!(seen > 20, "only {seen} dependencies were recognised");
}

#[test]
fn log_lines_of_crates_have_the_name_of_the_program() {
    let levels = ["error", "warn", "info", "debug", "trace"];
    for rule in &CRATES {
        for path in rust_files(&root().join(rule.folder).join("src")) {
            let code = read(&path);
            for level in levels {
                for call in code.split(&format!("tracing::{level}!(")).skip(1) {
                    let has_target = call.trim_start().starts_with("target: LOG_TARGET");
                    let place = shown(&path);
                    assert!(
                        has_target,
                        "{place}: {level}! needs `target: LOG_TARGET`, or RUST_LOG=postrider=debug hides its line"
                    );
                }
            }
            if let Some((_, target)) = code.split_once("const LOG_TARGET: &str = ") {
                assert!(target.starts_with("\"postrider::"), "{}", shown(&path));
            }
        }
    }
}
