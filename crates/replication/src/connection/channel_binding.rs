//! libpq's parameter `channel_binding`. The hash that a login is bound to is computed in
//! `end_point.rs`.

/// When a login is bound to the TLS channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelBinding {
    /// Never bind the login.
    Disable,
    /// Bind the login if both sides support channel binding.
    Prefer,
    /// Always bind the login. A login that cannot be bound fails.
    Require,
}

/// Hint for the operator when a login cannot satisfy `channel_binding=require`.
pub const CHANNEL_BINDING_HINT: &str = "channel_binding=require needs TLS, a role with a SCRAM-SHA-256 password, and \
    a certificate whose signature names its hash; otherwise use channel_binding=prefer";
