//! The server behind the proxy, and a connection to this server.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use tokio::net::{TcpStream, UnixStream};

/// The server behind the proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// `host:port`.
    Tcp(String),
    /// The path of a Unix socket. For PostgreSQL it is `FOLDER/.s.PGSQL.PORT`.
    Unix(PathBuf),
}

impl Target {
    /// A server at `host:port`.
    pub fn tcp(address: impl Into<String>) -> Self {
        Self::Tcp(address.into())
    }

    pub(crate) async fn connect(&self) -> io::Result<Socket> {
        match self {
            Self::Tcp(address) => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Ok(Socket::Tcp(stream))
            }
            Self::Unix(path) => Ok(Socket::Unix(UnixStream::connect(path).await?)),
        }
    }
}

impl From<SocketAddr> for Target {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(address.to_string())
    }
}

/// A connection to the server.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}
