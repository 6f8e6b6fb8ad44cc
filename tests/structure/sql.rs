//! Checks that only `src/store` and `src/cli/init` contain SQL on the tables of the schema
//! `outbox`, and that only `slot-manager` and the files listed here query PostgreSQL's catalogue.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use regex_lite::Regex;

use crate::crates::product;
use crate::source::{SourceFile, literals, modules_in, root, shown};

/// The folders whose SQL may name the tables of the schema `outbox`. `cli/init` creates and
/// migrates these tables.
const OWNERS_OF_SQL: [&str; 2] = ["src/store/", "src/cli/init/"];

/// The modules of the product, except the modules of `slot-manager`.
fn clients() -> Vec<SourceFile> {
    let slot_manager = root().join("slot-manager");
    let folders = product().into_iter();
    let folders = folders.filter(|folder| !folder.starts_with(&slot_manager));
    folders.flat_map(|folder| modules_in(&folder)).collect()
}

/// Whether a statement in this code names a table of the schema `outbox`. A name in prose does not
/// count.
fn has_sql_on_our_tables(code: &str) -> bool {
    const BEFORE_A_TABLE: [&str; 7] = [
        "from", "join", "into", "update", "copy", "truncate", "table",
    ];
    let code = code.to_lowercase();
    code.match_indices(" outbox.").any(|(at, _)| {
        let before = code[..at].trim_end_matches([' ', '\n', '\\']);
        let word = before.rsplit(|c: char| !c.is_alphabetic()).next();
        word.is_some_and(|word| BEFORE_A_TABLE.contains(&word))
    })
}

#[test]
fn only_the_store_has_sql_on_our_own_tables() {
    let files = clients();
    let with_sql: Vec<String> = files
        .iter()
        .filter(|file| has_sql_on_our_tables(&file.code))
        .map(|file| shown(&file.path))
        .collect();
    let is_owned = |path: &&String| OWNERS_OF_SQL.iter().any(|owner| path.starts_with(owner));
    assert!(with_sql.iter().filter(is_owned).count() > 8, "{with_sql:?}");
    let others: Vec<&String> = with_sql.iter().filter(|path| !is_owned(path)).collect();
    assert!(
        others.is_empty(),
        "SQL on the tables of the schema outbox belongs to src/store: {others:?}"
    );
}

/// Functions that every file may call: their names begin with `pg_`, but they do not read the catalogue. They
/// return facts about a row, its transaction or the current transaction, or take an advisory lock.
const NOT_OF_THE_CATALOGUE: [&str; 8] = [
    "pg_advisory_xact_lock",
    "pg_column_size",
    "pg_current_snapshot",
    "pg_current_xact_id",
    "pg_snapshot_xmax",
    "pg_snapshot_xmin",
    "pg_visible_in_snapshot",
    "pg_xact_commit_timestamp",
];

/// Matches a statement that reads the catalogue or the state of the server: it names a catalogue table or
/// a statistics view, calls a function that reads one, looks up a name with a cast such as `::regclass`, or
/// is a SHOW.
static OF_THE_CATALOGUE: LazyLock<Regex> = LazyLock::new(|| {
    const TABLE: &str = r"(?:from|join|,)[\s\\]+(?:pg_catalog\.)?pg_\w+\b|\binformation_schema\.";
    const FUNCTION: &str = r"\b(pg_\w+|current_setting|current_database|format_type|to_reg\w+|has_\w+_privilege|row_security_active)\(";
    const LOOK_UP: &str = r"::reg[a-z]+\b|^\s*show\s+[a-z_.]+\s*;?\s*$";
    Regex::new(&format!("(?i){TABLE}|{FUNCTION}|{LOOK_UP}")).expect("a valid pattern")
});

fn is_catalogue_query(literal: &str) -> bool {
    OF_THE_CATALOGUE.captures_iter(literal).any(|found| {
        let function = found.get(1).map(|name| name.as_str().to_lowercase());
        function.is_none_or(|name| !NOT_OF_THE_CATALOGUE.contains(&name.as_str()))
    })
}

/// The source files outside `slot-manager` that may query the catalogue, each with the reason. In `src/store/`,
/// a statement may query the catalogue only if the same statement also names our own tables. Such a query cannot
/// move to `slot-manager`: between two statements, the state of the server could change.
const MAY_ASK_THE_CATALOGUE: [(&str, &str); 9] = [
    (
        "src/cli/init/script",
        "the DDL of `init` depends on the objects that exist",
    ),
    (
        "src/store/capture_record/recovery_progress.rs",
        "the progress of a recovery is recorded only while our walsender reads the slot",
    ),
    (
        "src/store/capture_record/resolved.rs",
        "a floor is raised only while our walsender reads the slot",
    ),
    (
        "src/store/capture_record/adoption.rs",
        "an adopted record gets a new OID",
    ),
    (
        "src/store/dispatch/pruning.rs",
        "only captured tables that still exist are read",
    ),
    (
        "src/store/dispatch/successor.rs",
        "who reads the slot and who serves it must be read at the same moment",
    ),
    (
        "src/store/relay_row.rs",
        "records are moved to positions before the end of the WAL; a relay says why it does not deliver, \
         unless another session reads the slot",
    ),
    (
        "src/store/relay_row/audits.rs",
        "an audit is recorded only while our walsender reads the slot",
    ),
    (
        "src/store/relay_row/mark.rs",
        "a recovery is marked only while no other relay reads the slot",
    ),
];

/// Returns the entry of `MAY_ASK_THE_CATALOGUE` that allows this statement to query the catalogue,
/// if there is one.
fn allowing_place(path: &str, literal: &str) -> Option<&'static str> {
    let mut places = MAY_ASK_THE_CATALOGUE.iter().map(|(place, _)| *place);
    let place = places.find(|place| path.starts_with(place))?;
    let is_joint = !place.starts_with("src/store/") || literal.contains("outbox.");
    is_joint.then_some(place)
}

#[test]
fn only_slot_manager_asks_the_catalogue() {
    let mut used = BTreeSet::new();
    let mut others = Vec::new();
    for file in clients() {
        let path = shown(&file.path);
        let literals = literals(&file.code).into_iter();
        for literal in literals.filter(|literal| is_catalogue_query(literal)) {
            match allowing_place(&path, literal) {
                Some(place) => _ = used.insert(place),
                None => others.push(format!("  {path}: {literal}")),
            }
        }
    }
    assert!(
        others.is_empty(),
        "queries on the catalogue belong to slot-manager:\n{}",
        others.join("\n")
    );
    for (place, reason) in MAY_ASK_THE_CATALOGUE {
        let is_used = used.contains(place);
        assert!(is_used, "{place} no longer needs to be allowed ({reason})");
    }
}

/// `pg_partition_tree` locks all partitions. `slot-manager/src/sql.rs` explains why this is dangerous.
#[test]
fn no_statement_locks_partitions_through_the_catalogue() {
    for file in product().iter().flat_map(|folder| modules_in(folder)) {
        let mut literals = literals(&file.code).into_iter();
        let locks = literals.any(|literal| literal.contains("pg_partition_tree"));
        assert!(!locks, "{} calls pg_partition_tree", shown(&file.path));
    }
}

#[test]
fn a_catalogue_query_is_recognised() {
    for query in [
        "select 1 from pg_catalog.pg_class c where c.oid = $1",
        "SELECT FROM \\\n    pg_stat_activity",
        "select e.id from a.x e join pg_inherits i on true",
        "select t.relid from root, pg_catalog.pg_partition_tree(root.oid) t",
        "select column_name from information_schema.columns",
        "select pg_current_wal_lsn()",
        "select has_table_privilege($1, 'select')",
        "select current_setting('wal_level')",
        "select 'a.x'::regclass",
        "SHOW server_encoding",
    ] {
        assert!(is_catalogue_query(query), "{query}");
        assert_eq!(allowing_place("src/ops/status.rs", query), None);
        assert_eq!(allowing_place("src/store/relay_row.rs", query), None);
    }
    for other in [
        "select e.ctid, e.tableoid, e.xmin from a.x e",
        "pg_catalog.pg_visible_in_snapshot(e.xid, '1:2:'::pg_snapshot)",
        "see pg_stat_replication for the synchronous standbys",
        "show every event",
    ] {
        assert!(!is_catalogue_query(other), "{other}");
    }
    let code = "f('\"', \"a \\\"b\\\"\"); // \"no\"\nlet x: &'a str = \"c\";";
    assert_eq!(literals(code), ["a \\\"b\\\"", "c"]);
}
