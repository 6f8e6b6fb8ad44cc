//! The proxy's listener, and the handle through which a test controls the proxy.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::connection::{self, Traffic};
use crate::switch::{Cut, Direction, Flow, Switch};
use crate::target::Target;

/// Maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 128;

/// A running proxy. Dropping the proxy closes its connections and its port.
#[derive(Debug)]
pub struct FaultProxy {
    addr: SocketAddr,
    switch: watch::Sender<Switch>,
    target: watch::Sender<Target>,
    traffic: Arc<Traffic>,
    acceptor: JoinHandle<()>,
}

impl FaultProxy {
    /// Starts a proxy on a free port of 127.0.0.1, on the current tokio runtime. At first it lets
    /// everything pass.
    ///
    /// # Errors
    /// Fails if no port is available.
    pub async fn start(target: impl Into<Target>) -> io::Result<Self> {
        // A second socket, which never listens, keeps the port reserved while the proxy refuses
        // connections.
        let holder = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let addr = holder.local_addr()?;
        let listener = bind(addr)?.listen(BACKLOG)?;
        let (switch, switch_receiver) = watch::channel(Switch::default());
        let (target, target_receiver) = watch::channel(target.into());
        let traffic = Arc::new(Traffic::default());
        let acceptor = Acceptor {
            addr,
            _holder: holder,
            switch: switch_receiver,
            target: target_receiver,
            traffic: traffic.clone(),
        };
        Ok(Self {
            addr,
            switch,
            target,
            traffic,
            acceptor: tokio::spawn(acceptor.run(listener)),
        })
    }

    /// The address to which clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Sets what happens to bytes in both directions, on all current and future connections.
    pub fn set_flow(&self, flow: Flow) {
        self.switch.send_modify(|switch| {
            switch.to_target = flow;
            switch.from_target = flow;
        });
    }

    /// Sets what happens to bytes in one direction.
    pub fn set_flow_of(&self, direction: Direction, flow: Flow) {
        self.switch
            .send_modify(|switch| switch.set_flow(direction, flow));
    }

    /// Sets what happens to bytes, in both directions, on the connection that the proxy opened to a
    /// TCP target from local port `port` (see [`FaultProxy::cut_one`]). This takes precedence over
    /// [`FaultProxy::set_flow`] and [`FaultProxy::set_flow_of`].
    pub fn set_flow_of_one(&self, port: u16, flow: Flow) {
        self.switch
            .send_modify(|switch| switch.of_one = Some((port, flow)));
    }

    /// Breaks all connections. Clients can reconnect at once. Returns how many connections were open.
    pub fn cut(&self, how: Cut) -> usize {
        let open = self.open_connections();
        self.switch.send_modify(|switch| switch.cut(None, how));
        open
    }

    /// Breaks the connection that the proxy opened to a TCP target from local port `port`. The target
    /// sees `port` as the port of its client: in PostgreSQL it is `client_port` in `pg_stat_activity`.
    pub fn cut_one(&self, port: u16, how: Cut) {
        self.switch
            .send_modify(|switch| switch.cut(Some(port), how));
    }

    /// Closes the port within moments, so that clients get "connection refused". Existing connections
    /// stay open. To break them, call [`FaultProxy::cut`].
    pub fn refuse(&self) {
        self.switch.send_modify(|switch| switch.refuse = true);
    }

    /// Lets everything through again and opens the port.
    pub fn heal(&self) {
        self.switch.send_modify(|switch| {
            switch.to_target = Flow::Open;
            switch.from_target = Flow::Open;
            switch.of_one = None;
            switch.refuse = false;
        });
    }

    /// Directs new connections to another server, as a failover does.
    pub fn retarget(&self, target: impl Into<Target>) {
        self.target.send_replace(target.into());
    }

    /// The number of connections that are open now.
    pub fn open_connections(&self) -> usize {
        self.traffic.open.load(Ordering::SeqCst)
    }

    /// The number of connections ever accepted.
    pub fn accepted(&self) -> u64 {
        self.traffic.accepted.load(Ordering::SeqCst)
    }

    /// The local ports from which the proxy has ever connected to TCP targets, including the ports of
    /// connections that have ended.
    pub fn ports(&self) -> Vec<u16> {
        self.traffic.ports().clone()
    }

    /// The number of bytes that have passed. Swallowed bytes and bytes that still wait do not count.
    pub fn bytes(&self, direction: Direction) -> u64 {
        self.traffic.bytes(direction).load(Ordering::SeqCst)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

/// A socket on `addr` that does not listen yet.
fn bind(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

struct Acceptor {
    addr: SocketAddr,
    _holder: TcpSocket,
    switch: watch::Receiver<Switch>,
    target: watch::Receiver<Target>,
    traffic: Arc<Traffic>,
}

impl Acceptor {
    /// Accepts connections until the proxy is dropped. The open connections then end too.
    async fn run(mut self, listener: TcpListener) {
        let mut listener = Some(listener);
        let mut connections = JoinSet::new();
        loop {
            let refuse = self.switch.borrow_and_update().refuse;
            if refuse {
                listener = None;
            } else if listener.is_none() {
                // No failure is expected, because the port is reserved. After a failure, the loop tries
                // again when the switch changes or a connection ends.
                listener = bind(self.addr)
                    .and_then(|socket| socket.listen(BACKLOG))
                    .ok();
            }
            tokio::select! {
                // Check the switch first, so that a client that arrives while the port should be
                // closed is not accepted.
                biased;
                changed = self.switch.changed() => if changed.is_err() { return },
                Some(_) = connections.join_next() => {}
                Ok(client) = accept(listener.as_ref()) => {
                    connections.spawn(connection::serve(
                        client,
                        self.target.clone(),
                        self.switch.clone(),
                        self.traffic.clone(),
                    ));
                }
            }
        }
    }
}

async fn accept(listener: Option<&TcpListener>) -> io::Result<tokio::net::TcpStream> {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
