//! One connection: passes bytes in both directions, and causes the faults that the [`Switch`] describes.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::switch::{Cut, Direction, Flow, Switch};
use crate::target::{Socket, Target};

/// How many bytes the proxy holds back in one direction of a connection before it stops reading, which
/// blocks the sender.
const QUEUE_BYTES: usize = 1 << 20;

const READ_BUFFER: usize = 64 << 10;

/// Totals over all connections.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) accepted: AtomicU64,
    pub(crate) open: AtomicUsize,
    to_target: AtomicU64,
    from_target: AtomicU64,
    /// The local ports from which the proxy has connected to TCP targets.
    ports: Mutex<Vec<u16>>,
}

impl Traffic {
    pub(crate) fn bytes(&self, direction: Direction) -> &AtomicU64 {
        match direction {
            Direction::ToTarget => &self.to_target,
            Direction::FromTarget => &self.from_target,
        }
    }

    pub(crate) fn ports(&self) -> MutexGuard<'_, Vec<u16>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a connection as open for as long as this value lives.
struct Counted(Arc<Traffic>);

impl Counted {
    fn new(traffic: Arc<Traffic>) -> Self {
        traffic.accepted.fetch_add(1, Ordering::SeqCst);
        traffic.open.fetch_add(1, Ordering::SeqCst);
        Self(traffic)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Serves a client until the client, the target or the proxy ends the connection.
pub(crate) async fn serve(
    mut client: TcpStream,
    target: watch::Receiver<Target>,
    mut switch: watch::Receiver<Switch>,
    traffic: Arc<Traffic>,
) {
    let counted = Counted::new(traffic);
    let cuts_before = switch.borrow().cuts;
    let connecting = connect(target, switch.clone());
    let connected = tokio::select! {
        connected = connecting => connected,
        cut = until_cut(&mut switch, cuts_before, None) => return end(&client, cut),
    };
    // If the target is unreachable, the client's connection breaks too.
    let Ok(mut socket) = connected else {
        return end(&client, Cut::Reset);
    };
    let mut cuts = switch.clone();
    let how = match &mut socket {
        Socket::Tcp(server) => {
            let port = server.local_addr().ok().map(|local| local.port());
            counted.0.ports().extend(port);
            let cut = until_cut(&mut cuts, cuts_before, port);
            relay(&mut client, server, (switch, port), cut, &counted.0).await
        }
        Socket::Unix(server) => {
            let cut = until_cut(&mut cuts, cuts_before, None);
            relay(&mut client, server, (switch, None), cut, &counted.0).await
        }
    };
    end(&client, how);
    if let Socket::Tcp(server) = &socket {
        end(server, how);
    }
}

/// Connects to the target as soon as the flow lets packets through in both directions.
async fn connect(
    target: watch::Receiver<Target>,
    mut switch: watch::Receiver<Switch>,
) -> io::Result<Socket> {
    if switch.wait_for(Switch::lets_connect).await.is_err() {
        return Err(io::ErrorKind::NotConnected.into());
    }
    let target = target.borrow().clone();
    target.connect().await
}

/// Ends the connection: by FIN at once, or by RST when the socket is dropped.
fn end(stream: &TcpStream, how: Cut) {
    match how {
        // With a linger time of zero, closing sends RST. An error is expected only if the peer has
        // already ended the connection.
        Cut::Reset => drop(SockRef::from(stream).set_linger(Some(Duration::ZERO))),
        Cut::Finish => drop(SockRef::from(stream).shutdown(std::net::Shutdown::Write)),
    }
}

async fn until_cut(
    switch: &mut watch::Receiver<Switch>,
    cuts_before: u64,
    port: Option<u16>,
) -> Cut {
    let is_cut = |switch: &Switch| switch.cut_since(cuts_before, port).is_some();
    match switch.wait_for(|switch| is_cut(switch)).await {
        Ok(switch) => switch
            .cut_since(cuts_before, port)
            .expect("invariant: waited for it"),
        // The proxy was dropped.
        Err(_) => Cut::Reset,
    }
}

/// The switch, and the local port from which this connection reaches the target.
type OwnSwitch = (watch::Receiver<Switch>, Option<u16>);

/// Moves bytes in both directions. Returns how the connection must end.
async fn relay<S: AsyncRead + AsyncWrite + Unpin>(
    client: &mut TcpStream,
    server: &mut S,
    switch: OwnSwitch,
    cut: impl Future<Output = Cut>,
    traffic: &Traffic,
) -> Cut {
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = tokio::io::split(server);
    let (there, back) = (switch.clone(), switch);
    let both = async {
        tokio::try_join!(
            pump(from_client, to_server, Direction::ToTarget, there, traffic),
            pump(from_server, to_client, Direction::FromTarget, back, traffic),
        )
    };
    tokio::select! {
        ended = both => match ended {
            Ok(_) => Cut::Finish,
            Err(_) => Cut::Reset,
        },
        how = cut => how,
    }
}

/// Moves the bytes of one direction until the sender ends its stream, and then ends the stream to
/// the receiver too.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    direction: Direction,
    (mut switch, port): OwnSwitch,
    traffic: &Traffic,
) -> io::Result<()> {
    let mut queue: VecDeque<(Instant, Bytes)> = VecDeque::new();
    let mut queued = 0;
    let mut buffer = BytesMut::new();
    let mut ended = false;
    let mut lost_bytes = false;
    loop {
        let flow = switch.borrow_and_update().flow(direction, port);
        if lost_bytes && flow != Flow::Swallowed {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let due = match (flow, queue.front()) {
            (Flow::Open, Some((read_at, _))) => Some(*read_at),
            (Flow::Delayed(delay), Some((read_at, _))) => Some(*read_at + delay),
            (Flow::Open | Flow::Delayed(_), None) if ended => return to.shutdown().await,
            _ => None,
        };
        let reads = !ended && flow != Flow::Stalled && queued < QUEUE_BYTES;
        buffer.reserve(READ_BUFFER);
        tokio::select! {
            biased;
            changed = switch.changed() => {
                changed.map_err(|_| io::ErrorKind::ConnectionReset)?;
            }
            () = until(due), if due.is_some() => {
                let (_, mut bytes) = queue.pop_front().expect("invariant: bytes that are due are queued");
                queued -= bytes.len();
                traffic.bytes(direction).fetch_add(bytes.len() as u64, Ordering::SeqCst);
                to.write_all_buf(&mut bytes).await?;
            }
            read = from.read_buf(&mut buffer), if reads => {
                ended = read? == 0;
                let bytes = buffer.split().freeze();
                if flow == Flow::Swallowed {
                    lost_bytes = true;
                } else if !ended {
                    queued += bytes.len();
                    queue.push_back((Instant::now(), bytes));
                }
            }
        }
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
