//! `postrider emulator`: the strict Pub/Sub emulator as a process.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use pubsub_emulator::{Action, Emulator, Fault, Recording};

use super::{logging, signals};
use crate::error::{Code, Error, Result};

/// Run a strict Pub/Sub emulator in memory
///
/// Speaks the gRPC protocol of Pub/Sub in plain text: point clients at it with
/// PUBSUB_EMULATOR_HOST. Like the service, it refuses invalid requests, keeps the order per key, and
/// redelivers. Keeps nothing when it ends.
///
/// Example: postrider emulator --listen 127.0.0.1:8085 --topic projects/demo/topics/order.events
#[derive(Debug, Args)]
pub(super) struct EmulatorArgs {
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

pub(super) fn run(args: EmulatorArgs) -> Result<ExitCode> {
    logging::start(false);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::new(Code::Internal, "cannot start a runtime").caused_by(e))?;
    runtime.block_on(serve(args))?;
    Ok(ExitCode::SUCCESS)
}

async fn serve(args: EmulatorArgs) -> Result<()> {
    let mut shutdown = signals::watch()?;
    let emulator = Emulator::builder()
        .listen(args.listen)
        .recording(Recording::Counts)
        .start()
        .await
        .map_err(|e| {
            Error::new(Code::PortInUse, e.to_string()).hint("choose another port with --listen")
        })?;
    for topic in &args.topic {
        emulator.create_topic(topic).await.map_err(|status| {
            Error::new(Code::SettingInvalid, format!("cannot create topic {topic}"))
                .caused_by(status.message().to_owned())
                .hint("write topics as projects/PROJECT/topics/TOPIC")
        })?;
    }
    if args.delay_ms > 0 {
        emulator
            .faults()
            .inject(Fault::new(Action::Delay(Duration::from_millis(
                args.delay_ms,
            ))));
    }
    println!(
        "Pub/Sub emulator: export PUBSUB_EMULATOR_HOST={}",
        emulator.addr()
    );
    // An error means that the signal watcher has ended: stop then, too.
    let _ = shutdown.wait_for(|stop| *stop).await;
    emulator.shutdown().await;
    Ok(())
}
