//! Provides the environment variables of the process, read once at the start and passed on from
//! there.

pub use replication::Environment;
