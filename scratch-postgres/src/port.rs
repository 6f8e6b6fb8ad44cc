//! Chooses TCP ports on the loopback interface.
//!
//! No process can reserve a port for another process. So the choice is a guess, which the caller checks
//! by starting the server on the port. In addition, each scratch server claims its port with an
//! abstract Unix socket named after the port. Because of this claim, no other scratch server takes
//! the port while the server is down between two starts.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use crate::Error;

pub(crate) const HOST: &str = "127.0.0.1";

/// The range from which ports are chosen. It is below Linux's range for outgoing connections (from
/// 32768), so no outgoing connection can take the port while the server is down between two starts.
const PORTS: std::ops::Range<u16> = 15_000..32_000;

/// A port that no other scratch server can claim until this value is dropped.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) number: u16,
    _claim: UnixListener,
}

/// Claims a port on which nobody listens now. The random start makes it unlikely that two processes
/// try the same port.
pub(crate) fn free() -> Result<Port, Error> {
    let random = RandomState::new().build_hasher().finish();
    let offset = random % u64::from(PORTS.end - PORTS.start);
    let start = PORTS.start + u16::try_from(offset).expect("invariant: below the range's width");
    let mut ports = (start..PORTS.end).chain(PORTS.start..start);
    ports.find_map(claim).ok_or_else(|| Error::Io {
        action: format!("finding a free port in {PORTS:?}"),
        source: std::io::ErrorKind::AddrInUse.into(),
    })
}

fn claim(number: u16) -> Option<Port> {
    let name = SocketAddr::from_abstract_name(format!("scratch-postgres-{number}")).ok()?;
    let claim = UnixListener::bind_addr(&name).ok()?;
    is_free(number).then_some(Port {
        number,
        _claim: claim,
    })
}

pub(crate) fn is_free(port: u16) -> bool {
    TcpListener::bind((HOST, port)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_in_use_is_not_free() {
        let port = free().expect("a port");
        let _listener = TcpListener::bind((HOST, port.number)).expect("bind");
        assert!(!is_free(port.number));
    }

    #[test]
    fn a_port_is_claimed_once_until_it_is_released() {
        let port = free().expect("a port");
        let number = port.number;
        assert!(is_free(number) && claim(number).is_none());
        drop(port);
        assert!(claim(number).is_some());
    }
}
