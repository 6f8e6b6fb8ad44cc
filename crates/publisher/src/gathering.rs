//! Buffers writes to a connection, so that many requests leave in one system call.
//!
//! `h2` writes frame by frame and flushes after each frame, and a request with one message is two frames. In
//! a measurement where every event had its own key, these system calls took a fifth of the relay's CPU time.
//! So a flush here sends nothing. It only schedules the connection's task again, behind the tasks that are
//! ready now and may add requests. When the connection's task runs again, `h2` begins by reading from the
//! connection. Our `poll_read` sends the buffered data before it reads.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum number of buffered bytes: four frames of the usual maximum size. More data is sent
/// without waiting for a flush.
const MOST_GATHERED: usize = 64 << 10;

/// A connection whose writes are buffered.
#[derive(Debug)]
pub(super) struct Gathering<T> {
    io: T,
    gathered: Vec<u8>,
    /// Number of bytes of `gathered` that the connection has already accepted.
    sent: usize,
    /// Whether the connection's task is already scheduled to send the buffered data.
    is_due: bool,
}

impl<T> Gathering<T> {
    pub(super) fn new(io: T) -> Self {
        Self {
            io,
            gathered: Vec::new(),
            sent: 0,
            is_due: false,
        }
    }
}

impl<T: AsyncWrite + Unpin> Gathering<T> {
    /// Sends all buffered data.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.sent < self.gathered.len() {
            let rest = &self.gathered[self.sent..];
            match ready!(Pin::new(&mut self.io).poll_write(cx, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                taken => self.sent += taken,
            }
        }
        self.gathered.clear();
        self.sent = 0;
        Poll::Ready(Ok(()))
    }

    /// Makes room for `bytes` more bytes. Returns whether they should be buffered: writes larger
    /// than the buffer bypass it, after the buffered data has been sent.
    fn poll_room(&mut self, cx: &mut Context<'_>, bytes: usize) -> Poll<io::Result<bool>> {
        if self.gathered.len() + bytes > MOST_GATHERED {
            ready!(self.poll_send(cx))?;
        }
        Poll::Ready(Ok(bytes <= MOST_GATHERED))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Gathering<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if !ready!(self.poll_room(cx, bytes.len()))? {
            return Pin::new(&mut self.io).poll_write(cx, bytes);
        }
        self.gathered.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let bytes = parts.iter().map(|part| part.len()).sum();
        if !ready!(self.poll_room(cx, bytes))? {
            return Pin::new(&mut self.io).poll_write_vectored(cx, parts);
        }
        for part in parts {
            self.gathered.extend_from_slice(part);
        }
        Poll::Ready(Ok(bytes))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.gathered.is_empty() && !self.is_due {
            self.is_due = true;
            cx.waker().wake_by_ref();
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(cx))?;
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Gathering<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let sent = self.poll_send(cx);
        // If the connection cannot accept all data now, the connection wakes the task once it can accept more. So
        // the task counts as scheduled, and the next flush need not wake it.
        self.is_due = sent.is_pending();
        match (Pin::new(&mut self.io).poll_read(cx, into), sent) {
            // Report a failed write only when nothing is left to read, because answers may have arrived before
            // the connection broke.
            (Poll::Pending, Poll::Ready(Err(e))) => Poll::Ready(Err(e)),
            (read, _) => read,
        }
    }
}

#[cfg(test)]
mod tests;
