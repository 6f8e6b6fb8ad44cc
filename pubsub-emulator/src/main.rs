//! `pubsub-emulator`: the emulator as a program. It prints its address and serves until it gets a
//! signal.
//!
//! **Not here:** faults other than a delay, and the journal. A Rust test that needs them uses the
//! library.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use pubsub_emulator::{Action, Emulator, Fault, Recording, RunningEmulator};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Exit status for wrong arguments (clap uses the same value) and for every other error.
const REFUSED: u8 = 2;

/// Run a strict Pub/Sub emulator in memory
///
/// Speaks the gRPC protocol of Pub/Sub in plain text: point clients at it with
/// PUBSUB_EMULATOR_HOST. Like the service, it refuses invalid requests, keeps the order per key, and
/// redelivers. Keeps nothing when it ends.
///
/// Example: pubsub-emulator --listen 127.0.0.1:8085 --topic projects/demo/topics/order.events
#[derive(Debug, Parser)]
#[command(name = "pubsub-emulator", version, max_term_width = 100)]
struct Args {
    /// Address to listen on; port 0 chooses a free port
    #[arg(long, default_value = "127.0.0.1:8085", value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Topics to create at startup, by their full names
    #[arg(long, value_name = "projects/P/topics/T")]
    topic: Vec<String>,
    /// Delay each publish answer by this many milliseconds, like a distant service
    #[arg(long, value_name = "N", default_value_t = 0)]
    delay_ms: u64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    start_logging();
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(REFUSED)
        }
    }
}

/// Logs to standard error. `RUST_LOG` sets the level.
fn start_logging() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

fn run(args: Args) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let runtime = runtime.map_err(|e| format!("cannot start a runtime: {e}"))?;
    runtime.block_on(async {
        let mut signals = Signals::watch().map_err(|e| format!("cannot watch for signals: {e}"))?;
        let emulator = start(&args).await?;
        println!(
            "Pub/Sub emulator: export PUBSUB_EMULATOR_HOST={}",
            emulator.addr()
        );
        signals.next().await;
        tokio::select! {
            () = emulator.shutdown() => {}
            () = signals.next() => {}
        }
        Ok(())
    })
}

async fn start(args: &Args) -> Result<RunningEmulator, String> {
    let emulator = Emulator::builder()
        .listen(args.listen)
        .recording(Recording::Counts)
        .start()
        .await
        .map_err(|e| e.to_string())?;
    for topic in &args.topic {
        let created = emulator.create_topic(topic).await;
        created.map_err(|status| {
            let why = status.message();
            let hint = "write topics as projects/PROJECT/topics/TOPIC";
            format!("cannot create topic {topic}: {why}\n  hint:  {hint}")
        })?;
    }
    if args.delay_ms > 0 {
        let delay = Action::Delay(Duration::from_millis(args.delay_ms));
        emulator.faults().inject(Fault::new(delay));
    }
    Ok(emulator)
}

/// SIGTERM and SIGINT. The first signal starts a shutdown, and the second signal cuts the shutdown
/// short.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn watch() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
