//! Estimates how many events of the open transaction the relay has not read yet.
//!
//! The confirmed position shows no progress while the relay delivers one large transaction. But each change of the
//! transaction has a WAL position before the commit, and the distance to the commit shows how much is left.

use decoder::Lsn;

use crate::capture::intake::IntakeStep;

/// The part of the open transaction that the relay has read.
#[derive(Debug, Default)]
pub(in crate::session) struct ReadProgress {
    open: Option<PartlyRead>,
    /// Position of the last message.
    at: Lsn,
}

#[derive(Debug)]
struct PartlyRead {
    commit: Lsn,
    /// Position of the first event.
    first: Option<Lsn>,
    /// Number of events so far.
    events: u64,
}

impl ReadProgress {
    /// Notes a message at this position.
    pub(super) fn message(&mut self, at: Lsn, step: &IntakeStep) {
        self.at = at;
        match step {
            IntakeStep::Begin(commit, ..) => self.begin(commit.lsn()),
            IntakeStep::Commit(_) => self.open = None,
            IntakeStep::Event { .. } | IntakeStep::Unmappable { .. } => self.event(),
            IntakeStep::Nothing
            | IntakeStep::TypesUnknown(_)
            | IntakeStep::ColumnUnknown(_)
            | IntakeStep::TableUnknown(_) => {}
        }
    }

    fn begin(&mut self, commit: Lsn) {
        self.open = Some(PartlyRead {
            commit,
            first: None,
            events: 0,
        });
    }

    fn event(&mut self) {
        if let Some(open) = &mut self.open {
            open.first.get_or_insert(self.at);
            open.events += 1;
        }
    }

    /// Estimates how many events follow in the open transaction. Assumes that they are as far apart in the WAL as the
    /// events so far.
    pub(super) fn unread_events(&self) -> f64 {
        let Some(PartlyRead {
            commit,
            first: Some(first),
            events,
        }) = self.open
        else {
            return 0.0;
        };
        let bytes = |from: Lsn, to: Lsn| to.as_u64().saturating_sub(from.as_u64()) as f64;
        let read = bytes(first, self.at);
        if read > 0.0 {
            events as f64 * bytes(self.at, commit) / read
        } else {
            0.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_a_transaction_is_estimated_from_what_was_read() {
        let mut progress = ReadProgress::default();
        assert!(progress.unread_events() < 0.1);
        progress.begin(Lsn::new(11_000));
        for n in 0..=100 {
            progress.at = Lsn::new(1_000 + n * 20);
            progress.event();
        }
        let left = progress.unread_events();
        assert!((390.0..=410.0).contains(&left), "{left}");
        progress.message(Lsn::new(11_000), &IntakeStep::Commit(Lsn::new(11_100)));
        assert!(progress.unread_events() < 0.1);
    }
}
