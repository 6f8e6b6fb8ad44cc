//! What an operator asks and does, without printing: the commands and the HTTP port show the same
//! facts.
//!
//! [`slot`] looks at the slot and at what its relay says, [`pending`] counts the events that wait,
//! [`verdict`] puts both into one word with a severity and a remedy, and [`status`] gathers the whole
//! relay. Everything here reads the database; the relay itself need not be reachable.
//!
//! Not here: how it is shown (`cli`, `http`), and what the relay knows about itself (`condition`).

pub(crate) mod pending;
pub(crate) mod slot;
pub(crate) mod status;
pub(crate) mod verdict;
