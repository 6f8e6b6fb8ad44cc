//! Cuts the byte stream of the server into whole frames, without IO and without copying.
//!
//! A frame is a tag, a length that counts itself, and a body (source: PostgreSQL manual, "Message
//! Formats"). While streaming nearly every frame is CopyData; everything else ends a run.

use decoder::frame::{Frame, decode_frame};

use super::lease::Words;
use crate::error::{Code, Error, Result};

/// Tag and length.
const HEADER: usize = 5;
const COPY_DATA: u8 = b'd';

/// A frame longer than this is refused: no event may be larger than 10 MB, and text that Pub/Sub
/// would take cannot grow to this size on the wire.
const MAX_FRAME: usize = 64 << 20;

/// PostgreSQL makes no message longer than this, 1 GiB.
const MAX_MESSAGE: usize = 1 << 30;

/// What the front of the buffer holds.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Scan {
    /// Bytes of whole CopyData frames at the front.
    pub(super) copy_data: usize,
    /// Whether one of them is a keepalive that asks for a reply.
    pub(super) reply_requested: bool,
    /// What they tell of the server.
    pub(super) words: Words,
    /// What follows them.
    pub(super) then: Then,
}

/// What follows the run of CopyData frames.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// An unfinished frame that needs this many bytes in all (at least a header's).
    More(usize),
    /// A whole frame of another kind, with its tag and its length in bytes.
    Other(u8, usize),
}

/// Looks at the front of `buffer`.
///
/// # Errors
/// `replication-protocol` on a length that cannot be.
pub(super) fn scan(buffer: &[u8]) -> Result<Scan> {
    let mut at = 0;
    let mut last = 0..0;
    let mut reply_requested = false;
    let mut words = Words::default();
    let then = loop {
        let rest = &buffer[at..];
        let Some(length) = frame_length(rest)? else {
            break Then::More(HEADER);
        };
        if rest.len() < length {
            break Then::More(length);
        }
        if rest[0] != COPY_DATA {
            break Then::Other(rest[0], length);
        }
        if rest.get(HEADER) == Some(&b'k')
            && let Ok(Frame::Keepalive {
                reply_requested: asks,
                sent_at,
                ..
            }) = decode_frame(&rest[HEADER..length])
        {
            reply_requested |= asks;
            words.keepalive = Some((sent_at, asks));
        }
        last = at + HEADER..at + length;
        at += length;
    };
    words.last_sent_at = match decode_frame(&buffer[last]) {
        Ok(Frame::XLogData { sent_at, .. } | Frame::Keepalive { sent_at, .. }) => Some(sent_at),
        // Nothing has come, or what the relay refuses.
        Err(_) => None,
    };
    Ok(Scan {
        copy_data: at,
        reply_requested,
        words,
        then,
    })
}

/// The bodies of the CopyData frames of a chunk that [`scan`] has measured.
fn copy_data_bodies(chunk: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = chunk;
    std::iter::from_fn(move || {
        let length = frame_length(rest)
            .ok()
            .flatten()
            .filter(|length| *length <= rest.len())?;
        let (frame, tail) = rest.split_at(length);
        rest = tail;
        Some(&frame[HEADER..])
    })
}

/// What these bodies say.
///
/// # Errors
/// `replication-protocol` in place of one that cannot be read.
pub(crate) fn frames(chunk: &[u8]) -> impl Iterator<Item = Result<Frame<'_>>> {
    copy_data_bodies(chunk).map(|body| {
        decode_frame(body).map_err(|e| {
            Error::new(Code::ReplicationProtocol, "a frame of the stream").caused_by(e)
        })
    })
}

/// Length of the frame at the front, header included; `None` when not even a header is there.
fn frame_length(bytes: &[u8]) -> Result<Option<usize>> {
    let Some(header) = bytes.first_chunk::<HEADER>() else {
        return Ok(None);
    };
    let counted = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
    if header[0] == COPY_DATA && (MAX_FRAME..=MAX_MESSAGE).contains(&counted) {
        return Err(Error::new(
            Code::SlotStuck,
            format!("the server sends a row of {counted} bytes, more than any message may have"),
        ));
    }
    if !(4..=MAX_FRAME).contains(&counted) {
        return Err(Error::new(
            Code::ReplicationProtocol,
            format!(
                "the server sent a frame of tag {:#04x} and {counted} bytes",
                header[0]
            ),
        ));
    }
    Ok(Some(counted + 1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(tag: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![tag];
        bytes.extend(u32::try_from(body.len() + 4).unwrap().to_be_bytes());
        bytes.extend(body);
        bytes
    }

    fn keepalive(reply: u8) -> Vec<u8> {
        let mut body = vec![b'k'];
        body.extend([0; 16]);
        body.push(reply);
        frame(b'd', &body)
    }

    #[test]
    fn a_keepalive_that_wants_a_reply_is_seen_in_the_middle_of_a_run() {
        let buffer = [
            frame(b'd', b"wxyz"),
            keepalive(0),
            keepalive(1),
            frame(b'd', b"w"),
        ]
        .concat();
        let scan = scan(&buffer).unwrap();
        assert_eq!(scan.copy_data, buffer.len());
        assert!(scan.reply_requested);
        let sent_at = decoder::PgTimestamp::from_micros(0);
        assert_eq!(scan.words.keepalive, Some((sent_at, true)));
        assert_eq!(scan.words.last_sent_at, None, "the last frame is none");
        let end = scan_of(&keepalive(0));
        assert_eq!(end.words.last_sent_at, Some(sent_at));
        assert_eq!(end.words.keepalive, Some((sent_at, false)));
    }

    fn scan_of(buffer: &[u8]) -> Scan {
        scan(buffer).unwrap()
    }

    #[test]
    fn a_run_ends_before_a_frame_of_another_kind() {
        let run = frame(b'd', b"w1");
        let buffer = [run.clone(), frame(b'N', b"notice"), frame(b'd', b"w2")].concat();
        let scan = scan(&buffer).unwrap();
        assert_eq!(scan.copy_data, run.len());
        assert_eq!(scan.then, Then::Other(b'N', 11));
    }

    #[test]
    fn an_impossible_length_is_an_error() {
        assert!(scan(&[b'd', 0, 0, 0, 3]).is_err());
        assert!(scan(&[b'd', 255, 0, 0, 0]).is_err());
    }

    proptest! {
        #[test]
        fn wherever_the_stream_is_cut_the_same_bodies_come_out(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 1..20),
            cut in any::<prop::sample::Index>(),
        ) {
            let stream: Vec<u8> = bodies.iter().flat_map(|body| frame(b'd', body)).collect();
            let cut = cut.index(stream.len() + 1);
            let first = scan(&stream[..cut]).unwrap().copy_data;
            let mut seen: Vec<Vec<u8>> = copy_data_bodies(&stream[..first]).map(<[u8]>::to_vec).collect();
            prop_assert_eq!(scan(&stream[first..]).unwrap().copy_data, stream.len() - first);
            seen.extend(copy_data_bodies(&stream[first..]).map(<[u8]>::to_vec));
            prop_assert_eq!(seen, bodies);
        }

        #[test]
        fn any_bytes_are_scanned_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(scan) = scan(&bytes) {
                prop_assert!(scan.copy_data <= bytes.len());
            }
        }
    }
}
