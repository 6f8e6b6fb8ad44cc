//! Chooses TCP ports on the loopback interface.
//!
//! Nobody can reserve a port for another process, so the choice is a guess that the caller checks
//! by starting the server on it.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::TcpListener;

use crate::Error;

pub(crate) const HOST: &str = "127.0.0.1";

/// Below Linux's range for outgoing connections (from 32768), so that none of those can take the
/// port while the server is down between two starts.
const PORTS: std::ops::Range<u16> = 15_000..32_000;

/// A port that nobody listens on now. `RandomState` gives another starting point at each call.
pub(crate) fn free() -> Result<u16, Error> {
    let random = RandomState::new().build_hasher().finish();
    let offset = random % u64::from(PORTS.end - PORTS.start);
    let start = PORTS.start + u16::try_from(offset).expect("invariant: below the range's width");
    let mut ports = (start..PORTS.end).chain(PORTS.start..start);
    ports.find(|port| is_free(*port)).ok_or_else(|| Error::Io {
        action: format!("finding a free port in {PORTS:?}"),
        source: std::io::ErrorKind::AddrInUse.into(),
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
        let _listener = TcpListener::bind((HOST, port)).expect("bind");
        assert!(!is_free(port));
    }
}
