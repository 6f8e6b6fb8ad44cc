//! Measures the relay. `cargo xtask bench` and `cargo xtask memory` run this program.
//!
//! `measurement` implements the command `bench`: drains (`scenario`, `compare`), latencies, memory, the cost
//! of inserts, the cost for the server, the load of an idle relay, and the start. `memory` implements the
//! command `memory`. Both commands share the code for the server (`database`), the rows in its outbox
//! (`backlog`) and the measured programs (`process`, `peers`).

mod backlog;
mod compare;
mod contestant;
mod cores;
mod database;
mod drain;
mod idle;
mod insert;
mod latency;
mod measurement;
mod memory;
mod output;
mod peers;
mod process;
mod report;
mod sample;
mod scenario;
mod server_cost;
mod start;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use measurement::BenchArgs;
use memory::MemoryArgs;

#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask", about = "Measures the relay")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Drain a backlog and compare with pg_recvlogical: events per second, ratio, peak memory
    Bench(BenchArgs),
    /// Measure the relay's peak memory under loads that would make a careless relay grow without
    /// limit
    Memory(MemoryArgs),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Bench(args) => measurement::run(&args),
        Command::Memory(args) => memory::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nbench: {error}");
            ExitCode::FAILURE
        }
    }
}
