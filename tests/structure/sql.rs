//! One folder has the SQL on the tables of the schema `outbox`.

use crate::source::{modules, shown};

/// Where SQL may name the tables of the schema `outbox`. `cli/init` creates and migrates them.
const OWNERS_OF_SQL: [&str; 2] = ["src/store/", "src/cli/init/"];

/// Whether a statement in this code names a table of the schema `outbox`. Prose does not count.
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
    let files = modules();
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
