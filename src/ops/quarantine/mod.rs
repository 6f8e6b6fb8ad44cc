//! Lists, releases and discards quarantined events.
//!
//! Everything here uses only the database. A running relay polls every two seconds for released and
//! discarded events; a stopped relay reads them at its next start. [`select`] resolves which events an
//! operator means, [`list`] and [`show`] only read, [`change`] releases and discards.
//!
//! Not here: how the relay quarantines an event and publishes a released one (`delivery`).

pub(crate) mod change;
pub(crate) mod list;
pub(crate) mod select;
pub(crate) mod show;

use std::time::Duration;

/// Returns an age in whole seconds. A negative age counts as zero.
fn seconds(age: f64) -> u64 {
    let age = Duration::try_from_secs_f64(age).unwrap_or_default();
    age.as_secs()
}
