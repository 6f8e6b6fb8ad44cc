//! Draws the full-screen view of `status --watch`: the same lines as `status`, with graphs of the
//! last minutes. `q`, Escape and Ctrl-C close the view.
//!
//! A thread reads the keyboard, because reading blocks. The terminal is restored when the view ends,
//! even after a panic (`ratatui::try_init` installs a hook).

use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::Duration;

use printable::printable;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Sparkline, Wrap};
use slot_manager::Severity;
use tokio::sync::mpsc;

use super::{Observer, screen};
use crate::cli::figures;
use crate::cli::slot::screen as slot_screen;
use crate::error::{Code, Error, Result};
use crate::ops::status::RelayStatus;

/// Maximum number of snapshots that the graphs remember, more than a terminal has columns.
const REMEMBERED: usize = 600;

/// Height of a graph with its border, in lines.
const GRAPH_LINES: u16 = 5;

/// Minimum height of a terminal with graphs, in lines.
const LINES_FOR_GRAPHS: u16 = 22;

/// Width of the labels.
const LABEL: usize = 11;

/// The figures of one snapshot. `None` leaves a gap in the graph.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Figures {
    recorded_per_second: Option<u64>,
    lag_bytes: Option<u64>,
    /// WAL that can still be written before the slot is lost.
    headroom_bytes: Option<u64>,
}

/// Selects the figure of a graph.
type Figure = fn(&Figures) -> Option<u64>;

/// The contents of the view.
#[derive(Debug, Default)]
struct View {
    history: VecDeque<Figures>,
    state: Option<ShownState>,
    /// Why the last snapshot failed; `None` if it succeeded.
    error: Option<String>,
}

#[derive(Debug)]
struct ShownState {
    severity: Severity,
    word: String,
    meaning: String,
    remedy: Option<String>,
    lines: Vec<(&'static str, String)>,
    loss: Option<Duration>,
    exit_code: ExitCode,
}

/// Shows the view until a key ends it.
pub(super) async fn run(observer: &mut Observer<'_>, interval: Duration) -> Result<ExitCode> {
    let mut terminal = ratatui::try_init()
        .map_err(|e| Error::new(Code::Internal, "cannot use this terminal").caused_by(e))?;
    let mut keys = keyboard();
    let mut view = View::default();
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let ended = 'view: loop {
        let observed = {
            // A snapshot hangs if the server hangs. The keys must still work.
            let observing = async {
                ticks.tick().await;
                observer.observe().await
            };
            let mut observing = std::pin::pin!(observing);
            loop {
                if let Err(error) = terminal.draw(|frame| draw(frame, &view)) {
                    break 'view Err(
                        Error::new(Code::Internal, "cannot draw on the terminal").caused_by(error)
                    );
                }
                tokio::select! {
                    observed = &mut observing => break observed,
                    key = keys.recv() => match key {
                        Some(Event::Key(key)) if leaves(key.code, key.modifiers) => break 'view Ok(()),
                        Some(_) => {}
                        None => break 'view Ok(()),
                    },
                }
            }
        };
        view.add(observed);
    };
    ratatui::restore();
    ended?;
    let last = view.state.map(|state| state.exit_code);
    Ok(last.unwrap_or(ExitCode::from(slot_screen::UNKNOWN)))
}

/// Receives key presses and changes of the terminal's size, until the terminal is gone.
fn keyboard() -> mpsc::UnboundedReceiver<Event> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.send(event).is_err() {
                return;
            }
        }
    });
    receiver
}

fn leaves(code: KeyCode, modifiers: KeyModifiers) -> bool {
    match code {
        KeyCode::Esc | KeyCode::Char('q') => true,
        KeyCode::Char('c') => modifiers.contains(KeyModifiers::CONTROL),
        _ => false,
    }
}

impl View {
    fn add(&mut self, look: Result<&RelayStatus>) {
        let figures = match look {
            Ok(status) => {
                self.error = None;
                self.state = Some(ShownState::of(status));
                Figures::of(status)
            }
            Err(error) => {
                self.error = Some(format!("{error} -> {}", error.hint_text()));
                Figures::default()
            }
        };
        if self.history.len() == REMEMBERED {
            self.history.pop_front();
        }
        self.history.push_back(figures);
    }
}

impl Figures {
    fn of(status: &RelayStatus) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rate, never negative"
        )]
        let recorded = status.rates.map(|rates| rates.recorded_per_second as u64);
        let slot = status.slot.slot.as_ref();
        let headroom = slot.and_then(|slot| slot.safe_wal_size);
        Self {
            recorded_per_second: recorded,
            lag_bytes: slot.and_then(|slot| slot.lag_bytes),
            headroom_bytes: headroom.map(|bytes| u64::try_from(bytes).unwrap_or(0)),
        }
    }
}

impl ShownState {
    fn of(status: &RelayStatus) -> Self {
        let verdict = &status.slot.verdict;
        Self {
            severity: verdict.severity,
            word: slot_screen::word(verdict),
            meaning: verdict.meaning.clone(),
            remedy: verdict.remedy.clone(),
            lines: screen::lines(status),
            loss: status.slot.time_to_loss,
            exit_code: slot_screen::exit_code(verdict),
        }
    }
}

fn draw(frame: &mut Frame<'_>, view: &View) {
    let area = frame.area();
    let graphs = if area.height >= LINES_FOR_GRAPHS {
        GRAPH_LINES
    } else {
        0
    };
    let [head, graph, body, foot] = Layout::vertical([
        Constraint::Length(4),
        Constraint::Length(graphs),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(heading(view), head);
    if graphs > 0 {
        draw_graphs(frame, view, graph);
    }
    let lines = view.state.iter().flat_map(|state| &state.lines);
    let lines = lines.map(|(label, value)| {
        Line::from(vec![
            Span::styled(format!("{label:LABEL$}  "), Style::new().fg(Color::Cyan)),
            Span::raw(printable(value).into_owned()),
        ])
    });
    let lines: Vec<Line<'_>> = lines.collect();
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: false }), body);
    let keys = Line::styled("q quit", Style::new().add_modifier(Modifier::DIM));
    frame.render_widget(keys, foot);
}

fn heading(view: &View) -> Paragraph<'static> {
    let mut lines = Vec::new();
    if let Some(error) = &view.error {
        let style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
        lines.push(Line::styled(printable(error).into_owned(), style));
    } else if let Some(state) = &view.state {
        let style = Style::new().add_modifier(Modifier::BOLD);
        lines.push(Line::from(vec![
            Span::styled(
                format!(" {} ", state.word),
                style.bg(colour(state.severity)).fg(Color::Black),
            ),
            Span::raw(format!(" {}", printable(&state.meaning))),
        ]));
        if let Some(remedy) = &state.remedy {
            lines.push(Line::raw(format!("-> {}", printable(remedy))));
        }
    } else {
        lines.push(Line::raw("connecting to PostgreSQL"));
    }
    Paragraph::new(lines).wrap(Wrap { trim: false })
}

fn colour(severity: Severity) -> Color {
    match severity {
        Severity::Ok => Color::Green,
        Severity::Info => Color::Cyan,
        Severity::Warning => Color::Yellow,
        Severity::Error => Color::Red,
    }
}

fn draw_graphs(frame: &mut Frame<'_>, view: &View, area: Rect) {
    let areas: [Rect; 3] = Layout::horizontal([Constraint::Ratio(1, 3); 3])
        .spacing(1)
        .areas(area);
    let now = view.history.back().copied().unwrap_or_default();
    let unknown = || "unknown".to_owned();
    let rate = now.recorded_per_second;
    let rate = rate.map_or_else(unknown, |rate| format!("{rate} events/s"));
    let lag = now.lag_bytes.map_or_else(unknown, figures::bytes);
    let mut room = now
        .headroom_bytes
        .map_or("no limit, or unknown".to_owned(), figures::bytes);
    if let Some(loss) = view.state.as_ref().and_then(|state| state.loss) {
        room += &format!(", {}", figures::time(loss));
    }
    let graphs: [(&str, String, Figure, Color); 3] = [
        ("recorded", rate, |f| f.recorded_per_second, Color::Green),
        ("lag", lag, |f| f.lag_bytes, Color::Yellow),
        ("WAL left", room, |f| f.headroom_bytes, Color::Blue),
    ];
    for ((title, value, figure, colour), area) in graphs.into_iter().zip(areas) {
        let width = usize::from(area.width.saturating_sub(2));
        let shown = view.history.len().saturating_sub(width);
        let data: Vec<Option<u64>> = view.history.iter().skip(shown).map(figure).collect();
        let graph = Sparkline::default()
            .block(Block::bordered().title(format!(" {title} {value} ")))
            .style(Style::new().fg(colour))
            .data(data);
        frame.render_widget(graph, area);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn drawn(view: &View, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, view)).unwrap();
        terminal.backend().to_string()
    }

    fn view() -> View {
        let history = (0..200).map(|i| Figures {
            recorded_per_second: Some(100 + i % 7),
            lag_bytes: Some(i * 1_000),
            headroom_bytes: (i % 50 != 0).then_some(10 << 20),
        });
        View {
            history: history.collect(),
            state: Some(ShownState {
                severity: Severity::Warning,
                word: "BLOCKED ON PUBSUB".to_owned(),
                meaning: "Pub/Sub does not take the events of topic orders (topic-missing)"
                    .to_owned(),
                remedy: Some("create the topic".to_owned()),
                lines: vec![
                    ("database", "shop, PostgreSQL 18".to_owned()),
                    ("topics", "ord\x1b[31mers topic-missing for 20 s".to_owned()),
                ],
                loss: Some(Duration::from_secs(300)),
                exit_code: ExitCode::SUCCESS,
            }),
            error: None,
        }
    }

    #[test]
    fn the_view_has_state_remedy_graphs_and_details_on_every_size() {
        for (width, height) in [(60, 24), (80, 24), (200, 60)] {
            let text = drawn(&view(), width, height);
            let parts = [
                "BLOCKED ON PUBSUB",
                "-> create the topic",
                "lag",
                "WAL left",
                "PostgreSQL 18",
                "q quit",
            ];
            for part in parts {
                assert!(text.contains(part), "{part} in {width}x{height}:\n{text}");
            }
        }
        let small = drawn(&view(), 60, 12);
        assert!(
            small.contains("topics") && !small.contains("WAL left"),
            "{small}"
        );
        drawn(&view(), 1, 1);
        drawn(&View::default(), 1, 2);
    }

    #[test]
    fn text_from_the_database_cannot_control_the_terminal() {
        let text = drawn(&view(), 100, 30);
        assert!(
            !text.contains('\x1b') && text.contains("ord\\u{1b}[31mers"),
            "{text}"
        );
    }

    #[test]
    fn a_failed_snapshot_is_shown_and_leaves_a_gap_in_the_graphs() {
        let mut view = view();
        view.add(Err(Error::new(Code::PostgresUnreachable, "no connection")));
        assert_eq!(view.history.back(), Some(&Figures::default()));
        assert!(drawn(&view, 100, 30).contains("no connection"));
    }
}
