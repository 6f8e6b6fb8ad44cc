//! Takes connections on the HTTP port, within bounds that no client can stretch.
//!
//! The port has no authentication, and whoever reaches it may be broken, slow or hostile. So each
//! connection serves one request, has a deadline for all of it, and small buffers; and there is
//! room for so many only. Past that the *oldest* gives way: a probe is answered at once even while
//! somebody holds every place with connections that send nothing.
//!
//! Not here: what is answered.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

/// Connections at once. A kubelet and a few scrapers need a handful.
const CONNECTIONS_MAX: usize = 64;
/// From the first byte to the last; a page is made within milliseconds.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// For the head of the request, which a client sends in one piece.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// The head of a request, bytes; what is longer is answered with 431. Browsers' own limits for a
/// cookie (4 KiB) fit.
const HEAD_BYTES_MAX: usize = 16 * 1024;
/// Headers of a request.
const HEADERS_MAX: usize = 64;
/// After accepting failed, as it does when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(250);

/// Serves `router` for ever.
pub(super) async fn serve(listener: TcpListener, router: Router) -> Infallible {
    let mut connections = Connections::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => connections.add(connection(stream, router.clone())),
            Err(error) => {
                tracing::debug!(%error, "the HTTP port could not take a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// One connection, to its end or its deadline.
async fn connection(stream: TcpStream, router: Router) {
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    // What a client does wrong is its own business: nothing to tell the operator.
    let _ = tokio::time::timeout(CONNECTION_TIMEOUT, served).await;
}

/// The connections that are open; all end when this is dropped.
#[derive(Debug, Default)]
struct Connections {
    tasks: JoinSet<()>,
    by_age: VecDeque<AbortHandle>,
}

impl Connections {
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
    async fn the_oldest_connection_gives_way_when_there_is_no_room() {
        let mut connections = Connections::default();
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
