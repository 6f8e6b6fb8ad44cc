//! A TCP proxy that runs inside the test's own process and causes network faults: delays, partitions,
//! lost bytes, broken and refused connections.
//!
//! ```no_run
//! # async fn example() -> std::io::Result<()> {
//! use fault_proxy::{Cut, FaultProxy, Flow, Target};
//! let proxy = FaultProxy::start(Target::tcp("127.0.0.1:5432")).await?;
//! // Point the client at `proxy.addr()`, then:
//! proxy.set_flow(Flow::Stalled); // a partition: nothing passes, nothing is closed
//! proxy.heal(); // TCP would have retransmitted: the held-back bytes arrive now
//! proxy.cut(Cut::Reset); // every connection breaks
//! proxy.refuse(); // and no new one can be made
//! # Ok(()) }
//! ```
//!
//! `proxy.rs` listens and contains the handle for the test, `switch.rs` is the state that all connections
//! watch, and `connection.rs` moves the bytes of one connection. The proxy does not understand the bytes
//! that pass through it, so faults of a protocol belong in the server behind it (`pubsub-emulator` has
//! the faults of Pub/Sub). Use the proxy only in tests: one task moves all bytes of a connection, and
//! the proxy never encrypts.

mod connection;
mod proxy;
mod switch;
mod target;

pub use proxy::FaultProxy;
pub use switch::{Cut, Direction, Flow};
pub use target::Target;
