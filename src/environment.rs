//! The environment variables of the process, read once at the start and passed on from there.

use std::collections::BTreeMap;

/// The environment variables, passed in for tests.
pub type Environment = BTreeMap<String, String>;
