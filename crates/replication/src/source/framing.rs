//! Cuts the server's byte stream into whole frames, without IO and without copying the bytes.
//!
//! A frame is a tag, a length that counts itself, and a body (source: PostgreSQL manual, "Message
//! Formats"). While the server streams, nearly every frame is CopyData, so we look for runs of
//! CopyData frames.

use decoder::frame::{Frame, decode_frame};

use super::lease::FrameEvidence;
use crate::error::{ErrorKind, ReplicationError, Result};

/// Length in bytes of a frame's tag and length field.
const HEADER: usize = 5;
const COPY_DATA: u8 = b'd';

/// Maximum length in bytes of a frame, so that memory is bounded. The limit leaves room for every event that Pub/Sub
/// accepts. Pub/Sub accepts messages of up to 10 MB, and PostgreSQL sends their values as text, which can be longer.
/// For example, a `bytea` of 9 MB is 18 MB of text, because each byte becomes two digits.
const MAX_FRAME: usize = 64 << 20;

/// Maximum length in bytes of any message that PostgreSQL sends: 1 GiB. A CopyData frame between
/// [`MAX_FRAME`] and this length is a row that is too large. A longer frame violates the protocol.
const MAX_MESSAGE: usize = 1 << 30;

/// The content of the front of the buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FrameScan {
    /// Total length in bytes of the whole CopyData frames at the front.
    pub(super) copy_data: usize,
    /// Whether one of these frames is a keepalive that asks for a reply.
    pub(super) reply_requested: bool,
    /// Evidence for the lease: the send time of the last of these frames, and the last keepalive
    /// among them.
    pub(super) evidence: FrameEvidence,
    /// The bytes that follow these frames.
    pub(super) then: AfterFrames,
}

/// The bytes that follow the run of CopyData frames.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AfterFrames {
    /// An incomplete frame, with its total length in bytes. If the frame's header is incomplete too, the
    /// number is the length of a header.
    More(usize),
    /// A complete frame that is not CopyData: its tag, and its length in bytes.
    Other(u8, usize),
}

/// Scans the front of `buffer` for whole frames.
///
/// # Errors
/// `RowTooLarge` for a CopyData frame that is too long for an event. `Protocol` for an impossible length.
pub(super) fn scan(buffer: &[u8]) -> Result<FrameScan> {
    let mut at = 0;
    let mut last = 0..0;
    let mut reply_requested = false;
    let mut evidence = FrameEvidence::default();
    let then = loop {
        let rest = &buffer[at..];
        let Some(length) = frame_length(rest)? else {
            break AfterFrames::More(HEADER);
        };
        if rest.len() < length {
            break AfterFrames::More(length);
        }
        if rest[0] != COPY_DATA {
            break AfterFrames::Other(rest[0], length);
        }
        if rest.get(HEADER) == Some(&b'k')
            && let Ok(Frame::Keepalive {
                reply_requested: asks,
                sent_at,
                ..
            }) = decode_frame(&rest[HEADER..length])
        {
            reply_requested |= asks;
            evidence.keepalive = Some((sent_at, asks));
        }
        last = at + HEADER..at + length;
        at += length;
    };
    evidence.last_sent_at = match decode_frame(&buffer[last]) {
        Ok(Frame::XLogData { sent_at, .. } | Frame::Keepalive { sent_at, .. }) => Some(sent_at),
        // There is no complete frame, or the last frame is malformed. The caller reports a
        // malformed frame when it decodes the frame.
        Err(_) => None,
    };
    Ok(FrameScan {
        copy_data: at,
        reply_requested,
        evidence,
        then,
    })
}

/// Iterates over the bodies of the CopyData frames in a chunk that [`scan`] has measured.
#[inline]
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

/// Decodes the frames of a chunk.
///
/// # Errors
/// A frame that cannot be decoded is returned as `Protocol`.
#[inline]
pub fn frames(chunk: &[u8]) -> impl Iterator<Item = Result<Frame<'_>>> {
    copy_data_bodies(chunk).map(|body| {
        decode_frame(body).map_err(|e| {
            ReplicationError::new(ErrorKind::Protocol, "cannot decode a frame of the stream")
                .caused_by(e)
        })
    })
}

/// Length of the frame at the front, including its header; `None` if the header is incomplete.
#[inline]
fn frame_length(bytes: &[u8]) -> Result<Option<usize>> {
    let Some(header) = bytes.first_chunk::<HEADER>() else {
        return Ok(None);
    };
    let counted = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
    if header[0] == COPY_DATA && (MAX_FRAME..=MAX_MESSAGE).contains(&counted) {
        return Err(ReplicationError::new(
            ErrorKind::RowTooLarge,
            format!("the server sends a row of {counted} bytes, more than Pub/Sub accepts"),
        ));
    }
    if !(4..=MAX_FRAME).contains(&counted) {
        return Err(ReplicationError::new(
            ErrorKind::Protocol,
            format!(
                "the server sent a frame with tag {:#04x} and an invalid length of {counted} bytes",
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
        assert_eq!(scan.evidence.keepalive, Some((sent_at, true)));
        assert_eq!(
            scan.evidence.last_sent_at, None,
            "the last frame is not valid"
        );
        let end = scan_of(&keepalive(0));
        assert_eq!(end.evidence.last_sent_at, Some(sent_at));
        assert_eq!(end.evidence.keepalive, Some((sent_at, false)));
    }

    fn scan_of(buffer: &[u8]) -> FrameScan {
        scan(buffer).unwrap()
    }

    #[test]
    fn a_run_ends_before_a_frame_of_another_kind() {
        let run = frame(b'd', b"w1");
        let buffer = [run.clone(), frame(b'N', b"notice"), frame(b'd', b"w2")].concat();
        let scan = scan(&buffer).unwrap();
        assert_eq!(scan.copy_data, run.len());
        assert_eq!(scan.then, AfterFrames::Other(b'N', 11));
    }

    #[test]
    fn an_impossible_length_is_an_error() {
        assert!(scan(&[b'd', 0, 0, 0, 3]).is_err());
        assert!(scan(&[b'd', 255, 0, 0, 0]).is_err());
    }

    proptest! {
        #[test]
        fn the_same_bodies_are_read_for_any_cut_of_the_stream(
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
