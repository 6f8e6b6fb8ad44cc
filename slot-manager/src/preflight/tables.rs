//! Checks of the publication, the captured tables and the relay's own tables.

use super::Expectation;
use super::facts::{Facts, TableRights};
use crate::publication::PublicationState;
use crate::{Finding, QualifiedName, quoted_identifier};

pub(super) fn check_publication(state: &PublicationState) -> Vec<Finding> {
    let name = &state.name;
    let mut findings: Vec<Finding> = state
        .problems()
        .iter()
        .map(|problem| Finding::error(problem.code(), problem.to_string(), problem.remedy()))
        .collect();
    if findings.is_empty() {
        let what = format!("publication {name} contains every captured table");
        findings.push(Finding::ok("publication", what));
    }
    if state.publication.is_some_and(|p| p.other_changes) {
        findings.push(Finding::warning(
            "publication-publishes-other-changes",
            format!("publication {name} publishes more than inserts; the relay skips the rest"),
            format!(
                "alter publication {} set (publish = 'insert')",
                quoted_identifier(name)
            ),
        ));
    }
    findings
}

pub(super) fn check_rights(facts: &Facts, expectation: &Expectation) -> Vec<Finding> {
    let captured = expectation.tables.len();
    let tables = expectation.all_tables();
    let pairs = tables.into_iter().zip(&facts.rights).enumerate();
    let findings = pairs.flat_map(|(index, (table, rights))| {
        let grants = if index < captured {
            captured_table(&facts.role, table, rights)
        } else if expectation.dispatch.as_ref() == Some(table) {
            Some(own_table(&facts.role, table, rights, &DISPATCH))
        } else if *table == expectation.relay {
            Some(own_table(&facts.role, table, rights, &RELAY))
        } else {
            Some(own_table(&facts.role, table, rights, &CAPTURE))
        };
        [grants, hidden_rows(&facts.role, table, rights)]
    });
    findings.flatten().collect()
}

/// Returns an error if row-level security applies to the role. Row-level security does not affect the
/// stream. But recoveries and audits read the table, and PostgreSQL refuses their queries if a policy could
/// hide rows.
fn hidden_rows(role: &str, table: &QualifiedName, rights: &TableRights) -> Option<Finding> {
    rights.hides_rows.then(|| {
        Finding::error(
            "privilege-missing",
            format!(
                "row-level security of {table} applies to role {role}: events missing from the \
                 stream could not be published from the table"
            ),
            format!(
                "alter role {} with bypassrls (or: alter table {table} disable row level security)",
                quoted_identifier(role)
            ),
        )
    })
}

/// Checks whether the role may read a captured table. Returns no finding for a missing table, because the
/// check of the publication reports missing tables.
fn captured_table(role: &str, table: &QualifiedName, rights: &TableRights) -> Option<Finding> {
    if !rights.exists {
        return None;
    }
    let wanted = [("select", rights.may_select)];
    Some(match grants(role, table, rights, &wanted) {
        None => Finding::ok("table-readable", format!("role {role} may read {table}")),
        Some(remedy) => {
            let what = format!("role {role} may not read {table}");
            Finding::error("privilege-missing", what, remedy)
        }
    })
}

/// A table that the relay writes: the name of its check, and whether the relay updates rows.
struct OwnTable {
    check: &'static str,
    is_updated: bool,
}

const DISPATCH: OwnTable = OwnTable {
    check: "dispatch-table",
    is_updated: false,
};

const RELAY: OwnTable = OwnTable {
    check: "relay-table",
    is_updated: true,
};

const CAPTURE: OwnTable = OwnTable {
    check: "capture-table",
    is_updated: true,
};

fn own_table(role: &str, table: &QualifiedName, rights: &TableRights, own: &OwnTable) -> Finding {
    if !rights.exists {
        return Finding::error(
            "schema-missing",
            format!("table {table} does not exist"),
            "run `postrider init --apply` as the owner of the database",
        );
    }
    let wanted = [
        ("select", rights.may_select),
        ("insert", rights.may_insert),
        ("update", rights.may_update || !own.is_updated),
    ];
    match grants(role, table, rights, &wanted) {
        None if rights.is_unlogged => Finding::warning(
            "records-unlogged",
            format!(
                "table {table} is unlogged: a crash of PostgreSQL or a promotion empties it, and then the relay \
                 publishes recorded events again"
            ),
            format!("alter table {table} set logged"),
        ),
        None => Finding::ok(own.check, format!("role {role} may write {table}")),
        Some(remedy) => Finding::error(
            "privilege-missing",
            format!("role {role} may not write {table}"),
            remedy,
        ),
    }
}

/// The statements that grant the missing rights; `None` when no right is missing.
fn grants(
    role: &str,
    table: &QualifiedName,
    rights: &TableRights,
    wanted: &[(&str, bool)],
) -> Option<String> {
    let role = quoted_identifier(role);
    let lacking: Vec<&str> = wanted
        .iter()
        .filter(|(_, has)| !has)
        .map(|(right, _)| *right)
        .collect();
    let mut statements = Vec::new();
    if !rights.may_use_schema {
        let schema = quoted_identifier(&table.schema);
        statements.push(format!("grant usage on schema {schema} to {role}"));
    }
    if !lacking.is_empty() {
        statements.push(format!("grant {} on {table} to {role}", lacking.join(", ")));
    }
    (!statements.is_empty()).then(|| statements.join("; "))
}
