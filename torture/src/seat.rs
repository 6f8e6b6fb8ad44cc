//! The seat of a relay: how the relay is started, and the network between the relay and its peers.
//!
//! When a relay is killed, its successor starts in the same seat. A seat has proxies only if the
//! plan has network faults, because proxies cost time.

use fault_proxy::{Cut, FaultProxy, Flow};
use pubsub_emulator::{Journal, RunningEmulator};
use std::sync::Arc;

use crate::fault::{Side, Trouble};
use crate::ground::{Database, Ground};
use crate::plan::Plan;
use crate::relay::Launch;

#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) launch: Launch,
    network: Option<Network>,
}

#[derive(Debug)]
struct Network {
    postgres: Arc<FaultProxy>,
    pubsub: Arc<FaultProxy>,
}

impl Seat {
    pub(crate) async fn new(
        plan: &Plan,
        ground: &Ground,
        database: &Database,
        emulator: &RunningEmulator,
    ) -> Result<Self, String> {
        let journal: Journal = emulator.journal();
        if !plan.needs_network() {
            let pubsub = emulator.addr().to_string();
            let postgres = &database.relay_url;
            let launch = Launch::new(&plan.relay, &database.name, postgres, &pubsub, journal);
            return Ok(Self {
                launch,
                network: None,
            });
        }
        let postgres = proxy(ground.address()).await?;
        let pubsub = proxy(emulator.addr()).await?;
        let launch = Launch::new(
            &plan.relay,
            &database.name,
            &database.url_at(postgres.addr()),
            &pubsub.addr().to_string(),
            journal,
        );
        Ok(Self {
            launch,
            network: Some(Network { postgres, pubsub }),
        })
    }

    /// Disturbs the network. Returns a function that ends the disturbance. Returns `None` if there
    /// is nothing to end, because the connections were only cut or the seat has no proxies.
    pub(crate) fn trouble(&self, side: Side, trouble: Trouble) -> Option<impl FnOnce() + use<>> {
        let network = self.network.as_ref()?;
        let proxy = match side {
            Side::Postgres => network.postgres.clone(),
            Side::Pubsub => network.pubsub.clone(),
        };
        match trouble {
            Trouble::Stalled => proxy.set_flow(Flow::Stalled),
            Trouble::Swallowed => proxy.set_flow(Flow::Swallowed),
            Trouble::Delayed(delay) => proxy.set_flow(Flow::Delayed(delay)),
            Trouble::Reset => {
                proxy.cut(Cut::Reset);
                return None;
            }
            Trouble::Finished => {
                proxy.cut(Cut::Finish);
                return None;
            }
        }
        Some(move || proxy.heal())
    }

    pub(crate) fn heal(&self) {
        if let Some(network) = &self.network {
            network.postgres.heal();
            network.pubsub.heal();
        }
    }
}

async fn proxy(target: std::net::SocketAddr) -> Result<Arc<FaultProxy>, String> {
    let proxy = FaultProxy::start(target).await;
    proxy.map(Arc::new).map_err(|e| format!("a proxy: {e}"))
}
