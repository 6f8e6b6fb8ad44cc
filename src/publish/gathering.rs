//! Gathers what is written to a connection, so that many requests leave in one system call.
//!
//! HTTP/2 is written frame by frame, each with a flush of its own, and a request of one message is
//! two frames. Where every event has a key of its own these calls were a fifth of the relay's CPU.
//! Here a flush only asks for the connection's task to be run again, behind those that are ready
//! now and have requests of their own; when it runs it reads first, and what was gathered is sent.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// So much is sent without waiting for a flush: four frames of the usual largest size.
const MOST_GATHERED: usize = 64 << 10;

/// A connection whose writes are gathered.
#[derive(Debug)]
pub(super) struct Gathering<T> {
    io: T,
    gathered: Vec<u8>,
    /// Bytes of `gathered` that the connection has taken.
    sent: usize,
    /// Whether the task will run again for what is gathered.
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
    /// Sends all that is gathered.
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

    /// Makes room for so many bytes more; says whether they are to be gathered. What would fill
    /// the room alone is not: by then all before it is sent.
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
        // What the connection does not take now it takes when it tells the task that it can: no
        // flush has to ask for that.
        self.is_due = sent.is_pending();
        match (Pin::new(&mut self.io).poll_read(cx, into), sent) {
            // Answers that came before the connection broke are still there to be read.
            (Poll::Pending, Poll::Ready(Err(e))) => Poll::Ready(Err(e)),
            (read, _) => read,
        }
    }
}

#[cfg(test)]
mod tests;
