//! Checks that the documentation agrees with the code: settings, links, paths, examples, codes, names of
//! tests and metrics.
//!
//! `cargo xtask settings-doc` runs the two tests of the module `settings` with `UPDATE_DOCS=1`. The tests
//! then write `docs/reference/settings.md` and `docs/reference/settings.schema.json`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod blocks;
mod commands;
mod man;
mod settings;
mod settings_schema;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use postrider::condition::{PruneRun, RelayState, State, TopicCondition};
use postrider::environment::Environment;
use postrider::error::Code;
use postrider::metrics::{KindLabel, Metrics};
use postrider::settings::Settings;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The files below a folder whose names end with `ending`. Leaves out build output, downloaded packages
/// and dot folders.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("an entry").path();
        let name = path
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        if path.is_dir() {
            if !["target", "node_modules"].contains(&&*name) && !name.starts_with('.') {
                found.extend(files(&path, ending));
            }
        } else if name.ends_with(ending) {
            found.push(path);
        }
    }
    found
}

/// The text between backticks on each line.
fn code_spans(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .flat_map(|line| line.split('`').skip(1).step_by(2))
}

#[test]
fn every_relative_link_leads_to_a_file() {
    for page in files(root(), ".md") {
        let text = read(&page);
        for link in text.split("](").skip(1) {
            let target = link.split(')').next().unwrap_or_default();
            let file = target.split('#').next().unwrap_or_default();
            if file.is_empty() || target.contains("://") {
                continue;
            }
            let path = page.parent().expect("a page has a folder").join(file);
            assert!(path.exists(), "{} links to {target}", page.display());
        }
    }
}

#[test]
fn every_path_in_the_architecture_exists() {
    let text = read("ARCHITECTURE.md");
    let is_path = |span: &&str| {
        !span.contains([' ', '*', '<', '{']) && (span.ends_with('/') || span.contains(".rs"))
    };
    let mut paths = 0;
    for path in code_spans(&text).filter(is_path) {
        assert!(root().join(path).exists(), "ARCHITECTURE.md names {path}");
        paths += 1;
    }
    assert!(paths > 50, "only {paths} paths were recognised");
}

#[test]
fn every_test_that_a_guarantee_cites_exists() {
    let page = read("docs/reference/guarantees.md");
    let in_list = page
        .lines()
        .filter_map(|line| line.strip_prefix("- `")?.strip_suffix('`'));
    let cited: BTreeSet<_> = in_list.collect();
    let sources: String = files(root(), ".rs").iter().map(read).collect();
    assert!(
        cited.len() > 20,
        "only {} tests were recognised",
        cited.len()
    );
    for name in cited {
        assert!(
            sources.contains(&format!("fn {name}(")),
            "guarantees.md cites {name}"
        );
    }
}

#[test]
fn every_test_cited_for_a_bug_of_a_peer_exists() {
    let page = read("docs/explanation/peer-bugs.md");
    let sources: String = files(root(), ".rs").iter().map(read).collect();
    let is_test = |span: &&str| span.matches('_').count() > 3 && !span.contains('(');
    let cited: BTreeSet<_> = code_spans(&page).filter(is_test).collect();
    assert!(cited.len() > 20, "only {} were recognised", cited.len());
    for name in cited {
        assert!(
            sources.contains(&format!("fn {name}(")),
            "peer-bugs.md cites {name}"
        );
    }
}

#[test]
fn every_toml_example_is_accepted_as_settings() {
    let mut examples = 0;
    for page in files(&root().join("docs"), ".md") {
        for block in read(&page).split("```toml\n").skip(1) {
            let example = block.split("```").next().unwrap_or_default();
            let file = tempfile::NamedTempFile::new().expect("a temporary file");
            std::fs::write(file.path(), example).expect("the file can be written");
            if let Err(error) = Settings::load(Some(file.path()), &Environment::new(), &[]) {
                panic!("{}: {error}\n{example}", page.display());
            }
            examples += 1;
        }
    }
    assert!(examples >= 4, "only {examples} examples were found");
}

/// If a link to a file in examples/producers/ precedes a fenced block, the block must be part of that
/// file.
#[test]
fn every_snippet_for_producers_is_part_of_its_file() {
    let page = read("docs/how-to/write-events.md");
    let parts: Vec<&str> = page.split("\n```").collect();
    let mut shown = BTreeSet::new();
    for (prose, block) in parts.chunks_exact(2).map(|pair| (pair[0], pair[1])) {
        let Some((_, link)) = prose.rsplit_once("](../../examples/producers/") else {
            continue;
        };
        let name = link.split(')').next().unwrap_or_default();
        let (folder, _) = name.split_once('/').unwrap_or_default();
        let (_, snippet) = block.split_once('\n').unwrap_or_default();
        if folder.is_empty() {
            continue;
        }
        let source = read(Path::new("examples/producers").join(name));
        assert!(
            snippet.lines().count() > 5 && source.contains(snippet),
            "write-events.md shows code that is not in examples/producers/{name}:\n{snippet}"
        );
        shown.insert(folder.to_owned());
    }
    let folder = root().join("examples/producers");
    let entries = std::fs::read_dir(folder).expect("the folder of the examples");
    let entries = entries.map(|entry| entry.expect("an entry"));
    let folders = entries.filter(|entry| entry.path().is_dir());
    let folders = folders.map(|entry| entry.file_name().to_string_lossy().into_owned());
    assert_eq!(
        shown,
        folders.collect(),
        "write-events.md shows each example"
    );
}

#[test]
fn every_metric_named_in_the_docs_exists() {
    let metrics = Metrics::default();
    let label = KindLabel { kind: "x" };
    metrics.publish_failures.get_or_create(&label).inc();
    metrics.unexpected_changes.get_or_create(&label).inc();
    metrics.events_quarantined.get_or_create(&label).inc();
    metrics.recoveries.get_or_create(&label).inc();
    metrics.rows_pruned.get_or_create(&label).inc();
    metrics.prune_runs.ended(PruneRun::default());
    metrics.trace_spans.get_or_create(&label).inc();
    metrics.events_in_quarantine.set(Some(0.0));
    metrics.lag_bytes.set(Some(0.0));
    metrics.retained_bytes.set(Some(0.0));
    metrics.headroom_bytes.set(Some(0.0));
    metrics.publication_ok.set(Some(1.0));
    metrics.audit_failing.set(Some(0.0));
    metrics.blocked_keys.set(Some(0.0));
    metrics.oldest_pending.set(None);
    metrics.prune_runs.ended(PruneRun::default());
    let mut condition = metrics.condition(&RelayState::default());
    condition.state = State::CatchingUp;
    condition.caught_up_in_seconds = Some(1.0);
    condition.topics.push(TopicCondition {
        topic: "projects/p/topics/t".to_owned(),
        code: "topic-missing".to_owned(),
        error: String::new(),
        hint: String::new(),
        for_seconds: 1.0,
        failures: 1,
        waiting_events: 1,
        oldest_seconds: Some(1.0),
        keys: Vec::new(),
    });
    metrics
        .topic_failures
        .count(&"t".into(), Code::TopicMissing);
    let encoded = metrics.encode("postrider", &condition);
    let exported = encoded.expect("metrics can be encoded");
    for page in [
        "deploy/prometheus-alerts.yml",
        "deploy/prometheus-alerts-test.yml",
        "docs/how-to/alerts.md",
        "deploy/grafana-dashboard.json",
        "docs/how-to/operations.md",
        "docs/reference/metrics.md",
        "README.md",
    ] {
        let text = read(page);
        let prefixes = ["postrider_", "process_"];
        for (at, _) in prefixes
            .iter()
            .flat_map(|prefix| text.match_indices(prefix))
        {
            let name: String = text[at..]
                .chars()
                .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
                .collect();
            let is_role = ["postrider_relay", "postrider_writer"].contains(&name.as_str());
            assert!(is_role || exported.contains(&name), "{page} names {name}");
        }
    }
}

#[test]
fn every_state_has_a_row_in_the_table_of_states() {
    let text = read("docs/reference/states.md");
    let rows = text.lines().filter_map(|line| {
        let name = line.strip_prefix("| `")?.split('`').next()?;
        (line.matches('|').count() == 5).then(|| name.to_owned())
    });
    let rows: BTreeSet<String> = rows.collect();
    let states = State::ALL.iter().map(|state| state.name().to_owned());
    assert_eq!(rows, states.collect());
}
