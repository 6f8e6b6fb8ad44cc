//! Provides the environment variables of the process. They are read once, when the process starts, and
//! passed on from there.

pub use replication::Environment;
