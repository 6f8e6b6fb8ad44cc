//! Plays a schedule: causes the faults of the plan one after another, and notes when each happened.

use std::time::Duration;

use pubsub_emulator::{Action, Fault as PublishFault, FaultId, Faults, Journal};
use tokio::task::JoinSet;

use crate::fault::{Down, Fault};
use crate::ground::{Database, Ground, execute};
use crate::log::Log;
use crate::plan::{Encoding, KINDS, Step, When};
use crate::random::Random;
use crate::relay::Relay;
use crate::schedule::topic;
use crate::seat::Seat;
use crate::watch::Watch;

/// How long a step waits for Pub/Sub to store more messages. The limit is short, because the messages may
/// never come, for example after the writers have finished.
const STORED_LIMIT: Duration = Duration::from_millis(400);

const WALSENDER: &str = "pg_stat_replication";

/// The relays' SQL sessions: the sessions of the dispatch writer and of the supervisor, and the main
/// session. Walsenders are excluded, because they are not client backends.
const SQL_SESSIONS: &str = "pg_stat_activity WHERE datname = current_database() \
    AND application_name LIKE 'postrider%' AND backend_type = 'client backend'";

/// A fault that happened, and the time span in which it acted, on the clock of the emulator's journal.
#[derive(Debug, Clone)]
pub(crate) struct Occurrence {
    pub(crate) from: Duration,
    pub(crate) to: Duration,
    pub(crate) fault: Fault,
}

/// Everything that a fault may change while a schedule is played: PostgreSQL, the relays, Pub/Sub and the network.
/// Also contains notes about the faults so far.
pub(crate) struct Stage<'a> {
    pub(crate) ground: &'a Ground,
    pub(crate) database: &'a Database,
    pub(crate) watch: &'a Watch,
    pub(crate) seats: Vec<Seat>,
    pub(crate) log: Log,
    pub(crate) relays: Vec<Relay>,
    pub(crate) pubsub: Faults,
    pub(crate) journal: Journal,
    pub(crate) answer_delay: Duration,
    /// The fault that delays every answer.
    pub(crate) slow: Option<FaultId>,
    /// Faults of the plan that may still be active.
    pub(crate) injected: Vec<FaultId>,
    /// The faults that refuse single events. They are injected before all other faults, because Pub/Sub
    /// uses the first fault that applies.
    pub(crate) poison: Vec<FaultId>,
    /// For each gap: a WAL position from before the stream began to omit the outbox table, and a
    /// position from after the gap.
    pub(crate) gaps: Vec<(u64, u64)>,
    pub(crate) occurrences: Vec<Occurrence>,
    /// Tasks that end faults which last for a while.
    pub(crate) ends: JoinSet<()>,
    pub(crate) encoding: Encoding,
    pub(crate) random: Random,
}

impl Stage<'_> {
    pub(crate) fn start_relays(&mut self) -> Result<(), String> {
        (0..self.seats.len()).try_for_each(|seat| self.start_relay(seat))
    }

    fn start_relay(&mut self, seat: usize) -> Result<(), String> {
        let relay = Relay::start(&self.seats[seat].launch, seat, self.log.clone())?;
        self.relays.push(relay);
        Ok(())
    }

    /// Performs all steps of the plan.
    pub(crate) async fn run(&mut self, steps: &[Step]) -> Result<(), String> {
        for step in steps {
            match step.when {
                When::After(pause) => tokio::time::sleep(pause).await,
                When::Stored(more) => {
                    let wanted = self.journal.counts().stored_messages + more;
                    let reached =
                        |counts: &pubsub_emulator::Counts| counts.stored_messages >= wanted;
                    // The step is due whether the messages came or the wait timed out, so ignore the
                    // result.
                    let _ = self.journal.wait_until(STORED_LIMIT, reached).await;
                }
            }
            self.relays_must_run()?;
            let fault = step.fault.clone();
            let (from, to) = self.perform(&fault).await?;
            self.occurrences.push(Occurrence { from, to, fault });
        }
        Ok(())
    }

    /// Fails if a relay exited on its own. A relay must exit only when the harness asks it to,
    /// because no fault of a plan justifies an exit.
    pub(crate) fn relays_must_run(&mut self) -> Result<(), String> {
        for relay in &mut self.relays {
            if let Some(status) = relay.has_ended()? {
                return Err(format!("relay {} ended on its own: {status}", relay.pid()));
            }
        }
        Ok(())
    }

    /// Causes a fault. Returns the time span in which the fault acts.
    async fn perform(&mut self, fault: &Fault) -> Result<(Duration, Duration), String> {
        let from = self.journal.now();
        match fault {
            Fault::Kill(gap) => {
                let seat = self.take_down(Down::Killed).await?;
                self.replace(seat, *gap).await?
            }
            Fault::Stop(gap) => {
                let seat = self.take_down(Down::Stopped).await?;
                self.replace(seat, *gap).await?
            }
            Fault::Freeze(span) => return self.freeze(*span).await,
            Fault::TerminateWalsender => self.terminate(WALSENDER).await?,
            Fault::TerminateSql => self.terminate(SQL_SESSIONS).await?,
            Fault::LockDispatch(span) => self.lock_dispatch(*span).await?,
            Fault::Server(outage, span) => self.ground.outage(*outage, *span).await?,
            Fault::Publish(action, times) => {
                self.inject(action.clone(), Some(*times));
            }
            Fault::PublishFor(action, span) => {
                let id = self.inject(action.clone(), None);
                let pubsub = self.pubsub.clone();
                self.later(*span, move || pubsub.lift(id));
            }
            Fault::TopicGone(kind, span) => {
                let (pubsub, topic) = (self.pubsub.clone(), topic(kind));
                pubsub.remove_topic(&topic);
                self.later(*span, move || {
                    pubsub.restore_topic(&topic);
                });
            }
            Fault::CutPubsub => {
                self.pubsub.reset_connections();
            }
            Fault::RefusePubsub(span) => {
                let pubsub = self.pubsub.clone();
                pubsub.refuse_connections(true);
                pubsub.reset_connections();
                self.later(*span, move || pubsub.refuse_connections(false));
            }
            Fault::SlotLost(down, loss) => self.lose_slot(*down, *loss).await?,
            Fault::Gap(down, how, span) => self.leave_out(*down, *how, *span).await?,
            Fault::Replaced(down, how) => self.replace_table(*down, *how).await?,
            Fault::TooLong => self.write_too_long().await?,
            Fault::Undecodable(number) => self.write_undecodable(*number).await?,
            Fault::Release => self.release().await?,
            Fault::Network(side, trouble, span) => {
                let relay = self.take_relay().await?;
                if let Some(end) = self.seats[relay.seat()].trouble(*side, *trouble) {
                    self.later(*span, end);
                }
                self.relays.push(relay);
            }
        }
        Ok((from, self.journal.now() + fault.lasts()))
    }

    /// Freezes a relay by SIGSTOP for `span`. Returns a time span in which the relay was certainly
    /// frozen.
    async fn freeze(&mut self, span: Duration) -> Result<(Duration, Duration), String> {
        let relay = self.take_relay().await?;
        relay.signal("STOP").await?;
        let from = self.journal.now();
        tokio::time::sleep(span).await;
        let to = self.journal.now();
        relay.signal("CONT").await?;
        self.relays.push(relay);
        Ok((from, to))
    }

    /// Takes a relay down and returns its seat, which is now empty. For `Down::Running`, does
    /// nothing and returns `None`.
    pub(crate) async fn take_down(&mut self, down: Down) -> Result<Option<usize>, String> {
        if down == Down::Running {
            return Ok(None);
        }
        let relay = self.take_relay().await?;
        let seat = relay.seat();
        match down {
            Down::Stopped => relay.stop().await?,
            Down::Running | Down::Killed => relay.kill_9().await?,
        }
        Ok(Some(seat))
    }

    /// Removes one of the relays from the stage and returns it. Usually this is the relay that
    /// holds the slot.
    async fn take_relay(&mut self) -> Result<Relay, String> {
        let active = match self.relays.len() {
            1 => None,
            _ => self.active_relay().await?,
        };
        let at_random = self.random.within(0..=self.relays.len() as u64 - 1) as usize;
        let index = active.filter(|_| self.random.per_mille(750));
        Ok(self.relays.swap_remove(index.unwrap_or(at_random)))
    }

    /// Finds the active relay by its walsender's application name, which ends with the relay's pid.
    async fn active_relay(&self) -> Result<Option<usize>, String> {
        let sql = "SELECT s.application_name FROM pg_replication_slots r \
                   JOIN pg_stat_replication s ON s.pid = r.active_pid WHERE r.slot_name = $1";
        let client = self.database.connect().await?;
        let row = client
            .query_opt(sql, &[&self.database.name])
            .await
            .map_err(|e| format!("{e:?}"))?;
        let name: Option<String> = row.map(|row| row.get(0));
        Ok(name.and_then(|name| {
            let is_active = |relay: &Relay| name.ends_with(&format!(":{}", relay.pid()));
            self.relays.iter().position(is_active)
        }))
    }

    /// Starts a relay in the seat of a relay that was taken down. Does nothing if `seat` is `None`.
    pub(crate) async fn replace(
        &mut self,
        seat: Option<usize>,
        gap: Duration,
    ) -> Result<(), String> {
        let Some(seat) = seat else { return Ok(()) };
        tokio::time::sleep(gap).await;
        let client = self.database.connect().await?;
        self.watch.note_records(&client).await?;
        self.start_relay(seat)
    }

    async fn terminate(&self, which: &str) -> Result<(), String> {
        let client = self.database.connect().await?;
        execute(
            &client,
            &format!("SELECT pg_terminate_backend(pid) FROM {which}"),
        )
        .await
    }

    /// Locks the dispatch table against writes but not reads, as slow DDL would.
    async fn lock_dispatch(&mut self, span: Duration) -> Result<(), String> {
        let client = self.database.connect().await?;
        let lock = "BEGIN; LOCK TABLE outbox.dispatch IN SHARE ROW EXCLUSIVE MODE";
        execute(&client, lock).await?;
        self.later(span, move || drop(client));
        Ok(())
    }

    fn inject(&mut self, action: Action, times: Option<u64>) -> FaultId {
        let fault = PublishFault::new(action);
        let id = self
            .pubsub
            .inject(times.into_iter().fold(fault, PublishFault::times));
        self.injected.push(id);
        // Pub/Sub uses the first fault that applies, and the fault that delays answers always applies. So move that
        // fault behind the new one.
        self.slow_down();
        id
    }

    /// Makes Pub/Sub refuse these events until they are released. Must be called before any other
    /// fault is injected, because Pub/Sub uses the first fault that applies.
    pub(crate) fn refuse(&mut self, event_ids: impl Iterator<Item = String>) {
        for event_id in event_ids {
            let refused = PublishFault::new(Action::Poison { event_id });
            self.poison.push(self.pubsub.inject(refused));
        }
    }

    /// Makes Pub/Sub delay every answer. If this fault is already injected, moves it behind all
    /// other faults.
    pub(crate) fn slow_down(&mut self) {
        if let Some(id) = self.slow.take() {
            self.pubsub.lift(id);
        }
        if !self.answer_delay.is_zero() {
            let slow = PublishFault::new(Action::Delay(self.answer_delay));
            self.slow = Some(self.pubsub.inject(slow));
        }
    }

    /// Ends every fault that is still active, except the refusals of single events.
    pub(crate) async fn make_well(&mut self) {
        self.ends.shutdown().await;
        for id in self.injected.drain(..).chain(self.slow.take()) {
            self.pubsub.lift(id);
        }
        for kind in KINDS {
            self.pubsub.restore_topic(&topic(kind));
        }
        self.pubsub.refuse_connections(false);
        self.seats.iter().for_each(Seat::heal);
    }

    fn later(&mut self, span: Duration, end: impl FnOnce() + Send + 'static) {
        self.ends.spawn(async move {
            tokio::time::sleep(span).await;
            end();
        });
    }
}
