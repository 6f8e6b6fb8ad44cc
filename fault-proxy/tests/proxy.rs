//! Tests the proxy in front of an echo server.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use fault_proxy::{Cut, Direction, FaultProxy, Flow, Target};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(20);

/// How long a test waits to see that nothing arrives.
const SILENCE: Duration = Duration::from_millis(200);

async fn echo(stream: impl AsyncRead + AsyncWrite) {
    let (mut from, mut to) = tokio::io::split(stream);
    // An error means that the connection has ended.
    let _ = tokio::io::copy(&mut from, &mut to).await;
    let _ = to.shutdown().await;
}

/// Starts an echo server on a free port. It sends `greeting` first.
async fn echo_server(greeting: &'static [u8]) -> Target {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                stream.write_all(greeting).await.unwrap();
                echo(stream).await;
            });
        }
    });
    addr.into()
}

async fn proxy() -> FaultProxy {
    FaultProxy::start(echo_server(b"").await).await.unwrap()
}

async fn client(proxy: &FaultProxy) -> TcpStream {
    TcpStream::connect(proxy.addr()).await.unwrap()
}

async fn comes_back(stream: &mut TcpStream, text: &[u8]) {
    stream.write_all(text).await.unwrap();
    expect(stream, text).await;
}

async fn expect(stream: &mut TcpStream, text: &[u8]) {
    let mut answer = vec![0; text.len()];
    let read = timeout(PATIENCE, stream.read_exact(&mut answer)).await;
    read.expect("in time").unwrap();
    assert_eq!(answer, text);
}

/// Checks that nothing arrives, not even the end of the stream.
async fn is_silent(stream: &mut TcpStream) {
    let read = timeout(SILENCE, stream.read_u8()).await;
    assert!(read.is_err(), "{read:?}");
}

/// Reads to the end of a connection. Returns how many bytes arrived, or the kind of error.
async fn end_of(stream: &mut TcpStream) -> Result<usize, ErrorKind> {
    let mut rest = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut rest)).await;
    read.expect("in time").map_err(|e| e.kind())
}

#[tokio::test]
async fn bytes_pass_both_ways_and_are_counted() {
    let proxy = proxy().await;
    let mut stream = client(&proxy).await;
    comes_back(&mut stream, b"hello").await;
    let large = vec![7; 3 << 20];
    let (mut read, mut write) = stream.split();
    let mut answer = vec![0; large.len()];
    let (written, got) = tokio::join!(write.write_all(&large), read.read_exact(&mut answer));
    written.unwrap();
    got.unwrap();
    assert_eq!(answer, large);
    assert_eq!(proxy.bytes(Direction::ToTarget), 5 + (3 << 20));
    assert_eq!(proxy.bytes(Direction::FromTarget), 5 + (3 << 20));
    assert_eq!((proxy.accepted(), proxy.open_connections()), (1, 1));
}

#[tokio::test]
async fn the_end_of_one_side_reaches_the_other() {
    let proxy = proxy().await;
    let mut stream = client(&proxy).await;
    stream.write_all(b"last").await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(end_of(&mut stream).await, Ok(4));
    while proxy.open_connections() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn the_client_sees_a_reset_as_an_error_and_a_finish_as_a_normal_end() {
    let proxy = proxy().await;
    for (how, end) in [
        (Cut::Reset, Err(ErrorKind::ConnectionReset)),
        (Cut::Finish, Ok(0)),
    ] {
        let mut stream = client(&proxy).await;
        comes_back(&mut stream, b"here").await;
        assert_eq!(proxy.cut(how), 1);
        assert_eq!(end_of(&mut stream).await, end, "{how:?}");
    }
    comes_back(&mut client(&proxy).await, b"again").await;
}

#[tokio::test]
async fn a_refused_client_gets_nothing_and_open_connections_stay() {
    let proxy = proxy().await;
    let mut stream = client(&proxy).await;
    comes_back(&mut stream, b"before").await;
    proxy.refuse();
    let refused = async {
        // A client that connects while the port is closing can get a reset instead of a refusal, so
        // connect until a client is refused.
        while TcpStream::connect(proxy.addr())
            .await
            .map_err(|e| e.kind())
            .err()
            != Some(ErrorKind::ConnectionRefused)
        {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, refused).await.unwrap();
    comes_back(&mut stream, b"still here").await;
    proxy.heal();
    let connected = async {
        loop {
            match TcpStream::connect(proxy.addr()).await {
                Ok(stream) => return stream,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    let mut stream = timeout(PATIENCE, connected).await.unwrap();
    comes_back(&mut stream, b"after").await;
}

#[tokio::test]
async fn stalled_bytes_arrive_when_the_proxy_is_healed_and_nothing_is_closed() {
    let proxy = proxy().await;
    let mut stream = client(&proxy).await;
    comes_back(&mut stream, b"before").await;
    proxy.set_flow(Flow::Stalled);
    stream.write_all(b"late").await.unwrap();
    let mut newcomer = client(&proxy).await;
    newcomer.write_all(b"new").await.unwrap();
    is_silent(&mut stream).await;
    is_silent(&mut newcomer).await;
    proxy.heal();
    expect(&mut stream, b"late").await;
    expect(&mut newcomer, b"new").await;
}

#[tokio::test]
async fn a_connection_that_lost_bytes_breaks_when_the_proxy_is_healed_and_not_before() {
    let proxy = proxy().await;
    let mut stream = client(&proxy).await;
    comes_back(&mut stream, b"before").await;
    proxy.set_flow_of(Direction::FromTarget, Flow::Swallowed);
    stream.write_all(b"lost").await.unwrap();
    stream.shutdown().await.unwrap();
    let passes = async {
        while proxy.bytes(Direction::ToTarget) < 10 {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, passes)
        .await
        .expect("the other way is open");
    is_silent(&mut stream).await;
    assert_eq!(proxy.bytes(Direction::FromTarget), 6);
    proxy.heal();
    assert_eq!(end_of(&mut stream).await, Err(ErrorKind::ConnectionReset));
}

#[tokio::test]
async fn delayed_bytes_arrive_late_and_in_order() {
    let proxy = proxy().await;
    let mut stream = client(&proxy).await;
    comes_back(&mut stream, b"before").await;
    proxy.set_flow_of(Direction::FromTarget, Flow::Delayed(SILENCE));
    let sent = Instant::now();
    stream.write_all(b"one ").await.unwrap();
    stream.write_all(b"two").await.unwrap();
    expect(&mut stream, b"one two").await;
    assert!(sent.elapsed() >= SILENCE);
}

#[tokio::test]
async fn new_connections_lead_to_the_new_target() {
    let proxy = FaultProxy::start(echo_server(b"old").await).await.unwrap();
    let mut first = client(&proxy).await;
    expect(&mut first, b"old").await;
    proxy.retarget(echo_server(b"new").await);
    expect(&mut client(&proxy).await, b"new").await;
    comes_back(&mut first, b"still the old one").await;
}

#[tokio::test]
async fn a_unix_socket_can_be_the_target() {
    let path = std::env::temp_dir().join(format!("fault-proxy-{}.sock", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move { echo(listener.accept().await.unwrap().0).await });
    let proxy = FaultProxy::start(Target::Unix(path.clone())).await.unwrap();
    comes_back(&mut client(&proxy).await, b"over a file").await;
    std::fs::remove_file(path).unwrap();
}

#[tokio::test]
async fn an_unreachable_server_breaks_the_connection() {
    let proxy = FaultProxy::start(Target::tcp("127.0.0.1:9")).await.unwrap();
    assert!(end_of(&mut client(&proxy).await).await.is_err());
}

#[tokio::test]
async fn one_connection_is_cut_by_its_client_port_and_the_others_stay() {
    let (ports, mut port_of_next) = tokio::sync::mpsc::unbounded_channel();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, client)) = listener.accept().await {
            ports.send(client.port()).unwrap();
            tokio::spawn(echo(stream));
        }
    });
    let proxy = FaultProxy::start(addr).await.unwrap();
    let mut first = client(&proxy).await;
    comes_back(&mut first, b"one").await;
    let port = port_of_next.recv().await.unwrap();
    let mut second = client(&proxy).await;
    comes_back(&mut second, b"two").await;
    proxy.cut_one(port, Cut::Reset);
    let ended = timeout(PATIENCE, first.read(&mut [0; 1])).await.unwrap();
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::ConnectionReset);
    comes_back(&mut second, b"still here").await;
}
