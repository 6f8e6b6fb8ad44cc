//! libpq's parameter `channel_binding`. `end_point.rs` has the hash to which a login is bound.

/// Whether a login is bound to the TLS channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelBinding {
    /// Never.
    Disable,
    /// When both sides can.
    Prefer,
    /// A login that cannot be bound fails.
    Require,
}

/// The hint if `channel_binding=require` cannot be satisfied.
pub const CHANNEL_BINDING_HINT: &str = "channel_binding=require needs TLS, a role with a SCRAM-SHA-256 password, and \
    a certificate whose signature names its hash; otherwise use channel_binding=prefer";
