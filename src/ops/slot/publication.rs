//! Checks whether the publication includes every captured row.

use serde::Serialize;
use slot_manager::publication;

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Settings;

/// Whether the publication includes every captured row.
#[derive(Debug, Serialize)]
pub(crate) struct PublicationStatus {
    pub(crate) name: String,
    pub(crate) problems: Vec<PublicationProblem>,
    /// Whether a lock on a captured table has prevented the check, so that the problems are unknown. PostgreSQL
    /// 18 locks a table to find out which of its columns and rows the publication includes.
    pub(crate) is_locked: bool,
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
/// Database errors.
pub(super) async fn read(sql: &Sql, settings: &Settings) -> Result<PublicationStatus> {
    let name = settings.publication.clone();
    let looked = publication::inspect(sql, &name, &settings.captured()).await;
    let state = match looked.map_err(Error::from) {
        Ok(state) => state,
        Err(error) if error.code() == Code::PostgresTimeout => {
            return Ok(PublicationStatus {
                name,
                problems: Vec::new(),
                is_locked: true,
            });
        }
        Err(error) => return Err(error),
    };
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
        is_locked: false,
    })
}
