//! Connections with a completed TLS handshake. Every connection is accepted at once. If there are
//! too many, the client with the most loses one ([`FairLimit`]), so that clients that connect and
//! stay silent exclude no other client.

use std::io::{self, IoSlice};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;

use super::ClientChain;
use telemetry::accept::BackoffAcceptor;
use telemetry::fair_limit::{FairLimit, Labels, Share};
use telemetry::peer::Peer;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Timeout of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent handshakes.
const MAX_HANDSHAKES: usize = 256;
/// Maximum number of connections, including those in their handshake.
const MAX_CONNECTIONS: usize = 2_048;
/// Time for a client to close a connection that was shut down.
const LINGER: Duration = Duration::from_secs(2);

/// A TLS connection.
#[derive(Debug)]
pub struct Connection {
    stream: TlsStream<TcpStream>,
    peer: Peer,
    /// The end of [`LINGER`], once all data was written and the write side shut down.
    lingering: Option<Pin<Box<Sleep>>>,
    /// Counts against [`MAX_CONNECTIONS`].
    share: Arc<Share<Peer>>,
}

/// Listens on all addresses, including IPv4; port 0 is any free port.
pub async fn listen(port: u16) -> io::Result<TcpListener> {
    match TcpListener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))).await {
        Ok(listener) => Ok(listener),
        // A machine without IPv6 does not have the address.
        Err(_) => TcpListener::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).await,
    }
}

/// Accepts from `listener` in a background task until draining begins. The stream yields
/// connections after their handshake. A failed handshake affects only its client. `name` is the
/// listener's name in metrics.
pub fn incoming(
    listener: TcpListener,
    name: &'static str,
    config: Arc<ServerConfig>,
    shutdown: Shutdown,
) -> impl Stream<Item = io::Result<Connection>> + Send + Unpin + use<> {
    let (ready, connections) = mpsc::channel(1);
    let of = |share| Labels { listener: name, share };
    let acceptor = Acceptor {
        listener,
        tls: config.into(),
        handshakes: FairLimit::new(of("handshake"), MAX_HANDSHAKES),
        connections: FairLimit::new(of("connection"), MAX_CONNECTIONS),
        ready,
    };
    task::spawn(async move {
        let gone = acceptor.ready.clone();
        tokio::select! {
            () = acceptor.accept_all() => {}
            () = shutdown.draining() => {}
            () = gone.closed() => {}
        }
    });
    ReceiverStream::new(connections)
}

struct Acceptor {
    listener: TcpListener,
    tls: TlsAcceptor,
    handshakes: FairLimit<Peer>,
    connections: FairLimit<Peer>,
    ready: mpsc::Sender<io::Result<Connection>>,
}

impl Acceptor {
    async fn accept_all(&self) {
        let mut accepting = BackoffAcceptor::default();
        loop {
            let stream = accepting.next(&self.listener).await;
            let peer = stream.peer_addr().map_or_else(|_| Peer::unknown(), Peer::of);
            let share = Arc::new(self.connections.take(peer, 1));
            let turn = self.handshakes.take(peer, 1);
            let new = NewConnection { stream, peer, share };
            task::spawn(hand_over(self.tls.clone(), new, turn, self.ready.clone()));
        }
    }
}

/// A connection before its handshake.
struct NewConnection {
    stream: TcpStream,
    peer: Peer,
    share: Arc<Share<Peer>>,
}

async fn hand_over(
    tls: TlsAcceptor,
    new: NewConnection,
    turn: Share<Peer>,
    ready: mpsc::Sender<io::Result<Connection>>,
) {
    let NewConnection { stream, peer, share } = new;
    // Frames are written whole, so delays have no use. An error means that the client has
    // disconnected.
    let _ = stream.set_nodelay(true);
    let stream = tokio::select! {
        () = ready.closed() => return,
        () = turn.revoked() => return tracing::debug!(?peer, "closed an unfinished handshake for another client"),
        () = share.revoked() => return tracing::debug!(?peer, "closed a connection for another client"),
        done = timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)) => match done {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return tracing::debug!(?peer, %error, "the handshake failed"),
            Err(_) => return tracing::debug!(?peer, "the handshake took too long"),
        },
    };
    drop(turn);
    // An error means that the server has stopped.
    let _ = ready.send(Ok(Connection { stream, peer, lingering: None, share })).await;
}

impl Connection {
    /// The certificates that the client presented, if the server requests them. The client has the
    /// key; nothing else is verified.
    pub fn client_chain(&self) -> ClientChain {
        ClientChain::of(self.stream.get_ref().1.peer_certificates())
    }

    /// The client.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// The connection's place among all connections. When it is revoked, close the connection.
    pub fn share(&self) -> Arc<Share<Peer>> {
        self.share.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    /// Waits for the client to close, too. A socket that is closed with unread bytes of the client
    /// is reset, and the kernel then drops unsent data: the client would lose the end of the
    /// response.
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.lingering.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(context))?;
        }
        let deadline = this.lingering.get_or_insert_with(|| Box::pin(sleep(LINGER)));
        if deadline.as_mut().poll(context).is_ready() {
            return Poll::Ready(Ok(()));
        }
        let mut unread = [0; 4096];
        loop {
            let mut unread = ReadBuf::new(&mut unread);
            let read = Pin::new(this.stream.get_mut().0).poll_read(context, &mut unread);
            match ready!(read) {
                Ok(()) if !unread.filled().is_empty() => {}
                // The client has closed the connection or disconnected.
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}
