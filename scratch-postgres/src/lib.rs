//! Throw-away PostgreSQL servers for the demo, the tests and the benchmarks.
//!
//! ```no_run
//! use scratch_postgres::{ScratchPostgres, StopMode};
//! # fn main() -> Result<(), scratch_postgres::Error> {
//! let mut server = ScratchPostgres::builder().setting("wal_sender_timeout", "5s").start()?;
//! println!("connect to {}", server.url("postgres"));
//! server.restart(StopMode::Fast)?; // same port, same data
//! server.kill_9()?; // a crash: postmaster and every backend at once
//! server.start_again()?; // crash recovery
//! # Ok(()) } // dropped: stopped at once, folder removed
//! ```
//!
//! Each [`ScratchPostgres`] is a real PostgreSQL server, with its own data folder, its own port on
//! 127.0.0.1 and its own Unix socket. The settings favour speed over durability ([`Builder::durable`]
//! reverses that). If the calling process dies without dropping the value, even by SIGKILL, a watchdog
//! process stops the server and removes the folder.
//!
//! PostgreSQL refuses to run as root. If the caller is root, everything runs as the account
//! `postgres`, or as `nobody` if there is no such account.
//!
//! **Not here:** SQL (connect with the client that the test wants to use), and an async runtime.

mod account;
mod binaries;
mod builder;
mod error;
mod folder;
mod port;
mod process;
mod server;
mod watchdog;

pub use builder::{Builder, Tls};
pub use error::Error;
pub use server::{ScratchPostgres, StopMode};

/// Environment variable that names the folder with `initdb` and `postgres`.
pub const BIN_FOLDER_VARIABLE: &str = binaries::FOLDER_VARIABLE;
