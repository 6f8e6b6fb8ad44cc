//! The null publisher: decodes and maps the stream up to a position of the WAL, and counts the
//! events.

use decoder::Lsn;
use postrider::session::MappedStream;

use crate::{Done, settings};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Position of the WAL at which to end
    #[arg(long)]
    until: Lsn,
    /// Events that must have arrived up to that position
    #[arg(long)]
    events: u64,
}

pub(crate) async fn run(args: Args) -> Done {
    let mut stream = MappedStream::open(&settings()?).await?;
    let (mut events, mut bytes) = (0_u64, 0_usize);
    loop {
        let confirmed = stream
            .next(|event| {
                events += 1;
                // Keep the compiler from optimising away the work for the message.
                bytes += std::hint::black_box(&event).message.len();
            })
            .await?;
        if confirmed >= args.until {
            break;
        }
    }
    stream.close().await;
    if events != args.events || bytes == 0 {
        return Err(format!("{events} of {} events arrived", args.events).into());
    }
    Ok(())
}
