//! The environment variables that a [`Target`](crate::Target) may be read from.

use std::collections::BTreeMap;

/// The environment variables, passed in for tests.
pub type Environment = BTreeMap<String, String>;
