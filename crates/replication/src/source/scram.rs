//! Chooses how to log in by SCRAM-SHA-256: bound to the TLS channel where possible.
//!
//! A bound login proves to both sides that they share one TLS connection, without a man in the middle.
//! Source: manual, "SCRAM-SHA-256 Authentication"; RFC 5802, section 6.

use postgres_protocol::authentication::sasl::{self, SCRAM_SHA_256, SCRAM_SHA_256_PLUS};

use crate::connection::ChannelBinding;

/// How a login is bound to the TLS channel.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Binding {
    /// Bound to this hash of the server's certificate.
    Bound(Vec<u8>),
    /// Not bound, although we can bind, because the offer that reached us does not include binding. We tell the
    /// server that we can bind. If a man in the middle has removed binding from the server's offer, the server
    /// notices the contradiction and refuses the login.
    NotOffered,
    /// Not bound, because we cannot bind or because `channel_binding=disable` forbids it.
    Unbound,
}

/// Why a login is impossible.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The login must be bound to the TLS channel but cannot be bound.
    Unbound,
    /// The server does not offer SCRAM-SHA-256.
    NoScram,
}

/// Chooses a way to log in, given the mechanisms that the server offers.
pub(super) fn choose(
    offered: &[String],
    end_point: Option<Vec<u8>>,
    wanted: ChannelBinding,
) -> Result<Binding, Refusal> {
    let offers = |mechanism| offered.iter().any(|name| name == mechanism);
    let end_point = end_point.filter(|_| wanted != ChannelBinding::Disable);
    match (offers(SCRAM_SHA_256_PLUS), end_point) {
        (true, Some(end_point)) => Ok(Binding::Bound(end_point)),
        _ if wanted == ChannelBinding::Require => Err(Refusal::Unbound),
        _ if !offers(SCRAM_SHA_256) => Err(Refusal::NoScram),
        (false, Some(_)) => Ok(Binding::NotOffered),
        (_, None) => Ok(Binding::Unbound),
    }
}

impl Binding {
    pub(super) fn mechanism(&self) -> &'static str {
        match self {
            Binding::Bound(_) => SCRAM_SHA_256_PLUS,
            Binding::NotOffered | Binding::Unbound => SCRAM_SHA_256,
        }
    }
}

impl From<Binding> for sasl::ChannelBinding {
    fn from(binding: Binding) -> Self {
        match binding {
            Binding::Bound(end_point) => Self::tls_server_end_point(end_point),
            Binding::NotOffered => Self::unrequested(),
            Binding::Unbound => Self::unsupported(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_is_bound_if_possible_and_refused_if_binding_is_required_but_impossible() {
        use ChannelBinding::{Disable, Prefer, Require};
        let chosen = |offered: &[&str], can_bind: bool, wanted| {
            let offered: Vec<String> = offered.iter().map(|&name| name.to_owned()).collect();
            choose(&offered, can_bind.then(|| vec![7]), wanted)
        };
        let both = [SCRAM_SHA_256_PLUS, SCRAM_SHA_256];
        let plain = [SCRAM_SHA_256];
        for wanted in [Prefer, Require] {
            assert_eq!(chosen(&both, true, wanted), Ok(Binding::Bound(vec![7])));
        }
        assert_eq!(chosen(&both, true, Disable), Ok(Binding::Unbound));
        assert_eq!(chosen(&both, false, Prefer), Ok(Binding::Unbound));
        assert_eq!(chosen(&plain, true, Prefer), Ok(Binding::NotOffered));
        assert_eq!(chosen(&plain, false, Prefer), Ok(Binding::Unbound));
        assert_eq!(chosen(&plain, true, Require), Err(Refusal::Unbound));
        assert_eq!(chosen(&both, false, Require), Err(Refusal::Unbound));
        assert_eq!(chosen(&["OTHER"], true, Prefer), Err(Refusal::NoScram));
    }
}
