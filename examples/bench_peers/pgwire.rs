//! Reads a slot up to a position of the WAL with the crate `pgwire-replication` instead of our
//! replication session, and counts the rows. This program does less work than the program `null`
//! (`null.rs`): it decodes only the first byte of each message, and maps no rows to Pub/Sub messages.

use pgwire_replication::{Lsn, ReplicationClient, ReplicationConfig, ReplicationEvent, TlsConfig};
use tokio_postgres::config::Host;

use crate::{Done, settings};

/// Maximum number of messages that wait between the crate's task and ours. A larger number did not make
/// this program faster.
const BUFFER_EVENTS: usize = 1_024;

/// The first byte of an Insert message.
const INSERT: u8 = b'I';

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Position of the WAL at which to end
    #[arg(long)]
    until: String,
    /// Events that must have arrived up to that position
    #[arg(long)]
    events: u64,
}

pub(crate) async fn run(args: Args) -> Done {
    let until = Lsn::parse(&args.until)?;
    let mut client = ReplicationClient::connect(config()?).await?;
    let mut events = 0_u64;
    while let Some(event) = client.recv().await? {
        let position = match event {
            ReplicationEvent::XLogData { data, .. } => {
                events += u64::from(data.first() == Some(&INSERT));
                continue;
            }
            ReplicationEvent::Commit { end_lsn, .. } => end_lsn,
            ReplicationEvent::KeepAlive { wal_end, .. } => wal_end,
            ReplicationEvent::Begin { .. }
            | ReplicationEvent::Message { .. }
            | ReplicationEvent::StoppedAt { .. } => continue,
        };
        client.update_applied_lsn(position);
        if position >= until {
            break;
        }
    }
    client.shutdown().await?;
    if events != args.events {
        return Err(format!("{events} of {} events arrived", args.events).into());
    }
    Ok(())
}

fn config() -> Done<ReplicationConfig> {
    let settings = settings()?;
    let url: tokio_postgres::Config = std::env::var("DATABASE_URL")?.parse()?;
    let host = match url.get_hosts().first() {
        Some(Host::Tcp(host)) => host.clone(),
        Some(Host::Unix(folder)) => folder.display().to_string(),
        None => return Err("DATABASE_URL names no host".into()),
    };
    let port = url.get_ports().first().copied().unwrap_or(5432);
    Ok(ReplicationConfig::new(
        host,
        url.get_user().unwrap_or("postgres"),
        "",
        url.get_dbname().unwrap_or("postgres"),
        settings.slot.as_str(),
        settings.publication.as_str(),
    )
    .with_port(port)
    .with_tls(TlsConfig::disabled())
    .with_buffer_size(BUFFER_EVENTS))
}
