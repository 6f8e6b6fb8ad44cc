//! A small pool of read buffers that are reused.
//!
//! Chunks are handed on without copying, so a buffer becomes free only once the caller has dropped
//! every chunk cut from it. Until then another buffer is used. Allocating a fresh buffer for each
//! read would cost more than copying the bytes out of the kernel, because the system zeroes new
//! memory page by page as it is touched.

use std::collections::VecDeque;

use bytes::BytesMut;

/// The largest read, unless a single frame is longer. This is room for hundreds of small rows.
pub(super) const READ_BUFFER: usize = 256 << 10;

/// How many bytes of buffers to keep: enough for all the regular buffers that the caller may hold
/// at once, plus a few that a row of a megabyte has enlarged.
const MOST_KEPT: usize = 4 << 20;

/// The buffers that the session is not reading into at the moment.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// Each buffer with its size, in the order in which the session filled them.
    used: VecDeque<(usize, BytesMut)>,
    /// The sum of the sizes in `used`.
    kept: usize,
    /// Size of the buffer that is being read into; 0 if this pool did not allocate that buffer.
    size: usize,
}

impl Buffers {
    /// Makes sure that `buffer` can hold `frame` bytes, and at least [`READ_BUFFER`], including the
    /// bytes that it holds already. Grows `buffer` in place if no chunk refers to its memory,
    /// otherwise moves those bytes to another buffer.
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

    /// Takes the most recently used free buffer of at least this size, because it is the likeliest
    /// to be in the CPU cache.
    fn free(&mut self, size: usize) -> Option<(usize, BytesMut)> {
        let is_free = |(_, buffer): &mut (usize, BytesMut)| buffer.try_reclaim(size);
        let last = self.used.iter_mut().rposition(is_free)?;
        let found = self.used.remove(last)?;
        self.kept -= found.0;
        Some(found)
    }

    /// Keeps a buffer for reuse, and drops the oldest buffers above the limit [`MOST_KEPT`]. A
    /// buffer of more than half that size is not kept, because it would displace the others. The
    /// first buffer of a session is not kept either, because this pool did not allocate it.
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

    /// Simulates a read of `bytes` bytes, then cuts off all but the last `rest`.
    fn read(buffer: &mut BytesMut, bytes: usize, rest: usize) -> Bytes {
        buffer.resize(buffer.len() + bytes, 7);
        buffer.split_to(buffer.len() - rest).freeze()
    }

    #[test]
    fn a_buffer_is_reused_when_no_chunk_refers_to_it() {
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
    fn a_partial_frame_moves_to_the_new_buffer_and_earlier_chunks_keep_their_bytes() {
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
    fn the_pool_is_bounded_for_any_sequence_of_frame_sizes() {
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
