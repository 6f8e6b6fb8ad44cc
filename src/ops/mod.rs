//! What an operator asks and does, without printing: the commands and the HTTP port show the same
//! facts.
//!
//! [`slot`] looks at the slot and at what its relay says, [`pending`] counts the events that wait,
//! [`verdict`] puts both into one word with a severity and a remedy, and [`status`] gathers the whole
//! relay. [`event`] finds the outcome of one event, [`audit`] compares the tables with the records,
//! [`prune`] deletes old rows, [`pruner`] does so in a running relay, and [`replay`] publishes events again. [`tail`] follows the
//! records as they appear. `walk` and `progress` serve `audit` and `prune`, and [`since`] reads times.
//! Everything here uses the database; the relay itself need not be reachable.
//!
//! Not here: how it is shown (`cli`, `http`), and what the relay knows about itself (`condition`).

pub(crate) mod audit;
pub(crate) mod event;
pub(crate) mod pending;
mod progress;
pub(crate) mod prune;
pub(crate) mod pruner;
pub(crate) mod replay;
pub(crate) mod since;
pub(crate) mod slot;
pub(crate) mod status;
pub(crate) mod tail;
pub(crate) mod verdict;
mod walk;
