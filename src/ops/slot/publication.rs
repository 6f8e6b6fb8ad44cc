//! Checks whether the publication includes every captured row.

use serde::Serialize;
use slot_manager::publication;

use crate::error::Result;
use crate::postgres::Sql;
use crate::settings::Settings;

/// Whether the publication includes every captured row.
#[derive(Debug, Serialize)]
pub(crate) struct PublicationStatus {
    pub(crate) name: String,
    pub(crate) problems: Vec<PublicationProblem>,
}

/// One fault of the publication.
#[derive(Debug, Serialize)]
pub(crate) struct PublicationProblem {
    pub(crate) what: String,
    pub(crate) remedy: String,
}

/// Compares the publication with the captured tables.
///
/// # Errors
/// Errors of a statement.
pub(super) async fn read(sql: &Sql, settings: &Settings) -> Result<PublicationStatus> {
    let name = settings.publication.clone();
    let state = publication::inspect(sql, &name, &settings.captured()).await?;
    let problems = state
        .problems()
        .into_iter()
        .map(|problem| PublicationProblem {
            what: problem.to_string(),
            remedy: problem.remedy(),
        });
    Ok(PublicationStatus {
        name,
        problems: problems.collect(),
    })
}
