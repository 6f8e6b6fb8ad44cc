//! Tests round trips: decoding an encoded value returns the same value.

use decoder::frame::{Frame, StandbyStatus, decode_frame};
use decoder::{Lsn, PgTimestamp, decode};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::encoder::{OwnedMessage, encode_frame};
use crate::made_up;

proptest! {
    #[test]
    fn every_message_survives_a_round_trip(message in made_up::message()) {
        let payload = message.encode();
        prop_assert_eq!(OwnedMessage::from(decode(&payload)?), message);
    }

    #[test]
    fn every_frame_survives_a_round_trip(
        wal_start in made_up::lsn(),
        wal_end in made_up::lsn(),
        sent_at in made_up::timestamp(),
        payload in vec(any::<u8>(), 0..40),
        reply_requested: bool,
    ) {
        let xlog_data = Frame::XLogData { wal_start, wal_end, sent_at, payload: &payload };
        let body = encode_frame(&xlog_data);
        prop_assert_eq!(decode_frame(&body)?, xlog_data);
        let keepalive = Frame::Keepalive { wal_end, sent_at, reply_requested };
        let body = encode_frame(&keepalive);
        prop_assert_eq!(decode_frame(&body)?, keepalive);
    }

    #[test]
    fn every_lsn_survives_a_round_trip_through_text(lsn in made_up::lsn()) {
        prop_assert_eq!(lsn.to_string().parse::<Lsn>(), Ok(lsn));
    }

    #[test]
    fn a_text_is_parsed_as_an_lsn_only_if_it_is_one(text in "[0-9A-Fa-f/+ g]{0,20}") {
        if let Ok(lsn) = text.parse::<Lsn>() {
            let digits = |half: &str| half.trim_start_matches('0').to_uppercase();
            let (high, low) = text.split_once('/').unwrap();
            let written = lsn.to_string();
            let (written_high, written_low) = written.split_once('/').unwrap();
            prop_assert_eq!(digits(high), digits(written_high));
            prop_assert_eq!(digits(low), digits(written_low));
        }
    }

    // Generates no year after 9985. From the year 10000 on, the text begins with a `+`, so it sorts before the
    // texts of earlier years.
    #[test]
    fn the_texts_of_timestamps_sort_in_the_order_of_time(
        earlier in 0..248_000_000_000_000_000_i64, micros in 1..4_000_000_000_000_000_i64,
    ) {
        let (earlier, later) =
            (PgTimestamp::from_micros(earlier), PgTimestamp::from_micros(earlier + micros));
        prop_assert!(earlier.to_string() < later.to_string());
        prop_assert_eq!(later.micros_since(earlier), micros);
    }

    #[test]
    fn a_status_has_a_fixed_length_and_is_appended_to_the_buffer(
        lsn in made_up::lsn(), sent_at in made_up::timestamp(), reply_requested: bool,
    ) {
        let status = StandbyStatus { written: lsn, flushed: lsn, applied: lsn, sent_at, reply_requested };
        let mut buffer = bytes::BytesMut::from(b"before".as_slice());
        status.encode(&mut buffer);
        prop_assert_eq!(buffer.len(), 6 + StandbyStatus::ENCODED_LEN);
        prop_assert!(buffer.starts_with(b"beforer"));
    }
}
