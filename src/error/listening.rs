//! Converts the error of a port that cannot be opened into an error for the operator.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;

use super::{Code, Error, is_open_files_limit};

impl Error {
    /// Creates the error for the HTTP port that cannot be opened at this address: `port-in-use`, or
    /// `open-files-limit`.
    pub(crate) fn of_listening(addr: SocketAddr, error: io::Error) -> Self {
        let what = format!("cannot listen on {addr} for HTTP");
        if is_open_files_limit(&error) {
            return Self::of_system(what, error);
        }
        let hint = match error.kind() {
            ErrorKind::AddrNotAvailable => {
                "no network interface of this machine has that address: set POSTRIDER_HTTP_ADDR to one that it has, \
                 such as 127.0.0.1:9464, or to 0.0.0.0:9464 for all of them"
            }
            ErrorKind::PermissionDenied => {
                "this process may not use a port below 1024: set POSTRIDER_HTTP_ADDR to a higher one, such as \
                 127.0.0.1:9464"
            }
            _ => Code::PortInUse.hint(),
        };
        Self::new(Code::PortInUse, what).hint(hint).caused_by(error)
    }
}
