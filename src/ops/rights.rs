//! Names the GRANT that our role lacks, for errors of commands and of the HTTP port.

use crate::error::Error;
use crate::settings::Settings;
use crate::store::privileges;
pub(crate) use crate::store::privileges::Purpose;

/// If the error says that a privilege is missing, connects to the database to find the exact GRANT, and puts
/// it into the error's hint. For any other error, only fills in the names of the role and the database in the
/// hint.
pub(crate) async fn named(error: Error, settings: &Settings, purpose: Purpose) -> Error {
    match settings.database() {
        Ok(servers) => privileges::name_missing(error, servers, &settings.tables, purpose).await,
        Err(_) => error,
    }
}
