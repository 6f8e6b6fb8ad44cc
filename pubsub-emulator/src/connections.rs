//! The accepted connections. Passes them to the server, and cuts or refuses them on request.
//!
//! Keeps a second handle to each socket for as long as the connection lives. With this handle the
//! emulator can cut the connection without sending any HTTP/2 frame, so to the client the server seems
//! to have died.

use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::Stream;
use tonic::transport::server::Connected;

/// The address of the client of a connection, and when the connection was accepted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) accepted: Instant,
}

/// The connections of one emulator. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Connections {
    registry: Arc<Mutex<Registry>>,
}

#[derive(Debug, Default)]
struct Registry {
    refuse: bool,
    next_id: u64,
    open: HashMap<u64, std::net::TcpStream>,
}

impl Connections {
    /// Cuts every open connection.
    pub(crate) fn reset(&self) {
        for socket in self.registry().open.values() {
            // An error means that the connection is already gone.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// While `refuse` is true, closes new connections at once.
    pub(crate) fn refuse(&self, refuse: bool) {
        self.registry().refuse = refuse;
    }

    /// Returns the stream of connections that arrive at a listener.
    pub(crate) fn accept(&self, listener: TcpListener) -> Incoming {
        Incoming {
            listener,
            connections: self.clone(),
        }
    }

    /// Registers a second handle to the socket of `stream`. Returns `None` if connections are refused.
    fn register(&self, stream: TcpStream, address: SocketAddr) -> io::Result<Option<Connection>> {
        if self.registry().refuse {
            return Ok(None);
        }
        stream.set_nodelay(true)?;
        let socket = stream.into_std()?;
        let second = socket.try_clone()?;
        let stream = TcpStream::from_std(socket)?;
        let mut registry = self.registry();
        let id = registry.next_id;
        registry.next_id += 1;
        registry.open.insert(id, second);
        drop(registry);
        let accepted = Instant::now();
        Ok(Some(Connection {
            stream,
            peer: Peer { address, accepted },
            id,
            connections: self.clone(),
        }))
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The stream of accepted connections.
#[derive(Debug)]
pub(crate) struct Incoming {
    listener: TcpListener,
    connections: Connections,
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let (stream, address) = ready!(self.listener.poll_accept(cx))?;
            if let Some(connection) = self.connections.register(stream, address)? {
                return Poll::Ready(Some(Ok(connection)));
            }
        }
    }
}

/// One accepted connection. Dropping it also closes the second handle to its socket, which [`Registry`]
/// keeps.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    peer: Peer,
    id: u64,
    connections: Connections,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.connections.registry().open.remove(&self.id);
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buffer)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
