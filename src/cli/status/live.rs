//! Draws the full-screen view of `status --watch`: the same lines as `status`, with graphs of the
//! last minutes. `q`, Escape, Ctrl-C and SIGTERM close the view.
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
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::{Observer, screen};
use crate::cli::figures;
use crate::cli::slot::screen as slot_screen;
use crate::cli::wrap::wrapped;
use crate::error::{Code, Error, Result};
use crate::ops::status::RelayStatus;

/// Maximum number of snapshots that the graphs remember. A graph shows one snapshot per column, and usual
/// terminals have fewer columns.
const REMEMBERED: usize = 600;

/// Height of a graph with its border, in lines.
const GRAPH_LINES: u16 = 5;

/// Maximum height of the heading without its empty line, in lines.
const MOST_HEADING_LINES: u16 = 8;

/// Minimum height of a terminal with graphs, in lines.
const LINES_FOR_GRAPHS: u16 = 22;

/// Width of the labels.
const LABEL: usize = 11;

/// Exit code after SIGTERM, as a shell reports it.
const TERMINATED: u8 = 128 + 15;

/// The numbers of one snapshot that the graphs show. `None` leaves a gap in the graph.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Figures {
    recorded_per_second: Option<u64>,
    lag_bytes: Option<u64>,
    /// WAL that can still be written before the slot is lost.
    headroom_bytes: Option<u64>,
}

/// Selects one number of a snapshot: the number that a graph shows.
type Figure = fn(&Figures) -> Option<u64>;

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

/// Shows the view until a key or SIGTERM ends it. Returns the exit code of the last state that was shown, or
/// [`TERMINATED`] after SIGTERM.
pub(super) async fn run(observer: &mut Observer<'_>, interval: Duration) -> Result<ExitCode> {
    let mut stop = signal(SignalKind::terminate())
        .map_err(|e| Error::of_system("cannot wait for SIGTERM", e))?;
    let mut terminal =
        ratatui::try_init().map_err(|e| Error::of_system("cannot use this terminal", e))?;
    let mut keys = keyboard();
    let mut view = View::default();
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let ended = 'view: loop {
        let observed = {
            // Wait for a key and for the snapshot at the same time, because the keys must work even if the server
            // hangs.
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
                        Some(Event::Key(key)) if leaves(key.code, key.modifiers) => break 'view Ok(None),
                        Some(_) => {}
                        None => break 'view Ok(None),
                    },
                    _ = stop.recv() => break 'view Ok(Some(TERMINATED)),
                }
            }
        };
        view.add(observed);
    };
    ratatui::restore();
    if let Some(code) = ended? {
        return Ok(ExitCode::from(code));
    }
    let last = view.state.map(|state| state.exit_code);
    Ok(last.unwrap_or(ExitCode::from(slot_screen::UNKNOWN)))
}

/// Receives key presses and changes of the terminal's size, until the terminal is gone.
fn keyboard() -> mpsc::Receiver<Event> {
    let (sender, receiver) = mpsc::channel(16);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.blocking_send(event).is_err() {
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
    let heading = heading(view, area.width);
    let heading_lines = u16::try_from(heading.len()).unwrap_or(u16::MAX);
    let head_height = heading_lines.clamp(3, MOST_HEADING_LINES) + 1;
    let details = details(view, area.width);
    // The details say what is wrong and what to do, so show graphs only if all details fit below them.
    let left = area.height.saturating_sub(head_height + GRAPH_LINES + 1);
    let has_graphs = area.height >= LINES_FOR_GRAPHS && details.len() <= usize::from(left);
    let graphs = if has_graphs { GRAPH_LINES } else { 0 };
    let [head, graph, body, foot] = Layout::vertical([
        Constraint::Length(head_height),
        Constraint::Length(graphs),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(heading).wrap(Wrap { trim: false }), head);
    if has_graphs {
        draw_graphs(frame, view, graph);
    }
    let details = cut_to(details, usize::from(body.height));
    // The details are wrapped already, but their words stay whole. Wrap again to break words wider than the terminal.
    frame.render_widget(Paragraph::new(details).wrap(Wrap { trim: false }), body);
    let keys = Line::styled("q quit", Style::new().add_modifier(Modifier::DIM));
    frame.render_widget(keys, foot);
}

/// Returns the lines below the heading and the graphs, wrapped at `width` columns.
fn details(view: &View, width: u16) -> Vec<Line<'static>> {
    let lines = view.state.iter().flat_map(|state| &state.lines);
    let lines = lines.flat_map(|(label, value)| {
        let label = format!("{label:LABEL$}  ");
        let label = Span::styled(label, Style::new().fg(Color::Cyan));
        after(vec![label], value, width)
    });
    lines.collect()
}

/// Leaves out the lines that do not fit into this height. The last line then says how many are left out.
fn cut_to(mut lines: Vec<Line<'static>>, height: usize) -> Vec<Line<'static>> {
    if lines.len() > height {
        let kept = height.saturating_sub(1);
        let left_out = lines.len() - kept;
        lines.truncate(kept);
        let what =
            format!("... {left_out} more lines: enlarge the terminal, or run `postrider status`");
        let style = Style::new().add_modifier(Modifier::BOLD);
        lines.push(Line::styled(what, style));
    }
    lines
}

/// Returns `start`, followed by the text, wrapped at `width` columns. The lines after the first are indented
/// like the text.
fn after(start: Vec<Span<'static>>, text: &str, width: u16) -> Vec<Line<'static>> {
    let indent = start.iter().map(Span::width).sum();
    let text = wrapped(&printable(text), indent, Some(usize::from(width)));
    let mut lines = text.lines().map(|line| Line::raw(line.to_owned()));
    let mut first = Line::from(start);
    if let Some(line) = lines.next() {
        first.extend(line);
    }
    std::iter::once(first).chain(lines).collect()
}

/// Returns the lines of the heading, wrapped at `width` columns.
fn heading(view: &View, width: u16) -> Vec<Line<'static>> {
    let columns = Some(usize::from(width));
    if let Some(error) = &view.error {
        let style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
        let error = wrapped(&printable(error), 0, columns);
        return error
            .lines()
            .map(|line| Line::styled(line.to_owned(), style))
            .collect();
    }
    let Some(state) = &view.state else {
        return vec![Line::raw("connecting to PostgreSQL")];
    };
    let style = Style::new().add_modifier(Modifier::BOLD);
    let word = Span::styled(
        format!(" {} ", state.word),
        style.bg(colour(state.severity)).fg(Color::Black),
    );
    let mut lines = after(vec![word, Span::raw(" ")], &state.meaning, width);
    if let Some(remedy) = &state.remedy {
        lines.extend(after(vec![Span::raw("-> ")], remedy, width));
    }
    lines
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
mod tests;
