//! Connections that are through with their handshake. Handshakes run beside each other and none waits for
//! another: a client that says nothing costs a place for ten seconds and holds up nobody.

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
use crate::telemetry::accept::Accepting;
use crate::telemetry::shutdown::Shutdown;

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Handshakes at once; while there are so many, further clients wait in the kernel's queue.
const MAX_HANDSHAKES: usize = 256;
/// Connections at once, those in their handshake among them.
const MAX_CONNECTIONS: usize = 4_096;
/// How long a client may take to close a connection that was shut down.
const LINGER: Duration = Duration::from_secs(2);

/// A connection on which TLS is spoken.
#[derive(Debug)]
pub struct Connection {
    stream: TlsStream<TcpStream>,
    info: TcpConnectInfo,
    /// The end of [`LINGER`], once all has been written and shut down.
    lingering: Option<Pin<Box<Sleep>>>,
    /// Its place among [`MAX_CONNECTIONS`].
    _place: OwnedSemaphorePermit,
}

/// Listens on every address, IPv4 ones included; port 0 is any that is free.
pub async fn listen(port: u16) -> io::Result<TcpListener> {
    match TcpListener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))).await {
        Ok(listener) => Ok(listener),
        // A machine without IPv6 has no such address.
        Err(_) => TcpListener::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).await,
    }
}

/// Accepts from `listener` until draining begins, in a task of its own; what comes out has ended its
/// handshake. A handshake that fails is its client's matter and ends nothing.
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
        let mut accepting = Accepting::default();
        loop {
            // Nobody closes them.
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
    // Frames are written whole: there is nothing to wait for. An error means that the client is gone.
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
    // An error means that nobody serves any more.
    let _ = ready.send(Ok(Connection { stream, info, lingering: None, _place: place })).await;
}

impl Connection {
    /// The certificates that the client has shown, if the server asks for them. It has their key; nothing else is known.
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

    /// Waits for the client to close, too. A socket that is closed while bytes of the client are unread is reset, and the
    /// kernel then drops what it has not sent yet: the client would lose the end of its answer.
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
                // It has closed, or is gone.
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}
