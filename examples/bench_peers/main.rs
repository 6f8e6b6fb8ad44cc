//! The programs that `cargo xtask bench` runs along with the relay, mostly to compare the relay with
//! them.
//!
//! They are an example of the root package, because they need its library and its dependencies. They share
//! one example, because it builds faster in release mode than several examples would. The programs are:
//!
//! - `null` reads a slot through the relay's own source, decoder and mapper, and publishes nothing.
//! - `pgwire` reads a slot with the crate pgwire-replication.
//! - `official` does what `null` does, and publishes with Google's own Publisher.
//! - `bare` sends requests of one message each from memory, with a plain tonic client.
//! - `emulator` is our emulator, which prints a report when its standard input ends.
//!
//! Settings come from the environment, as for `postrider run`. These programs are not for users.

mod bare;
mod emulator;
mod null;
mod official;
mod pgwire;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use postrider::environment::Environment;
use postrider::settings::Settings;

/// Number of worker threads of the runtime: as many as the relay has (`src/cli/run.rs`).
const WORKERS: usize = 2;

type Done<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    peer: Peer,
}

#[derive(Debug, Subcommand)]
enum Peer {
    Null(null::Args),
    Pgwire(pgwire::Args),
    Official(official::Args),
    Bare(bare::Args),
    Emulator(emulator::Args),
}

fn main() -> ExitCode {
    // Fails only if a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match run(Cli::parse().peer) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench_peers: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(peer: Peer) -> Done {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if !matches!(peer, Peer::Emulator(_)) {
        builder.worker_threads(WORKERS);
    }
    builder.enable_all().build()?.block_on(async {
        match peer {
            Peer::Null(args) => null::run(args).await,
            Peer::Pgwire(args) => pgwire::run(args).await,
            Peer::Official(args) => official::run(args).await,
            Peer::Bare(args) => bare::run(args).await,
            Peer::Emulator(args) => emulator::run(args).await,
        }
    })
}

/// Loads the settings that the relay would load from the environment.
fn settings() -> Done<Settings> {
    let environment: Environment = std::env::vars().collect();
    Settings::load(None, &environment, &[]).map_err(|error| error.to_string().into())
}
