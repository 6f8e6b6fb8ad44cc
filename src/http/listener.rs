//! Accepts connections on the HTTP port, within limits that no client can exceed.
//!
//! Anyone may connect, and a client may be broken, slow or hostile. So the relay answers one request per connection,
//! with one deadline and small buffers, and limits the number of connections. At this limit the relay closes the
//! *oldest* connection to accept a new one. So it can answer a probe at once, even while a client holds many idle
//! connections open.
//!
//! Not here: the routes and their answers.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

/// Maximum number of open connections. A kubelet and a few scrapers need a handful.
const CONNECTIONS_MAX: usize = 64;
/// Maximum duration of a connection. The slowest answer is a search for events, which may take 8 seconds.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time until the head of the request has arrived. Clients send the head in one piece, so 5 seconds
/// are enough.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of the head of a request, in bytes. The relay answers a longer head with status 431. A
/// browser's largest cookie (4 KiB) fits.
const HEAD_BYTES_MAX: usize = 16 * 1024;
/// Maximum number of headers of a request.
const HEADERS_MAX: usize = 64;
/// Pause after a failed `accept`, for example when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(250);

/// Serves `router` forever.
pub(super) async fn serve(listener: TcpListener, router: Router) -> Infallible {
    let mut connections = OpenConnections::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => connections.add(connection(stream, router.clone())),
            Err(error) => {
                tracing::debug!(%error, "cannot accept a connection on the HTTP port");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves one connection until it ends or reaches its deadline.
async fn connection(stream: TcpStream, router: Router) {
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    // Ignore errors: they are mistakes of the client, and the operator can do nothing about them.
    let _ = tokio::time::timeout(CONNECTION_TIMEOUT, served).await;
}

/// The open connections; dropping this closes all of them.
#[derive(Debug, Default)]
struct OpenConnections {
    tasks: JoinSet<()>,
    by_age: VecDeque<AbortHandle>,
}

impl OpenConnections {
    fn add(&mut self, connection: impl Future<Output = ()> + Send + 'static) {
        while self.tasks.try_join_next().is_some() {}
        self.by_age.retain(|task| !task.is_finished());
        if self.by_age.len() >= CONNECTIONS_MAX
            && let Some(oldest) = self.by_age.pop_front()
        {
            oldest.abort();
        }
        self.by_age.push_back(self.tasks.spawn(connection));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn at_the_limit_the_oldest_connection_is_closed() {
        let mut connections = OpenConnections::default();
        for _ in 0..CONNECTIONS_MAX {
            connections.add(std::future::pending());
        }
        let oldest = connections.by_age[0].clone();
        let second = connections.by_age[1].clone();
        connections.add(std::future::pending());
        while !oldest.is_finished() {
            tokio::task::yield_now().await;
        }
        assert!(!second.is_finished());
        assert_eq!(connections.by_age.len(), CONNECTIONS_MAX);
    }
}
