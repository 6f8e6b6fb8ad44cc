//! Buffers to read into, a few of them, used again and again.
//!
//! What was read is handed on without a copy, so a buffer is free when the relay has done with all
//! that came in it. Until then another one takes its place. A fresh one for each read costs more than
//! the copy out of the kernel: the system clears its memory first, page by page as it is touched.

use std::collections::VecDeque;

use bytes::BytesMut;

/// A read takes so much at most, unless one frame is longer: hundreds of small rows.
pub(super) const READ_BUFFER: usize = 256 << 10;

/// So many bytes of buffers are kept: as many usual ones as the relay may hold at once, and a few
/// that a row of a megabyte has made larger.
const MOST_KEPT: usize = 4 << 20;

/// The buffers that are not being read into.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// With their sizes, in the order in which they were read into.
    used: VecDeque<(usize, BytesMut)>,
    kept: usize,
    /// Of the one that is being read into, as far as it is one of ours.
    size: usize,
}

impl Buffers {
    /// Gives `buffer` room for `frame` bytes and at least for [`READ_BUFFER`], those included that
    /// it holds: in place when nobody holds any of it, else by another in its place.
    pub(super) fn make_room(&mut self, buffer: &mut BytesMut, frame: usize) {
        let size = frame.max(READ_BUFFER);
        if buffer.try_reclaim(size.saturating_sub(buffer.len())) {
            return;
        }
        let (next_size, mut next) = self
            .free(size)
            .unwrap_or_else(|| (size, BytesMut::with_capacity(size)));
        next.extend_from_slice(buffer);
        let mut used = std::mem::replace(buffer, next);
        used.clear();
        self.keep(self.size, used);
        self.size = next_size;
    }

    /// The last buffer of at least this size that nobody holds any more: caches know it best.
    fn free(&mut self, size: usize) -> Option<(usize, BytesMut)> {
        let is_free = |(_, buffer): &mut (usize, BytesMut)| buffer.try_reclaim(size);
        let last = self.used.iter_mut().rposition(is_free)?;
        let found = self.used.remove(last)?;
        self.kept -= found.0;
        Some(found)
    }

    /// Keeps it for later; the oldest go when that is too much. One that is very large would drive
    /// out all others, and the first of a session is not one of ours.
    fn keep(&mut self, size: usize, buffer: BytesMut) {
        if size == 0 || size > MOST_KEPT / 2 {
            return;
        }
        self.kept += size;
        self.used.push_back((size, buffer));
        while self.kept > MOST_KEPT
            && let Some((size, _)) = self.used.pop_front()
        {
            self.kept -= size;
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    /// Reads so much, and cuts all but `rest` bytes of it off.
    fn read(buffer: &mut BytesMut, bytes: usize, rest: usize) -> Bytes {
        buffer.resize(buffer.len() + bytes, 7);
        buffer.split_to(buffer.len() - rest).freeze()
    }

    #[test]
    fn a_buffer_comes_again_when_nobody_holds_any_of_it() {
        let (mut buffers, mut buffer) = (Buffers::default(), BytesMut::new());
        let mut held = VecDeque::new();
        let mut places = std::collections::HashSet::new();
        for _ in 0..100 {
            buffers.make_room(&mut buffer, 1);
            assert!(buffer.capacity() >= READ_BUFFER);
            places.insert(buffer.as_ptr());
            held.push_back(read(&mut buffer, 5_000, 0));
            if held.len() > 5 {
                held.pop_front();
            }
        }
        assert!(places.len() <= 7, "{} buffers", places.len());
    }

    #[test]
    fn what_is_left_of_a_frame_moves_along_and_what_was_handed_on_stays() {
        let (mut buffers, mut buffer) = (Buffers::default(), BytesMut::new());
        buffers.make_room(&mut buffer, 1);
        let held = read(&mut buffer, 1_000, 10);
        buffers.make_room(&mut buffer, READ_BUFFER + 1);
        assert_eq!(buffer[..], [7; 10]);
        assert!(buffer.capacity() > READ_BUFFER);
        buffer[..].fill(8);
        assert_eq!(held[..], [7; 990]);
    }

    #[test]
    fn what_is_kept_is_bounded_whatever_size_frames_have() {
        let (mut buffers, mut buffer) = (Buffers::default(), BytesMut::new());
        for frame in [64 << 20, 1, 1 << 20, 1, 3 << 20, 1, 64 << 20].repeat(3) {
            let held = read(&mut buffer, 10, 0);
            buffers.make_room(&mut buffer, frame);
            drop(held);
            let sizes = buffers.used.iter().map(|(size, _)| size);
            assert_eq!(buffers.kept, sizes.sum::<usize>());
            assert!(buffers.kept <= MOST_KEPT);
        }
    }
}
