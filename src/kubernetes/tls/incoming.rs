//! Connections with a completed TLS handshake. Handshakes run concurrently: a silent client
//! occupies one place for ten seconds and blocks no other client.

use std::io::{self, IoSlice};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

use super::ClientChain;
use crate::telemetry::accept::BackoffAcceptor;
use crate::telemetry::shutdown::Shutdown;

/// Timeout of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent handshakes; further clients wait in the kernel's queue.
const MAX_HANDSHAKES: usize = 256;
/// Maximum number of connections, including those in their handshake.
const MAX_CONNECTIONS: usize = 4_096;
/// Time for a client to close a connection that was shut down.
const LINGER: Duration = Duration::from_secs(2);

/// A TLS connection.
#[derive(Debug)]
pub struct Connection {
    stream: TlsStream<TcpStream>,
    info: TcpConnectInfo,
    /// The end of [`LINGER`], once all data was written and the write side shut down.
    lingering: Option<Pin<Box<Sleep>>>,
    /// Counts against [`MAX_CONNECTIONS`].
    _place: OwnedSemaphorePermit,
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
/// connections after their handshake. A failed handshake affects only its client.
pub fn incoming(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    shutdown: Shutdown,
) -> impl Stream<Item = io::Result<Connection>> + Send + Unpin + use<> {
    let (ready, connections) = mpsc::channel(1);
    let acceptor = Acceptor {
        listener,
        tls: config.into(),
        handshakes: Arc::new(Semaphore::new(MAX_HANDSHAKES)),
        connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        ready,
    };
    tokio::spawn(async move {
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
    handshakes: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    ready: mpsc::Sender<io::Result<Connection>>,
}

impl Acceptor {
    async fn accept_all(&self) {
        let mut accepting = BackoffAcceptor::default();
        loop {
            // The semaphores are never closed.
            let Ok(place) = self.connections.clone().acquire_owned().await else { return };
            let Ok(turn) = self.handshakes.clone().acquire_owned().await else { return };
            let stream = accepting.next(&self.listener).await;
            tokio::spawn(hand_over(self.tls.clone(), stream, place, turn, self.ready.clone()));
        }
    }
}

async fn hand_over(
    tls: TlsAcceptor,
    stream: TcpStream,
    place: OwnedSemaphorePermit,
    turn: OwnedSemaphorePermit,
    ready: mpsc::Sender<io::Result<Connection>>,
) {
    let peer = stream.peer_addr().ok();
    let info = TcpConnectInfo { local_addr: stream.local_addr().ok(), remote_addr: peer };
    // Frames are written whole, so delays have no use. An error means that the client has
    // disconnected.
    let _ = stream.set_nodelay(true);
    let stream = tokio::select! {
        () = ready.closed() => return,
        done = timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)) => match done {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return tracing::debug!(?peer, %error, "the handshake failed"),
            Err(_) => return tracing::debug!(?peer, "the handshake took too long"),
        },
    };
    drop(turn);
    // An error means that the server has stopped.
    let _ = ready.send(Ok(Connection { stream, info, lingering: None, _place: place })).await;
}

impl Connection {
    /// The certificates that the client presented, if the server requests them. The client has the
    /// key; nothing else is verified.
    pub fn client_chain(&self) -> ClientChain {
        ClientChain::of(self.stream.get_ref().1.peer_certificates())
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.info.clone()
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
