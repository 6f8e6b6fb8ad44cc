//! Tests decoding of messages that were captured from real servers.

use decoder::{Begin, Message, decode};

use crate::encoder::OwnedMessage;
use crate::fixture::{Captured, every_scenario, scenarios};
use crate::rendering::Renderer;

/// The snapshots show the messages of this major version. The messages of every other version must be rendered
/// as the same text.
const REFERENCE_MAJOR: u32 = 15;

fn render(messages: &[Captured]) -> String {
    let mut renderer = Renderer::default();
    for message in messages {
        renderer.add(&decode(&message.payload).unwrap());
    }
    renderer.finish()
}

#[test]
fn each_scenario_decodes_to_its_snapshot() {
    let scenarios = scenarios(REFERENCE_MAJOR);
    assert_eq!(scenarios.len(), 20);
    for (name, messages) in scenarios {
        insta::assert_snapshot!(name, render(&messages));
    }
}

/// The rendered form of a transaction without published changes, as PostgreSQL 14 sends it. Newer
/// versions send nothing for such a transaction.
const EMPTY_TRANSACTION: &str = "Begin\nCommit\n";

#[test]
fn every_major_version_sends_the_same_except_for_empty_transactions() {
    let reference = scenarios(REFERENCE_MAJOR);
    for (major, name, messages) in every_scenario() {
        let rendering = render(&messages).replace(EMPTY_TRANSACTION, "");
        assert_eq!(rendering, render(&reference[&name]), "{name} of pg{major}");
    }
}

#[test]
fn only_postgresql_14_sends_empty_transactions() {
    for (major, name, messages) in every_scenario() {
        if name == "empty_transaction" {
            assert_eq!(
                render(&messages).contains(EMPTY_TRANSACTION),
                major == 14,
                "pg{major}"
            );
        }
    }
}

#[test]
fn encoding_a_decoded_message_gives_the_captured_bytes() {
    for (major, name, messages) in every_scenario() {
        for message in messages {
            let decoded = OwnedMessage::from(decode(&message.payload).unwrap());
            assert_eq!(decoded.encode(), message.payload, "{name} of pg{major}");
        }
    }
}

#[test]
fn positions_and_transaction_ids_match_those_reported_by_the_server() {
    for (major, name, messages) in every_scenario() {
        let mut begin = None;
        for message in &messages {
            compare_with_server(message, &mut begin, &format!("{name} of pg{major}"));
        }
        assert_eq!(begin, None, "{name} of pg{major} ends within a transaction");
    }
}

/// Compares the LSNs and transaction ids in a message with the `lsn` and `xid` that PostgreSQL's function
/// `pg_logical_slot_peek_binary_changes` returned for the message. `open` is the Begin of the open transaction.
fn compare_with_server(message: &Captured, open: &mut Option<Begin>, place: &str) {
    match decode(&message.payload).unwrap() {
        Message::Begin(begin) => {
            assert_eq!(begin.xid, message.xid, "{place}");
            assert!(begin.final_lsn >= message.lsn, "{place}");
            *open = Some(begin);
        }
        Message::Commit(commit) => {
            let begin = open.take().expect("a commit ends what a begin started");
            assert_eq!(commit.commit_lsn, begin.final_lsn, "{place}");
            assert_eq!(commit.commit_time, begin.commit_time, "{place}");
            assert_eq!(commit.end_lsn, message.lsn, "{place}");
            assert!(commit.end_lsn > commit.commit_lsn, "{place}");
        }
        Message::Logical(logical) => assert_eq!(logical.lsn, message.lsn, "{place}"),
        Message::Origin(_)
        | Message::Relation(_)
        | Message::Type(_)
        | Message::Insert(_)
        | Message::Update(_)
        | Message::Delete(_)
        | Message::Truncate(_) => {}
    }
}
