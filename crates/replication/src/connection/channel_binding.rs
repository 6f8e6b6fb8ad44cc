//! libpq's parameter `channel_binding`. `end_point.rs` computes the hash that a login is bound to.

/// When a login is bound to the TLS channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelBinding {
    /// Never bound.
    Disable,
    /// Bound if both sides support channel binding.
    Prefer,
    /// Always bound. A login that cannot be bound fails.
    Require,
}

/// Hint for a login that cannot satisfy `channel_binding=require`.
pub const CHANNEL_BINDING_HINT: &str = "channel_binding=require needs TLS, a role with a SCRAM-SHA-256 password, and \
    a certificate whose signature names its hash; otherwise use channel_binding=prefer";
