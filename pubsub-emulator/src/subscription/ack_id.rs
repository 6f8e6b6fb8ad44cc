//! Ack ids, which identify leases on the wire.

use std::fmt;
use std::str::FromStr;

use tonic::Status;

use super::backlog::Token;

/// Identifies a lease of one subscription. `incarnation` distinguishes the subscription from
/// earlier subscriptions with the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AckId {
    pub(super) incarnation: u64,
    pub(super) token: Token,
}

impl fmt::Display for AckId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{:x}", self.incarnation, self.token)
    }
}

impl FromStr for AckId {
    type Err = Status;

    fn from_str(ack_id: &str) -> Result<Self, Status> {
        let parts = ack_id.split_once('-').and_then(|(incarnation, token)| {
            let incarnation = u64::from_str_radix(incarnation, 16).ok()?;
            let token = Token::from_str_radix(token, 16).ok()?;
            Some(Self { incarnation, token })
        });
        parts.ok_or_else(|| {
            Status::invalid_argument(format!(
                "You have passed an invalid ack ID to the service (ack_id={ack_id})."
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_written_ack_id_is_read_back(incarnation: u64, token: u64) {
            let ack_id = AckId { incarnation, token };
            prop_assert_eq!(ack_id.to_string().parse::<AckId>().expect("valid"), ack_id);
        }
    }

    #[test]
    fn a_text_that_is_not_an_ack_id_is_refused() {
        for ack_id in [
            "",
            "-",
            "1",
            "1-",
            "-1",
            "1-g",
            "1-2-3",
            "10000000000000000-1",
        ] {
            assert!(ack_id.parse::<AckId>().is_err(), "{ack_id}");
        }
    }
}
