//! Tests the buffering against a scripted connection.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};

use proptest::prelude::*;

use super::*;

/// A connection that follows a script, call by call. When the script has ended, the connection
/// accepts everything and has nothing to read.
#[derive(Debug, Default)]
struct Scripted {
    /// Number of bytes that the connection accepts from each write; 0 means that it is not ready.
    /// The last entry is used first.
    takes: Vec<usize>,
    to_read: Vec<u8>,
    is_broken: bool,
    got: Vec<u8>,
    writes: usize,
    is_shut: bool,
}

impl AsyncWrite for Scripted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_broken {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let takes = self.takes.pop().unwrap_or(usize::MAX).min(bytes.len());
        if takes == 0 {
            return Poll::Pending;
        }
        self.writes += 1;
        self.got.extend_from_slice(&bytes[..takes]);
        Poll::Ready(Ok(takes))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_shut = true;
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Scripted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.to_read.is_empty() {
            return Poll::Pending;
        }
        into.put_slice(&std::mem::take(&mut self.to_read));
        Poll::Ready(Ok(()))
    }
}

/// Counts how often the task is woken.
#[derive(Debug, Default)]
struct Asked(AtomicUsize);

impl Wake for Asked {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct Task {
    connection: Gathering<Scripted>,
    asked: Arc<Asked>,
}

impl Task {
    fn new(scripted: Scripted) -> Self {
        Self {
            connection: Gathering::new(scripted),
            asked: Arc::default(),
        }
    }

    fn poll<R>(
        &mut self,
        poll: impl FnOnce(Pin<&mut Gathering<Scripted>>, &mut Context<'_>) -> R,
    ) -> R {
        let waker = Waker::from(self.asked.clone());
        poll(
            Pin::new(&mut self.connection),
            &mut Context::from_waker(&waker),
        )
    }

    fn write(&mut self, bytes: &[u8]) -> Poll<usize> {
        self.poll(|io, cx| io.poll_write(cx, bytes))
            .map(Result::unwrap)
    }

    fn flush(&mut self) {
        let flushed = self.poll(Gathering::poll_flush);
        assert!(matches!(flushed, Poll::Ready(Ok(()))));
    }

    /// Reads the available bytes.
    fn read(&mut self) -> Poll<io::Result<Vec<u8>>> {
        let mut into = [0; 64];
        let mut into = ReadBuf::new(&mut into);
        let read = self.poll(|io, cx| io.poll_read(cx, &mut into));
        read.map_ok(|()| into.filled().to_vec())
    }

    fn asked(&self) -> usize {
        self.asked.0.load(Ordering::Relaxed)
    }

    fn got(&self) -> &[u8] {
        &self.connection.io.got
    }
}

#[test]
fn writes_of_several_requests_leave_together_when_the_task_runs_again() {
    let mut task = Task::new(Scripted::default());
    for part in [b"headers", b"message"] {
        assert_eq!(task.write(part), Poll::Ready(7));
        task.flush();
    }
    let parts = [IoSlice::new(b"more "), IoSlice::new(b"headers")];
    let written = task.poll(|io, cx| io.poll_write_vectored(cx, &parts));
    assert!(matches!(written, Poll::Ready(Ok(12))));
    task.flush();
    assert_eq!((task.asked(), task.got()), (1, &b""[..]));
    assert!(task.read().is_pending());
    assert_eq!(task.got(), b"headersmessagemore headers");
    assert_eq!(task.connection.io.writes, 1);
    task.flush();
    assert_eq!(task.asked(), 1, "nothing is buffered");
}

#[test]
fn a_connection_that_accepts_nothing_does_not_keep_its_task_running() {
    let mut task = Task::new(Scripted {
        takes: vec![0],
        ..Scripted::default()
    });
    assert_eq!(task.write(b"request"), Poll::Ready(7));
    task.flush();
    assert!(task.read().is_pending());
    task.flush();
    assert_eq!(task.asked(), 1);
    assert!(task.read().is_pending());
    assert_eq!(task.got(), b"request");
    assert_eq!(task.write(b"another"), Poll::Ready(7));
    task.flush();
    assert_eq!(task.asked(), 2);
}

#[test]
fn a_large_write_is_not_buffered_and_stays_behind_earlier_ones() {
    let large = vec![1; MOST_GATHERED + 1];
    let mut task = Task::new(Scripted::default());
    assert_eq!(task.write(&[0]), Poll::Ready(1));
    assert_eq!(task.write(&large), Poll::Ready(large.len()));
    assert_eq!(task.got()[..2], [0, 1]);
    assert_eq!(task.got().len(), 1 + large.len());
}

#[test]
fn the_buffer_never_exceeds_its_limit() {
    let mut task = Task::new(Scripted {
        takes: vec![0; 2],
        ..Scripted::default()
    });
    let half = vec![0; MOST_GATHERED / 2];
    assert_eq!(task.write(&half), Poll::Ready(half.len()));
    assert_eq!(task.write(&half), Poll::Ready(half.len()));
    assert!(task.write(&half).is_pending());
    assert!(task.write(&half).is_pending());
    assert_eq!(task.write(&half), Poll::Ready(half.len()));
}

#[test]
fn answers_that_arrived_before_a_connection_broke_are_read() {
    let mut task = Task::new(Scripted {
        to_read: b"answer".to_vec(),
        is_broken: true,
        ..Scripted::default()
    });
    assert_eq!(task.write(b"request"), Poll::Ready(7));
    let Poll::Ready(Ok(read)) = task.read() else {
        panic!("nothing is read");
    };
    assert_eq!(read, b"answer");
    assert!(matches!(task.read(), Poll::Ready(Err(_))));
}

#[test]
fn a_connection_shuts_down_after_everything_is_sent() {
    let mut task = Task::new(Scripted {
        takes: vec![0, 3],
        ..Scripted::default()
    });
    assert_eq!(task.write(b"goaway"), Poll::Ready(6));
    assert!(task.poll(Gathering::poll_shutdown).is_pending());
    assert!(!task.connection.io.is_shut);
    assert!(task.poll(Gathering::poll_shutdown).is_ready());
    assert!(task.connection.io.is_shut);
    assert_eq!(task.got(), b"goaway");
}

proptest! {
    #[test]
    fn the_bytes_leave_in_order_however_much_each_write_accepts(
        takes in prop::collection::vec(0..30_000_usize, 0..40),
        writes in prop::collection::vec((0..70_000_usize, any::<bool>(), any::<bool>()), 1..20),
    ) {
        let mut task = Task::new(Scripted { takes, ..Scripted::default() });
        let mut sent: Vec<u8> = Vec::new();
        for (bytes, flushes, runs) in writes {
            let start = sent.len();
            sent.extend((start..start + bytes).map(|n| (n % 251) as u8));
            let mut at = start;
            while at < sent.len() {
                if let Poll::Ready(taken) = task.write(&sent[at..]) {
                    at += taken;
                }
            }
            if flushes {
                task.flush();
            }
            if runs {
                prop_assert!(task.read().is_pending());
            }
        }
        while task.poll(Gathering::poll_shutdown).is_pending() {}
        prop_assert_eq!(task.got(), &sent[..]);
    }
}
