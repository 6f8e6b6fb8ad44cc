//! What the proxy does at the moment: the state that its connections watch.

use std::time::Duration;

/// One of the two ways through the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToTarget,
    /// From the server to the client.
    FromTarget,
}

/// What happens to bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Flow {
    /// They pass.
    #[default]
    Open,
    /// They pass so much later, in order. At most 1 MiB is on its way per connection and
    /// direction; then the sender feels it.
    Delayed(Duration),
    /// They wait, as behind a partition that heals: the sender's buffers fill, nothing is closed,
    /// not even by the end of the other side, and all of it comes when the flow is open again.
    Stalled,
    /// They are taken and vanish; nothing is closed, not even by the end of the other side. A
    /// connection that has lost bytes this way breaks (reset) when the flow changes.
    Swallowed,
}

/// How a connection is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// By RST: what was on its way is lost, both sides get an error.
    Reset,
    /// By FIN: both sides read an end of the stream.
    Finish,
}

/// The state. Connections hold a receiver of it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Switch {
    pub(crate) to_target: Flow,
    pub(crate) from_target: Flow,
    pub(crate) refuse: bool,
    /// How many times all connections were cut, and how the last time.
    pub(crate) cuts: u64,
    pub(crate) last_cut: Option<Cut>,
}

impl Switch {
    pub(crate) fn flow(&self, direction: Direction) -> Flow {
        match direction {
            Direction::ToTarget => self.to_target,
            Direction::FromTarget => self.from_target,
        }
    }

    pub(crate) fn set_flow(&mut self, direction: Direction, flow: Flow) {
        match direction {
            Direction::ToTarget => self.to_target = flow,
            Direction::FromTarget => self.from_target = flow,
        }
    }

    /// Whether a packet that opens a connection would arrive.
    pub(crate) fn lets_connect(&self) -> bool {
        [self.to_target, self.from_target]
            .iter()
            .all(|flow| matches!(flow, Flow::Open | Flow::Delayed(_)))
    }
}
