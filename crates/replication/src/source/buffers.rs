//! A small pool of reusable read buffers.
//!
//! Chunks are passed on without copying, so a buffer becomes free only after the caller has dropped
//! every chunk that was cut from it. Until then, the session reads into another buffer. Allocating
//! a fresh buffer for each read would cost more than copying the bytes out of the kernel, because
//! the system zeroes each page of new memory on its first use.

use std::collections::VecDeque;

use bytes::BytesMut;

/// Size in bytes of a read buffer, unless a single frame is longer. Hundreds of small rows fit into such a
/// buffer.
pub(super) const READ_BUFFER: usize = 256 << 10;

/// Maximum number of bytes in pooled buffers: the size of 16 regular buffers ([`READ_BUFFER`]). A session uses fewer
/// than 16 regular buffers, so there is also room for a few larger ones. The pool allocates larger buffers for long
/// frames, such as a row of a megabyte.
const MOST_KEPT: usize = 4 << 20;

/// The buffers that the session is not reading into at the moment.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// The buffers with their sizes, least recently used first.
    used: VecDeque<(usize, BytesMut)>,
    /// The sum of the sizes in `used`.
    kept: usize,
    /// Size of the buffer that the session is reading into; 0 if this pool did not allocate that
    /// buffer.
    size: usize,
}

impl Buffers {
    /// Makes sure that `buffer` has room for a whole frame of `frame` bytes, and for at least [`READ_BUFFER`]
    /// bytes. Both numbers include the bytes that `buffer` holds already. Reuses the memory of `buffer` if it
    /// is large enough and no chunk refers to it. Otherwise moves the bytes to another buffer.
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

    /// Takes the most recently used free buffer of at least this size, because that buffer is the
    /// most likely to be in the CPU cache.
    fn free(&mut self, size: usize) -> Option<(usize, BytesMut)> {
        let is_free = |(_, buffer): &mut (usize, BytesMut)| buffer.try_reclaim(size);
        let last = self.used.iter_mut().rposition(is_free)?;
        let found = self.used.remove(last)?;
        self.kept -= found.0;
        Some(found)
    }

    /// Keeps a buffer for reuse, and drops the oldest buffers beyond [`MOST_KEPT`]. Does not keep a buffer of
    /// more than half of [`MOST_KEPT`], because it would displace the other buffers. Does not keep the first
    /// buffer of a session either, because this pool did not allocate it.
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

    /// Simulates a read of `bytes` bytes, then cuts off everything but the last `rest` bytes.
    fn read(buffer: &mut BytesMut, bytes: usize, rest: usize) -> Bytes {
        buffer.resize(buffer.len() + bytes, 7);
        buffer.split_to(buffer.len() - rest).freeze()
    }

    #[test]
    fn a_buffer_is_reused_when_no_chunk_refers_to_it() {
        let (mut buffers, mut buffer) = (Buffers::default(), BytesMut::new());
        let mut held = VecDeque::new();
        let mut addresses = std::collections::HashSet::new();
        for _ in 0..100 {
            buffers.make_room(&mut buffer, 1);
            assert!(buffer.capacity() >= READ_BUFFER);
            addresses.insert(buffer.as_ptr());
            held.push_back(read(&mut buffer, 5_000, 0));
            if held.len() > 5 {
                held.pop_front();
            }
        }
        assert!(addresses.len() <= 7, "{} buffers", addresses.len());
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
