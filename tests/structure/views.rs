//! Checks that `src/cli` and `src/http` only parse and print: they contain no SQL, and they get
//! everything that they show from `src/ops`.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use regex_lite::Regex;

use crate::layers::imports;
use crate::source::{SourceFile, literals, modules, shown};

/// The views: the folders of `src` that only parse and print.
const VIEWS: [&str; 2] = ["cli", "http"];

/// The folders of `src` that a view may reach only through `ops`.
const BEHIND_OPS: [&str; 7] = [
    "audit", "capture", "delivery", "lanes", "recovery", "session", "store",
];

/// The parts of the views that may import a folder of `BEHIND_OPS` or the crate `tokio_postgres`, each with the
/// reason.
const MAY_IMPORT: [(&str, &str, &str); 4] = [
    (
        "src/cli/init",
        "capture",
        "`init` adds the columns of captured tables",
    ),
    (
        "src/cli/init",
        "store",
        "`init` reads the capture records that it has written",
    ),
    (
        "src/cli/init",
        "tokio_postgres",
        "`init` runs the migrations and branches on SQLSTATEs",
    ),
    (
        "src/cli/run.rs",
        "session",
        "`run` is the relay itself, not an operation on one",
    ),
];

/// The only part of the views that may contain SQL: `postrider init` creates and migrates the objects in the database.
const MAY_CONTAIN_SQL: &str = "src/cli/init";

/// Matches a call that sends a statement to PostgreSQL.
static STATEMENT_CALL: LazyLock<Regex> = LazyLock::new(|| {
    const METHODS: &str = r"\.(?:batch_execute|copy_in|copy_out|execute|prepare|query\w*|simple_query\w*|transaction)\(";
    Regex::new(METHODS).expect("a valid pattern")
});

/// Matches the text of a statement that reads or writes rows. Does not match DDL, because a view may advise the
/// operator to run DDL, for example "alter table a.x add column seq".
static STATEMENT_TEXT: LazyLock<Regex> = LazyLock::new(|| {
    const FORMS: &str = r"(?i)^\s*select\b|\bselect\s[^.;]*\sfrom\s|\binsert\s+into\s|\bdelete\s+from\s|\bupdate\s+\S+\s+set\s|^\s*set\s+\w+\s*=";
    Regex::new(FORMS).expect("a valid pattern")
});

fn views() -> Vec<SourceFile> {
    let files = modules().into_iter();
    let files = files.filter(|file| VIEWS.contains(&file.module[0].as_str()));
    files.collect()
}

/// The folders of `BEHIND_OPS` that this file imports, and `tokio_postgres` if the file names that
/// crate.
fn imported(file: &SourceFile) -> BTreeSet<&'static str> {
    let paths = imports(file);
    let is_imported = |name: &&&str| {
        paths
            .iter()
            .any(|path| path.first().map(String::as_str) == Some(**name))
    };
    let mut names: BTreeSet<&str> = BEHIND_OPS.iter().filter(is_imported).copied().collect();
    if file.code.contains("tokio_postgres") {
        names.insert("tokio_postgres");
    }
    names
}

#[test]
fn views_reach_the_database_and_the_relay_only_through_ops() {
    let files = views();
    assert!(files.len() > 30, "only {} files found", files.len());
    let mut used = BTreeSet::new();
    let mut report = Vec::new();
    for file in &files {
        let path = shown(&file.path);
        for name in imported(file) {
            let is_allowed = |(place, allowed, _): &&(&str, &str, &str)| {
                path.starts_with(place) && *allowed == name
            };
            match MAY_IMPORT.iter().find(is_allowed) {
                Some(entry) => _ = used.insert(entry),
                None => report.push(format!("  {path} imports {name}")),
            }
        }
    }
    assert!(
        report.is_empty(),
        "move these to src/ops, which returns plain data:\n{}",
        report.join("\n")
    );
    for entry in &MAY_IMPORT {
        let (place, name, reason) = entry;
        let is_used = used.contains(entry);
        assert!(is_used, "{place} no longer needs {name} ({reason})");
    }
}

fn has_sql(code: &str) -> bool {
    let is_statement = |literal: &&str| STATEMENT_TEXT.is_match(literal);
    STATEMENT_CALL.is_match(code) || literals(code).iter().any(is_statement)
}

#[test]
fn views_contain_no_sql() {
    let files = views();
    let with_sql = files.iter().filter(|file| has_sql(&file.code));
    let with_sql: Vec<String> = with_sql.map(|file| shown(&file.path)).collect();
    let (allowed, others): (Vec<&String>, Vec<&String>) = with_sql
        .iter()
        .partition(|path| path.starts_with(MAY_CONTAIN_SQL));
    assert!(
        others.is_empty(),
        "SQL belongs to src/ops or below: {others:?}"
    );
    assert!(
        !allowed.is_empty(),
        "{MAY_CONTAIN_SQL} no longer needs to be allowed"
    );
}

#[test]
fn a_statement_is_recognised() {
    for code in [
        "sql.query_opt(&statement, &[])",
        "sql.client_mut().transaction().await?",
        "let x = \"select 1\";",
        "format!(\n    \"select {} from {table} limit 5\", columns)",
        "\"with old as (select id from a.x) delete from a.x\"",
        "\"insert into outbox.dispatch values ($1)\"",
        "\"UPDATE a.x SET b = 1\"",
        "\"set statement_timeout = '2s'\"",
    ] {
        assert!(has_sql(code), "{code}");
    }
    for code in [
        "RecoveryRequest::prepare(&sql, settings)",
        "\"create the slot first; then set prune_after = off\"",
        "\"run `postrider init --apply` or alter table a.x add column seq\"",
        "replay::begin(sql, &args.query)",
    ] {
        assert!(!has_sql(code), "{code}");
    }
}
