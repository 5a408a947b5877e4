//! Accepts connections of a listening socket. If the process or machine cannot accept another
//! connection (EMFILE, ENFILE, ENOBUFS, ENOMEM), accept(2) fails immediately and repeatedly:
//! attempts then back off, and few failures are logged.

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::{Instant, sleep};

/// The first pause and the longest one; each is twice as long as the previous one.
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(1);
/// Interval between log lines.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// A source of connections.
pub trait Listener {
    type Connection;

    fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<Self::Connection>>;
}

impl Listener for UnixListener {
    type Connection = UnixStream;

    fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<UnixStream>> {
        Self::poll_accept(self, context).map_ok(|(stream, _)| stream)
    }
}

impl Listener for TcpListener {
    type Connection = TcpStream;

    fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<TcpStream>> {
        Self::poll_accept(self, context).map_ok(|(stream, _)| stream)
    }
}

/// Accepts the connections of one listener, with a backoff after failures.
#[derive(Debug, Default)]
pub struct BackoffAcceptor {
    pause: Option<Duration>,
    failures: u64,
    logged: Option<Instant>,
}

impl BackoffAcceptor {
    /// Returns the next connection. Cancel safe.
    pub async fn next<L: Listener>(&mut self, listener: &L) -> L::Connection {
        loop {
            match poll_fn(|context| listener.poll_accept(context)).await {
                Ok(connection) => {
                    self.succeeded();
                    return connection;
                }
                Err(error) if concerns_one_connection(&error) => {
                    tracing::debug!(%error, "a client disconnected before it was accepted");
                }
                Err(error) => self.failed(&error).await,
            }
        }
    }

    async fn failed(&mut self, error: &io::Error) {
        self.failures += 1;
        if self.logged.is_none_or(|logged| logged.elapsed() >= LOG_EVERY) {
            self.logged = Some(Instant::now());
            let failures = self.failures;
            tracing::warn!(%error, failures, "failed to accept connections; retrying");
        }
        let pause = self.pause.map_or(FIRST, |pause| LONGEST.min(pause * 2));
        self.pause = Some(pause);
        sleep(pause).await;
    }

    fn succeeded(&mut self) {
        if self.pause.take().is_some() {
            tracing::debug!(failures = self.failures, "accepting connections again");
        }
    }
}

/// Whether accept(2) reports an error of the new connection and not of the listener.
fn concerns_one_connection(error: &io::Error) -> bool {
    let connection_errors = [
        libc::ENETDOWN,
        libc::EPROTO,
        libc::ENOPROTOOPT,
        libc::EHOSTDOWN,
        libc::ENONET,
        libc::EHOSTUNREACH,
        libc::EOPNOTSUPP,
        libc::ENETUNREACH,
        libc::ECONNABORTED,
        libc::EPERM,
        libc::EINTR,
    ];
    error.raw_os_error().is_some_and(|code| connection_errors.contains(&code))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::time::timeout;

    use super::*;

    /// Fails `remaining` times with this error, then returns a connection.
    struct Failing {
        error: i32,
        remaining: Cell<usize>,
        attempts: Cell<usize>,
    }

    impl Failing {
        fn new(error: i32, times: usize) -> Self {
            Self { error, remaining: Cell::new(times), attempts: Cell::new(0) }
        }
    }

    impl Listener for Failing {
        type Connection = ();

        fn poll_accept(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.attempts.set(self.attempts.get() + 1);
            let Some(remaining) = self.remaining.get().checked_sub(1) else {
                return Poll::Ready(Ok(()));
            };
            self.remaining.set(remaining);
            Poll::Ready(Err(io::Error::from_raw_os_error(self.error)))
        }
    }

    #[tokio::test]
    async fn accept_backs_off_while_descriptors_are_exhausted() {
        let mut acceptor = BackoffAcceptor::default();
        for error in [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM] {
            let full = Failing::new(error, usize::MAX);
            assert!(timeout(Duration::from_millis(500), acceptor.next(&full)).await.is_err());
            assert!(full.attempts.get() <= 4, "{} attempts", full.attempts.get());
            acceptor.next(&Failing::new(error, 1)).await;
            acceptor.next(&Failing::new(error, 0)).await;
            assert_eq!(acceptor.pause, None);
        }
    }

    #[tokio::test]
    async fn a_disconnected_client_causes_no_backoff() {
        let gone = Failing::new(libc::ECONNABORTED, 1000);
        BackoffAcceptor::default().next(&gone).await;
        assert_eq!(gone.attempts.get(), 1001);
    }
}
