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
//! A server is a real one: own data folder, own port on 127.0.0.1, own Unix socket. Settings are
//! tuned for speed, not for durability ([`Builder::durable`] turns that round). When the calling
//! process dies without dropping the value, even by SIGKILL, a watchdog process stops the server
//! and removes the folder.
//!
//! PostgreSQL refuses to run as root. Under root everything runs as the account `postgres`, or
//! `nobody` where there is no such account.
//!
//! **Not here:** SQL. Connect with the client that the test wants to use. No async runtime either.

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

/// Environment variable that names the folder with `initdb` and `postgres` to use.
pub const BIN_FOLDER_VARIABLE: &str = binaries::FOLDER_VARIABLE;
