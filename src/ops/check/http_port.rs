//! Checks whether `postrider run` could open its HTTP port on this machine.
//!
//! If another process uses the port, the finding is an error, because the relay would stop. If that process is a
//! relay of the same slot, the finding is only a note. To tell the two cases apart, the check requests `/status` from
//! the port and reads the name of the slot.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use slot_manager::{Finding, Severity};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::CheckSection;
use crate::error::{Code, Error};
use crate::ops::finding::{finding, finding_with_remedy, from_error};
use crate::settings::Settings;

/// How long to wait for the answer of the process that uses the port.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum size of an answer, in bytes. The answer of a relay is much smaller.
const ANSWER_BYTES_MAX: u64 = 256 * 1024;

/// Returns the finding about the HTTP port; `None` if the relay opens no port.
pub(super) async fn check(settings: &Settings) -> Option<CheckSection> {
    let addr = settings.http_addr?;
    let found = match can_listen(addr) {
        Ok(()) => {
            let what = format!("the relay can listen on {addr}");
            finding(Severity::Ok, "http-port", what)
        }
        Err(error) => in_use(addr, error, settings.slot.as_str()).await,
    };
    Some(CheckSection {
        heading: format!("HTTP port {addr}"),
        findings: vec![found],
    })
}

async fn in_use(addr: SocketAddr, error: io::Error, slot: &str) -> Finding {
    if error.kind() == ErrorKind::AddrInUse && slot_of_relay_at(addr).await.as_deref() == Some(slot)
    {
        return finding_with_remedy(
            Severity::Info,
            Code::PortInUse.name(),
            format!("a relay of slot {slot} already runs on this machine and listens on {addr}"),
            "nothing to do, unless this machine should run another relay: that one needs another POSTRIDER_HTTP_ADDR",
        );
    }
    from_error(&Error::of_listening(addr, error))
}

/// Checks that the relay could listen on the address. The check binds a socket but never listens, so it does not
/// disturb another check, or a relay that starts at this moment.
fn can_listen(addr: SocketAddr) -> io::Result<()> {
    let socket = match addr {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    socket.set_reuseaddr(true)?;
    socket.bind(addr)
}

/// Returns the slot of the relay that listens on the address; `None` if no relay answers.
async fn slot_of_relay_at(addr: SocketAddr) -> Option<String> {
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, status(reachable(addr)));
    let answer = answer.await.ok()?.ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    if !head.starts_with("HTTP/1.1 200") {
        return None;
    }
    let status: serde_json::Value = serde_json::from_str(body).ok()?;
    Some(status["slot"].as_str()?.to_owned())
}

/// Requests `/status` and returns the answer, including its head.
async fn status(addr: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect(addr).await?;
    let request = format!("GET /status HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    let mut limited = stream.take(ANSWER_BYTES_MAX);
    limited.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// Replaces an address that means all interfaces by the loopback address.
fn reachable(mut addr: SocketAddr) -> SocketAddr {
    if addr.ip().is_unspecified() {
        addr.set_ip(match addr {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    addr
}
