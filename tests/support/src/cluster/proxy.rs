//! A TCP proxy for the API server: it forwards connections with their TLS, counts them, and can
//! refuse, hang or freeze them.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use super::Cluster;
use super::access::Account;
use super::programs::free_port;

/// What the proxy does with connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Open,
    /// Closes existing connections and refuses new ones.
    Refused,
    /// Keeps existing connections and accepts new ones, but forwards no data.
    Hanging,
}

/// A proxy, open at first. Dropping it closes all connections.
pub struct Proxy {
    port: u16,
    way: watch::Sender<Way>,
    /// The number of freezes so far.
    frozen: watch::Sender<usize>,
    /// The state that the acceptor has reached.
    reached: watch::Receiver<Way>,
    connections: Arc<AtomicUsize>,
    acceptor: JoinHandle<()>,
}

impl Proxy {
    /// `https://127.0.0.1:PORT`
    pub fn server(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Number of accepted connections.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// From now on, existing connections forward nothing and never end; new ones work. So it is
    /// after a firewall or load balancer has lost its state.
    pub fn freeze(&self) {
        self.frozen.send_modify(|count| *count += 1);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

impl Cluster {
    /// A new proxy for the API server.
    pub fn proxy(&self) -> Proxy {
        let server = self.server();
        let target: SocketAddr = server.trim_start_matches("https://").parse().unwrap();
        let port = free_port();
        let (way, wanted) = watch::channel(Way::Open);
        let (reach, reached) = watch::channel(Way::Refused);
        let (frozen, freezes) = watch::channel(0);
        let connections = Arc::<AtomicUsize>::default();
        let count = Arc::clone(&connections);
        let acceptor = self.runtime.spawn(accept(port, target, (wanted, freezes), reach, count));
        let proxy = Proxy { port, way, frozen, reached, connections, acceptor };
        self.turn(&proxy, Way::Open);
        proxy
    }

    /// Changes the state, and waits until the proxy has reached it.
    pub fn turn(&self, proxy: &Proxy, way: Way) {
        proxy.way.send_replace(way);
        let mut reached = proxy.reached.clone();
        self.block_on(reached.wait_for(|reached| *reached == way)).unwrap();
    }

    /// A kubeconfig that uses the proxy.
    pub fn kubeconfig_through(&self, proxy: &Proxy, account: &Account) -> PathBuf {
        self.kubeconfig_at(&proxy.server(), account)
    }
}

/// Accepts connections in the state of `wanted`, and reports the state in `reach`.
async fn accept(
    port: u16,
    target: SocketAddr,
    (mut wanted, freezes): (watch::Receiver<Way>, watch::Receiver<usize>),
    reach: watch::Sender<Way>,
    connections: Arc<AtomicUsize>,
) {
    loop {
        let way = *wanted.borrow_and_update();
        if way == Way::Refused {
            reach.send_replace(way);
            if wanted.changed().await.is_err() {
                return;
            }
            continue;
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        // Closed in the state Refused.
        let mut served = JoinSet::new();
        while *wanted.borrow_and_update() != Way::Refused {
            reach.send_replace(*wanted.borrow());
            tokio::select! {
                accepted = listener.accept() => {
                    let (near, _) = accepted.unwrap();
                    connections.fetch_add(1, Ordering::SeqCst);
                    served.spawn(forward(near, target, (wanted.clone(), freezes.clone())));
                }
                changed = wanted.changed() => if changed.is_err() { return },
            }
        }
        drop(listener);
        served.shutdown().await;
    }
}

async fn forward(
    near: TcpStream,
    target: SocketAddr,
    (mut wanted, freezes): (watch::Receiver<Way>, watch::Receiver<usize>),
) {
    let since = *freezes.borrow();
    let gate = Gate { way: wanted.clone(), freezes, since };
    if wanted.wait_for(|way| *way == Way::Open).await.is_err() {
        return;
    }
    let Ok(far) = TcpStream::connect(target).await else { return };
    let (near, far) = (near.into_split(), far.into_split());
    tokio::join!(pump(near.0, far.1, gate.clone()), pump(far.0, near.1, gate));
}

/// Whether a connection forwards data.
#[derive(Clone)]
struct Gate {
    way: watch::Receiver<Way>,
    freezes: watch::Receiver<usize>,
    /// The freezes before the connection.
    since: usize,
}

impl Gate {
    /// Waits until data may pass. Returns false if the proxy has ended.
    async fn pass(&mut self) -> bool {
        if *self.freezes.borrow() != self.since {
            std::future::pending::<()>().await;
        }
        self.way.wait_for(|way| *way == Way::Open).await.is_ok()
    }
}

async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut gate: Gate) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        if !gate.pass().await || to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
    // A frozen path delivers no end either.
    if gate.pass().await {
        let _ = to.shutdown().await;
    }
}
