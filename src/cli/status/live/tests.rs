//! Tests of what the live view shows, on terminals of several sizes.

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
            meaning: "Pub/Sub does not accept the events of topic orders (topic-missing)"
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
fn the_second_line_of_a_long_value_begins_under_the_first() {
    let mut view = view();
    let state = view.state.as_mut().unwrap();
    state.remedy =
        Some("grant the role of the relay the right to publish to that topic, and wait".to_owned());
    let value = "orders topic-missing for 20 s, 7 failures, 40 events waiting, the oldest 18 s old";
    state.lines = vec![("topics", value.to_owned()), ("slot", "x".to_owned())];
    let text = drawn(&view, 60, 24);
    let row = |part: &str| {
        let line = text.lines().find(|line| line.contains(part));
        line.unwrap_or_else(|| panic!("{part} in\n{text}"))
    };
    let start = |part: &str| row(part).find(|c: char| !matches!(c, ' ' | '"'));
    assert_eq!(
        start("the oldest"),
        start("topics").map(|at| at + LABEL + 2),
        "{text}"
    );
    assert_eq!(
        start("topic, and wait"),
        start("-> grant").map(|at| at + 3),
        "{text}"
    );
}

#[test]
fn details_come_before_graphs_and_what_does_not_fit_is_counted() {
    let mut view = view();
    let state = view.state.as_mut().unwrap();
    state.lines = (0..16).map(|n| ("topics", format!("topic {n}."))).collect();
    let text = drawn(&view, 80, 30);
    assert!(
        text.contains("topic 15.") && text.contains("WAL left"),
        "{text}"
    );
    let text = drawn(&view, 80, 24);
    assert!(
        text.contains("topic 15.") && !text.contains("WAL left"),
        "{text}"
    );
    let text = drawn(&view, 80, 16);
    // The heading takes four of the 16 lines, and the keys one. The other 11 show 10 topics and the note.
    assert!(
        text.contains("topic 9.") && text.contains("... 6 more lines"),
        "{text}"
    );
    assert!(!text.contains("topic 10."), "{text}");
    drawn(&view, 80, 1);
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
