//! Runs our emulator, and prints a report when the standard input ends.
//!
//! The first line of the output is the address on which the emulator listens. The last line is JSON with
//! the totals. With `--arrivals`, the JSON also has the time at which each event arrived, by event id, in
//! microseconds since 1970.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pubsub_emulator::{Action, Emulator, Fault, Recording, RunningEmulator};
use serde_json::json;

use crate::Done;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Address to listen on; port 0 chooses a free port
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Full name of the topic
    #[arg(long)]
    topic: String,
    /// Milliseconds by which each answer is delayed
    #[arg(long, default_value_t = 0)]
    delay_ms: u64,
    /// Report when each event arrived
    #[arg(long)]
    arrivals: bool,
}

pub(crate) async fn run(args: Args) -> Done {
    let recording = if args.arrivals {
        Recording::Attempts
    } else {
        Recording::Counts
    };
    let emulator = Emulator::builder()
        .listen(args.listen)
        .recording(recording)
        .start()
        .await?;
    emulator.create_topic(&args.topic).await?;
    if args.delay_ms > 0 {
        let late = Action::Delay(Duration::from_millis(args.delay_ms));
        emulator.faults().inject(Fault::new(late));
    }
    println!("{}", emulator.addr());
    // Read the input until it ends, and ignore it.
    let end = || std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    tokio::task::spawn_blocking(end).await??;
    let counts = emulator.journal().counts();
    let report = json!({
        "requests": counts.attempts,
        "stored": counts.stored_messages,
        "arrivals": arrivals(&emulator)?,
    });
    println!("{report}");
    emulator.shutdown().await;
    Ok(())
}

/// Returns the time at which each event first arrived.
fn arrivals(emulator: &RunningEmulator) -> Done<BTreeMap<String, u64>> {
    let journal = emulator.journal();
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let started = now.saturating_sub(journal.now());
    let mut arrivals = BTreeMap::new();
    for attempt in journal.attempts() {
        let at = u64::try_from((started + attempt.received).as_micros())?;
        for id in attempt.event_ids.iter().flatten() {
            arrivals.entry(id.to_string()).or_insert(at);
        }
    }
    Ok(arrivals)
}
