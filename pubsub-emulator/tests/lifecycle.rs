//! Tests how the emulator starts and stops.

mod raw;

use std::net::TcpStream;
use std::time::{Duration, Instant};

use pubsub_emulator::{Action, Emulator, Fault, StartError};
use raw::{Clients, PATIENCE, event};

#[tokio::test]
async fn a_port_in_use_is_reported_with_a_remedy() {
    let emulator = Emulator::builder().start().await.expect("a free port");
    let error = Emulator::builder()
        .listen(emulator.addr())
        .start()
        .await
        .expect_err("in use");
    assert!(matches!(error, StartError::InUse { address } if address == emulator.addr()));
    assert!(error.to_string().contains("choose another port"), "{error}");
}

#[tokio::test]
async fn shutting_down_ends_open_streams_and_closes_the_port() {
    let emulator = Emulator::builder().start().await.expect("a free port");
    let mut clients = Clients::connect(emulator.addr(), "lifecycle").await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    let mut stream = clients.stream(&subscription).await;
    stream.opened().await.expect("a stream");
    emulator.faults().inject(Fault::new(Action::NeverAnswer));
    let address = emulator.addr();
    let mut publisher = clients.clone();
    let under_way =
        tokio::spawn(async move { publisher.publish(&topic, vec![event("k", "1")]).await });
    let journal = emulator.journal();
    journal
        .wait_until(PATIENCE, |counts| counts.attempts == 1)
        .await
        .expect("under way");
    let asked = Instant::now();
    emulator.shutdown().await;
    assert!(
        asked.elapsed() < Duration::from_secs(3),
        "{:?}",
        asked.elapsed()
    );
    under_way
        .await
        .expect("no panic")
        .expect_err("the connection is gone");
    stream.failure().await;
    TcpStream::connect(address).expect_err("the port is closed");
}

#[tokio::test]
async fn dropping_the_emulator_closes_the_port() {
    let emulator = Emulator::builder().start().await.expect("a free port");
    let address = emulator.addr();
    drop(emulator);
    let closed = async {
        while TcpStream::connect(address).is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, closed)
        .await
        .expect("the port is closed");
}
