//! Connections of a listening socket, as they come. Where the process or the machine has no room for another one (EMFILE, ENFILE,
//! ENOBUFS, ENOMEM), accept(2) fails at once, and again at once: attempts are then made with pauses, and few of them are
//! logged.

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::{Instant, sleep};

/// The first pause; each one is twice as long as the one before, up to the longest.
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(1);
/// Time between two log lines.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// What connections come from.
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

/// Accepts the connections of one listener.
#[derive(Debug, Default)]
pub struct Accepting {
    pause: Option<Duration>,
    failures: u64,
    logged: Option<Instant>,
}

impl Accepting {
    /// The next connection. Nothing is lost when this is dropped before it has one.
    pub async fn next<L: Listener>(&mut self, listener: &L) -> L::Connection {
        loop {
            match poll_fn(|context| listener.poll_accept(context)).await {
                Ok(connection) => {
                    self.succeeded();
                    return connection;
                }
                Err(error) if is_of_one_client(&error) => {
                    tracing::debug!(%error, "a client went before it was accepted");
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
            tracing::warn!(%error, failures, "cannot accept connections; trying again");
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

/// What accept(2) reports of the connection that it would have returned.
fn is_of_one_client(error: &io::Error) -> bool {
    let of_the_network = [
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
    error.raw_os_error().is_some_and(|code| of_the_network.contains(&code))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::time::timeout;

    use super::*;

    /// Fails so often with this error, and then has a connection.
    struct Failing {
        error: i32,
        left: Cell<usize>,
        attempts: Cell<usize>,
    }

    impl Failing {
        fn new(error: i32, times: usize) -> Self {
            Self { error, left: Cell::new(times), attempts: Cell::new(0) }
        }
    }

    impl Listener for Failing {
        type Connection = ();

        fn poll_accept(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.attempts.set(self.attempts.get() + 1);
            let Some(left) = self.left.get().checked_sub(1) else { return Poll::Ready(Ok(())) };
            self.left.set(left);
            Poll::Ready(Err(io::Error::from_raw_os_error(self.error)))
        }
    }

    #[tokio::test]
    async fn without_room_few_attempts_are_made_until_there_is_room_again() {
        let mut accepting = Accepting::default();
        for error in [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM] {
            let full = Failing::new(error, usize::MAX);
            assert!(timeout(Duration::from_millis(500), accepting.next(&full)).await.is_err());
            assert!(full.attempts.get() <= 4, "{} attempts", full.attempts.get());
            accepting.next(&Failing::new(error, 1)).await;
            accepting.next(&Failing::new(error, 0)).await;
            assert_eq!(accepting.pause, None);
        }
    }

    #[tokio::test]
    async fn a_client_that_has_gone_makes_nobody_wait() {
        let gone = Failing::new(libc::ECONNABORTED, 1000);
        Accepting::default().next(&gone).await;
        assert_eq!(gone.attempts.get(), 1001);
    }
}
