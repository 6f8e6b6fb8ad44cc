//! The environment variables from which a [`Target`](crate::Target) can be read.

use std::collections::BTreeMap;

/// Environment variables by name. Passed in as a value, so that tests need not change the real
/// environment.
pub type Environment = BTreeMap<String, String>;
