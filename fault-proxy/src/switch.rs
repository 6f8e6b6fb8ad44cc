//! The current behaviour of the proxy: the state that its connections watch.

use std::time::Duration;

/// One of the two directions through the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToTarget,
    /// From the server to the client.
    FromTarget,
}

/// What happens to the bytes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Flow {
    /// Bytes pass.
    #[default]
    Open,
    /// Bytes arrive this much later, in order. If about 1 MiB is in flight in one direction of a connection,
    /// the sender is blocked.
    Delayed(Duration),
    /// Bytes wait, as during a partition that heals later, so the sender's buffers fill. The proxy
    /// closes nothing, even if one side ends the connection. All bytes arrive when the flow is open
    /// again.
    Stalled,
    /// Bytes are read and discarded. The proxy closes nothing, even if one side ends the
    /// connection. When the flow changes, the proxy resets every connection that has lost bytes
    /// this way.
    Swallowed,
}

/// How a connection is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// By RST: bytes in flight are lost, and both sides get an error.
    Reset,
    /// By FIN: both sides read the end of the stream.
    Finish,
}

/// The state of the proxy. Each connection holds a receiver of the state.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Switch {
    pub(crate) to_target: Flow,
    pub(crate) from_target: Flow,
    /// The flow of one connection. The proxy's local port towards the target identifies the connection.
    pub(crate) of_one: Option<(u16, Flow)>,
    pub(crate) refuse: bool,
    /// The number of cuts so far.
    pub(crate) cuts: u64,
    cut_of_all: Option<Made>,
    cut_of_one: Option<(u16, Made)>,
}

#[derive(Debug, Clone, Copy)]
struct Made {
    /// The number of this cut among all cuts, from 1.
    number: u64,
    how: Cut,
}

impl Switch {
    /// The flow for a connection that reaches the target from `port`.
    pub(crate) fn flow(&self, direction: Direction, port: Option<u16>) -> Flow {
        match (self.of_one, direction) {
            (Some((one, flow)), _) if Some(one) == port => flow,
            (_, Direction::ToTarget) => self.to_target,
            (_, Direction::FromTarget) => self.from_target,
        }
    }

    pub(crate) fn set_flow(&mut self, direction: Direction, flow: Flow) {
        match direction {
            Direction::ToTarget => self.to_target = flow,
            Direction::FromTarget => self.from_target = flow,
        }
    }

    /// Cuts the connection that reaches the target from `port`, or all connections if `port` is
    /// `None`.
    pub(crate) fn cut(&mut self, port: Option<u16>, how: Cut) {
        self.cuts += 1;
        let number = self.cuts;
        let made = Made { number, how };
        match port {
            Some(port) => self.cut_of_one = Some((port, made)),
            None => self.cut_of_all = Some(made),
        }
    }

    /// How a connection that reaches the target from `port` was cut, or `None` if it was not cut.
    /// Ignores the first `cuts_before` cuts, which happened before the connection was accepted.
    pub(crate) fn cut_since(&self, cuts_before: u64, port: Option<u16>) -> Option<Cut> {
        let of_one = self.cut_of_one.filter(|(own, _)| Some(*own) == port);
        [self.cut_of_all, of_one.map(|(_, made)| made)]
            .into_iter()
            .flatten()
            .find(|made| made.number > cuts_before)
            .map(|made| made.how)
    }

    /// Whether the packets that open a connection pass in both directions.
    pub(crate) fn lets_connect(&self) -> bool {
        [self.to_target, self.from_target]
            .iter()
            .all(|flow| matches!(flow, Flow::Open | Flow::Delayed(_)))
    }
}
