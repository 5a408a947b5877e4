//! A way to the API server that can be cut: connections are passed on as they are (TLS reaches the API
//! server), counted, refused, or left hanging.

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

/// What becomes of connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Open,
    /// Those that are there end, new ones are refused.
    Refused,
    /// Those that are there stay and nothing moves on them; new ones are accepted, and that is all.
    Hanging,
}

/// A way that is open at first and ends when it is dropped.
pub struct Proxy {
    port: u16,
    way: watch::Sender<Way>,
    /// What the acceptor has come to.
    reached: watch::Receiver<Way>,
    connections: Arc<AtomicUsize>,
    open: Arc<AtomicUsize>,
    acceptor: JoinHandle<()>,
}

impl Proxy {
    /// `https://127.0.0.1:PORT`
    pub fn server(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Connections made so far, refused ones not counted.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Connections that are there now.
    pub fn open_connections(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

impl Cluster {
    /// A new way to the API server.
    pub fn proxy(&self) -> Proxy {
        let server = self.server();
        let target: SocketAddr = server.trim_start_matches("https://").parse().unwrap();
        let port = free_port();
        let (way, told) = watch::channel(Way::Open);
        let (reach, reached) = watch::channel(Way::Refused);
        let (connections, open) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let counts = (Arc::clone(&connections), Arc::clone(&open));
        let acceptor = self.runtime.spawn(accept(port, target, told, reach, counts));
        let proxy = Proxy { port, way, reached, connections, open, acceptor };
        self.turn(&proxy, Way::Open);
        proxy
    }

    /// Opens or cuts it; it is so when this returns.
    pub fn turn(&self, proxy: &Proxy, way: Way) {
        proxy.way.send_replace(way);
        let mut reached = proxy.reached.clone();
        self.block_on(reached.wait_for(|reached| *reached == way)).unwrap();
    }

    /// A kubeconfig that leads through it.
    pub fn kubeconfig_through(&self, proxy: &Proxy, account: &Account) -> PathBuf {
        self.kubeconfig_at(&proxy.server(), account)
    }
}

/// Takes connections in as `told` says, and says by `reach` what it has done.
async fn accept(
    port: u16,
    target: SocketAddr,
    mut told: watch::Receiver<Way>,
    reach: watch::Sender<Way>,
    (connections, open): (Arc<AtomicUsize>, Arc<AtomicUsize>),
) {
    loop {
        let way = *told.borrow_and_update();
        if way == Way::Refused {
            reach.send_replace(way);
            if told.changed().await.is_err() {
                return;
            }
            continue;
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        // Ends with all that is in it when the way is cut.
        let mut served = JoinSet::new();
        while *told.borrow_and_update() != Way::Refused {
            reach.send_replace(*told.borrow());
            tokio::select! {
                taken = listener.accept() => {
                    let (near, _) = taken.unwrap();
                    connections.fetch_add(1, Ordering::SeqCst);
                    let one = Open::new(&open);
                    let told = told.clone();
                    served.spawn(async move { pass_on(near, target, told).await; drop(one) });
                }
                changed = told.changed() => if changed.is_err() { return },
            }
        }
        drop(listener);
        served.shutdown().await;
    }
}

/// Counts a connection for as long as it is there.
struct Open(Arc<AtomicUsize>);

impl Open {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn pass_on(near: TcpStream, target: SocketAddr, mut told: watch::Receiver<Way>) {
    if told.wait_for(|way| *way == Way::Open).await.is_err() {
        return;
    }
    let Ok(far) = TcpStream::connect(target).await else { return };
    let (near, far) = (near.into_split(), far.into_split());
    tokio::join!(pump(near.0, far.1, told.clone()), pump(far.0, near.1, told));
}

async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut told: watch::Receiver<Way>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        if told.wait_for(|way| *way == Way::Open).await.is_err()
            || to.write_all(&buffer[..count]).await.is_err()
        {
            return;
        }
    }
    let _ = to.shutdown().await;
}
