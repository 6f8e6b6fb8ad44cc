//! The script of the demonstration: its steps in order, and the text that announces each step.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use google_cloud_pubsub::model::Message;

use crate::args::Args;
use crate::error::{Result, failed};
use crate::figures::grouped;
use crate::ledger::{Window, percentile};
use crate::program;
use crate::screen::{Line, Playground, Screen};
use crate::shop;
use crate::subscriber::{Subscriber, arrival};
use crate::summary::Summary;
use crate::verdict::Verdict;
use crate::world::{self, World};
use crate::writers::{ORDERS, WRITERS, Writers};
use crate::{SharedLedger, lock};

/// How often the demonstration prints a line of the table.
const LINE_INTERVAL: Duration = Duration::from_secs(1);
/// How long the relay is down after the kill.
const OUTAGE: Duration = Duration::from_secs(2);
/// How long to wait for the next message. If none arrives in this time, the demonstration gives up on the
/// missing events.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often to check whether everything has arrived.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Number of lines of the relay's log to show after a failure.
const LOG_LINES: usize = 30;

/// The running demonstration. The fields are dropped from top to bottom, so the subscriber ends
/// before the servers.
pub(crate) struct Show<'a> {
    args: &'a Args,
    screen: Screen,
    subscriber: Subscriber,
    /// Whether the playground is open. If so, messages are printed and not counted.
    playing: Arc<AtomicBool>,
    ledger: SharedLedger,
    world: World,
    began: Instant,
    last_line: Instant,
}

impl<'a> Show<'a> {
    pub(crate) async fn set_up(args: &'a Args) -> Result<Self> {
        let program = program::find(args.postrider.as_deref())?;
        let screen = Screen {
            colours: args.colours(),
            on_stderr: args.json,
        };
        screen.print(&screen.title())?;
        let say = |text: String| screen.print(&screen.step(&text));
        let world = World::start(program, args.keep, say).await?;
        let (ledger, playing) = (SharedLedger::default(), Arc::new(AtomicBool::new(false)));
        let emulator = world.emulator.addr().to_string();
        let on_message = receiver(ledger.clone(), playing.clone(), screen);
        let subscriber =
            Subscriber::start(&emulator, world::TOPIC, world::SUBSCRIPTION, on_message).await?;
        screen.print(&screen.step("a subscriber: Google's Rust client, ordered subscription"))?;
        let began = Instant::now();
        Ok(Self {
            args,
            screen,
            subscriber,
            playing,
            ledger,
            world,
            began,
            last_line: began,
        })
    }

    /// Runs the script.
    pub(crate) async fn play(&mut self) -> Result<()> {
        let time = Duration::from_secs(self.args.seconds);
        let before_kill = time / 2;
        self.world.start_relay().await?;
        self.step(&format!(
            "the relay: `postrider run`, process {}",
            self.relay_pid()
        ))?;
        let url = self.world.url(shop::WRITER);
        let mut writers = Writers::start(&url, self.args.rate, &self.ledger);
        self.step(&format!(
            "{WRITERS} writers, {} events a second on {ORDERS} orders: each transaction changes \
             orders\n    and inserts an event for each; one in 50 is rolled back",
            grouped(self.args.rate.into())
        ))?;
        self.began = Instant::now();
        self.last_line = self.began;
        self.print(&self.screen.table_head())?;
        let steady = self.watch(&mut writers, before_kill).await?;

        let pid = self.relay_pid();
        self.world.kill_relay().await?;
        self.news(&format!(
            "kill -9 {pid}: the relay is gone. The shop does not notice."
        ))?;
        self.watch(&mut writers, OUTAGE).await?;

        let restart = self.restart_relay().await?;
        self.watch(&mut writers, time.saturating_sub(before_kill + OUTAGE))
            .await?;
        writers.finish().await?;
        self.news("The writers have stopped; the remaining events must arrive.")?;
        self.drain().await?;
        self.finish(steady, &restart).await
    }

    /// Starts a second relay. Announces how many events the first relay did not publish, and how
    /// many it published but did not record.
    async fn restart_relay(&mut self) -> Result<Restart> {
        // No message is stored while we count: the first relay has been down for `OUTAGE`, so all its
        // requests have ended.
        let stored = self.world.emulator.journal().counts().stored_messages;
        let published_unrecorded = stored.saturating_sub(self.world.shop.recorded().await?);
        let at = Instant::now();
        lock(&self.ledger).set_goal(at);
        let backlog = lock(&self.ledger).totals().behind();
        self.world.start_relay().await?;
        let repeats = match published_unrecorded {
            0 => "Every published event is recorded there, so none is sent twice.".into(),
            count => format!(
                "{} were published but not recorded yet, so they are sent twice.",
                grouped(count)
            ),
        };
        self.news(&format!(
            "A new relay, process {}: {} events wait. It continues from the slot and skips\n\
             the events in outbox.dispatch. {repeats}",
            self.relay_pid(),
            grouped(backlog),
        ))?;
        Ok(Restart {
            at,
            backlog,
            published_unrecorded,
        })
    }

    /// Shows a line each second for the given time. Returns the changes of each second.
    async fn watch(&mut self, writers: &mut Writers, time: Duration) -> Result<Vec<Window>> {
        let mut windows = Vec::new();
        let start = tokio::time::Instant::now();
        let (mut next, end) = (start + LINE_INTERVAL, start + time);
        while next <= end {
            tokio::time::sleep_until(next).await;
            writers.must_run()?;
            windows.push(self.show_line().await?);
            next += LINE_INTERVAL;
        }
        tokio::time::sleep_until(end).await;
        Ok(windows)
    }

    /// Waits until every event has arrived and is recorded, and the slot's confirmed position is
    /// after all events. Gives up when no new message has arrived for `PATIENCE`.
    async fn drain(&mut self) -> Result<()> {
        let events = self.world.shop.events().await?;
        let end = self.world.shop.slot().await?.server_lsn;
        let mut messages = lock(&self.ledger).totals().messages();
        let mut last_progress = Instant::now();
        while last_progress.elapsed() < PATIENCE {
            let second = Instant::now();
            while second.elapsed() < LINE_INTERVAL {
                let totals = lock(&self.ledger).totals();
                let stored = self.world.emulator.journal().counts().stored_messages;
                if totals.delivered >= events
                    && totals.messages() >= stored
                    && self.world.shop.recorded().await? >= events
                    && self.world.shop.slot().await?.confirmed_flush_lsn >= end
                {
                    return self.show_line().await.map(drop);
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            self.show_line().await?;
            let now = lock(&self.ledger).totals().messages();
            if now > messages {
                (messages, last_progress) = (now, Instant::now());
            }
        }
        Ok(())
    }

    async fn finish(&mut self, steady: Vec<Window>, restart: &Restart) -> Result<()> {
        let shop = &self.world.shop;
        let committed = shop.committed().await?;
        let delivered: u64 = steady.iter().map(|window| window.delivered).sum();
        let mut latencies: Vec<Duration> = steady
            .iter()
            .flat_map(|window| &window.latencies)
            .copied()
            .collect();
        let mut ms = |percent| percentile(&mut latencies, percent).map(|t| t.as_secs_f64() * 1e3);
        let (totals, verdict, caught_up) = {
            let ledger = lock(&self.ledger);
            (
                ledger.totals(),
                Verdict::reach(&ledger, &committed),
                ledger.goal_reached(),
            )
        };
        #[expect(clippy::cast_precision_loss, reason = "counts of events")]
        let steady_per_second = delivered as f64 / steady.len().max(1) as f64;
        let summary = Summary {
            events: shop.events().await?,
            orders: ORDERS,
            totals,
            verdict,
            published_unrecorded: restart.published_unrecorded,
            backlog: restart.backlog,
            caught_up_seconds: caught_up.map(|at| at.duration_since(restart.at).as_secs_f64()),
            steady_per_second,
            p50_ms: ms(50),
            p99_ms: ms(99),
            dispatch: shop.dispatch().await?,
            slot: shop.slot().await?,
        };
        self.print(&self.screen.summary(&summary))?;
        if self.args.json {
            let text = serde_json::to_string_pretty(&summary);
            let text = text.expect("invariant: the summary has a JSON form");
            Screen {
                on_stderr: false,
                ..self.screen
            }
            .print(&(text + "\n"))?;
        }
        if !summary.verdict.is_good() {
            let what = format!("a promise was broken: {}", summary.verdict.complaint());
            return Err(failed(what).hint(
                "this is a bug in Postrider: please report it with the whole output; --keep leaves \
                 everything running",
            ));
        }
        if self.args.keep {
            Ok(())
        } else {
            self.print(&self.screen.what_next(&self.shell_command()))
        }
    }

    /// Shows one line of the table. Returns an error if the relay or the subscriber has ended.
    async fn show_line(&mut self) -> Result<Window> {
        self.world.relay_must_run()?;
        self.subscriber.must_run().await?;
        let slot = self.world.shop.slot().await?;
        let (mut window, totals) = {
            let mut ledger = lock(&self.ledger);
            (ledger.window(), ledger.totals())
        };
        let now = Instant::now();
        let seconds = now.duration_since(self.last_line).as_secs_f64();
        self.last_line = now;
        #[expect(clippy::cast_precision_loss, reason = "counts of events")]
        let per_second = |count: u64| count as f64 / seconds;
        let line = Line {
            time: now.duration_since(self.began),
            committed: per_second(window.committed),
            delivered: per_second(window.delivered),
            totals,
            lag_bytes: slot.lag_bytes.unwrap_or_default(),
            p50: percentile(&mut window.latencies, 50),
            p99: percentile(&mut window.latencies, 99),
        };
        self.print(&self.screen.line(&line))?;
        Ok(window)
    }

    /// Prints commands that the user can try. From now on, each received message is printed.
    pub(crate) fn open_playground(&self) -> Result<()> {
        self.playing.store(true, Ordering::Relaxed);
        let playground = Playground {
            database_url: self.world.url("postgres"),
            emulator: self.world.emulator.addr().to_string(),
            project: world::PROJECT,
            http_addr: self.world.http_addr.clone(),
            relay_pid: self.world.relay_pid(),
            program: self.shell_command(),
        };
        self.print(&self.screen.playground(&playground))
    }

    /// Prints the end of the relay's log.
    pub(crate) fn print_relay_log(&self) -> Result<()> {
        self.print(&self.screen.log_tail(&self.world.relay_log_tail(LOG_LINES)))
    }

    fn relay_pid(&self) -> u32 {
        self.world.relay_pid().unwrap_or_default()
    }

    fn shell_command(&self) -> String {
        program::shell_command(&self.world.program)
    }

    fn print(&self, text: &str) -> Result<()> {
        self.screen.print(text)
    }

    fn step(&self, text: &str) -> Result<()> {
        self.print(&self.screen.step(text))
    }

    fn news(&self, text: &str) -> Result<()> {
        self.print(&self.screen.news(text))
    }
}

/// The state at the moment when the second relay was started.
struct Restart {
    at: Instant,
    backlog: u64,
    published_unrecorded: u64,
}

/// Returns the handler for messages. The handler counts each message. Once the playground is open, it
/// prints each message instead.
fn receiver(
    ledger: SharedLedger,
    playing: Arc<AtomicBool>,
    screen: Screen,
) -> impl FnMut(&Message) + Send {
    move |message| {
        if playing.load(Ordering::Relaxed) {
            let event_type = message
                .attributes
                .get("event_type")
                .map_or("", String::as_str);
            let text = screen.message(&message.ordering_key, event_type, &message.data);
            // Ignore an error: if the output is closed, nobody can see the message.
            let _ = screen.print(&text);
            return;
        }
        match arrival(message) {
            Some(arrival) => lock(&ledger).received(arrival),
            None => lock(&ledger).received_unreadable(),
        }
    }
}
