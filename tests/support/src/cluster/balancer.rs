//! A replacement of a Service without kube-proxy: forwards each connection to the next reachable
//! port of several.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use super::Cluster;
use super::programs::free_port;

/// Dropping it closes all connections.
pub struct Balancer {
    pub port: u16,
    acceptor: JoinHandle<()>,
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

impl Cluster {
    /// A balancer for these ports.
    pub fn balancer(&self, targets: &[u16]) -> Balancer {
        let port = free_port();
        let listener = self.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, port))).unwrap();
        let acceptor = self.runtime.spawn(accept(listener, targets.into()));
        Balancer { port, acceptor }
    }
}

async fn accept(listener: TcpListener, targets: Arc<[u16]>) {
    let next = Arc::<AtomicUsize>::default();
    let mut served = JoinSet::new();
    while let Ok((mut near, _)) = listener.accept().await {
        let (targets, next) = (targets.clone(), next.clone());
        served.spawn(async move {
            for _ in 0..targets.len() {
                let target = targets[next.fetch_add(1, Ordering::SeqCst) % targets.len()];
                if let Ok(mut far) = TcpStream::connect((Ipv4Addr::LOCALHOST, target)).await {
                    let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                    return;
                }
            }
        });
    }
}
