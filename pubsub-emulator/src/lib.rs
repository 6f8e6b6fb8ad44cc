//! A strict Google Cloud Pub/Sub emulator as a library. It runs inside the process that starts it, for example a test.
//! `main.rs` wraps it as a program.
//!
//! Every official client works with the emulator, through gRPC over plain HTTP/2 and the variable
//! `PUBSUB_EMULATOR_HOST`. The emulator refuses the requests that the service refuses (limits, mixed
//! ordering keys, malformed names). On an ordered subscription it redelivers like the service: together
//! with a message, it redelivers all later messages of the same key. It injects faults on request
//! ([`Faults`]), and records every attempt to publish in a [`Journal`], which [`checks`] judges.
//!
//! ```
//! use pubsub_emulator::{Action, Code, Emulator, Fault};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let emulator = Emulator::builder().listen("127.0.0.1:0".parse()?).start().await?;
//! emulator.create_topic("projects/demo/topics/orders.events").await?;
//! emulator.faults().inject(Fault::new(Action::StoreThenFail(Code::Unavailable)).times(1));
//! println!("PUBSUB_EMULATOR_HOST={}", emulator.addr());
//! // … run a publisher …
//! println!("{} attempts", emulator.journal().counts().attempts);
//! emulator.shutdown().await;
//! # Ok(())
//! # }
//! ```
//!
//! A tour: `server` starts and stops the emulator. `publisher` and `subscriber` answer the gRPC
//! calls, `streaming_pull` serves the streams of messages, and `rest` serves clients that manage
//! topics and subscriptions over HTTP. `registry`, `topic` and `subscription` hold the resources.
//! `limits`, `names` and `filter` implement the service's rules. `wire` reads messages without
//! decoding them, and `connections` cuts sockets. `subscription::backlog` is the state machine of
//! deliveries.
//!
//! **Not here:** TLS and authentication, push, BigQuery and Cloud Storage subscriptions, dead letters, retry
//! policies, exactly-once delivery, schemas, snapshots, and keeping acknowledged messages. If a request sets a
//! field of a missing feature, the emulator answers UNIMPLEMENTED and names the field. Calls of missing methods
//! get UNIMPLEMENTED too. `message_retention_duration` and `expiration_policy` are stored, but have no effect.
//! Nothing is kept on disk.

pub mod checks;
mod connections;
mod faults;
mod filter;
mod iam;
mod journal;
mod limits;
mod names;
mod publisher;
mod registry;
mod rest;
mod server;
mod streaming_pull;
mod subscriber;
mod subscription;
mod topic;
mod wire;

pub use faults::{Action, Fault, FaultId, Faults};
pub use journal::{Answer, Attempt, Counts, Journal, Recording};
pub use server::{Emulator, EmulatorBuilder, RunningEmulator, StartError};
pub use tonic::{Code, Status};

/// The message types, from the published crate.
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1 as proto;

/// The server traits that `build.rs` generates.
mod services {
    #![allow(
        missing_docs,
        unreachable_pub,
        private_interfaces,
        clippy::all,
        clippy::too_many_lines,
        clippy::unwrap_used
    )]
    include!(concat!(env!("OUT_DIR"), "/google.pubsub.v1.Publisher.rs"));
    include!(concat!(env!("OUT_DIR"), "/google.pubsub.v1.Subscriber.rs"));
    include!(concat!(env!("OUT_DIR"), "/google.iam.v1.IAMPolicy.rs"));
}
