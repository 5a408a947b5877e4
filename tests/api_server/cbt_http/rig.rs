//! A driver, a sidecar that serves only pages, and a caller's account for one test, with the shared
//! API server.

use std::path::PathBuf;

use axum::body::Body;
use csi_loopback::backend::PoolKind;
use csi_loopback::kubernetes::cbt_http::{PATH, Page, PageRequest, Problem, audience};
use http::{Method, Request};

use support::cluster::Cluster;
use support::cluster::access::Account;
use support::cluster::cbt_http::{Reply, caller_rules, cbt_http_rules, page_request, send};
use support::cluster::fake_driver::{Answers, Fake};
use support::cluster::programs::{Served, free_port};
use support::cluster::sidecar::{http_at, spawn};
use support::cluster::tls::{Authority, Certificate};
use support::driver::{Driver, block};
use support::{BLOCK, MIB, pattern, write_direct};

/// Size of the volume in bytes.
pub const SIZE: u64 = 64 * MIB;

/// A sidecar and the port of its cbt-http.
pub struct Replica {
    pub served: Served,
    pub port: u16,
}

impl Replica {
    pub fn leads(&self) -> bool {
        page_of(self, "/cbt-http/leader").starts_with("HTTP/1.1 200")
    }

    pub fn is_well(&self) -> bool {
        page_of(self, "/health").starts_with("HTTP/1.1 200")
    }
}

/// The content of its HTTP endpoint, once it is reachable.
pub fn page_of(replica: &Replica, page: &str) -> String {
    http_at(replica.served.http_port, page).unwrap_or_default()
}

/// Everything except the driver, which listens on a given socket.
pub struct Desk<'a> {
    pub cluster: &'a Cluster,
    pub driver_name: String,
    pub namespace: String,
    pub own: Account,
    pub caller: Account,
    pub authority: Authority,
    pub certificate: Certificate,
    socket: PathBuf,
    /// Address of the API server for the sidecar.
    server: String,
}

impl<'a> Desk<'a> {
    pub fn new(cluster: &'a Cluster, driver_name: &str, socket: PathBuf) -> Self {
        Self::at(cluster, driver_name, socket, cluster.server())
    }

    pub fn at(cluster: &'a Cluster, driver_name: &str, socket: PathBuf, server: String) -> Self {
        let namespace = cluster.namespace("driver");
        let own = cluster.account(&namespace, "sidecar");
        cluster.grant(&own, &cbt_http_rules());
        let caller = cluster.account(&namespace, "aggregated-api");
        cluster.grant(&caller, &caller_rules());
        let authority = Authority::new("cbt-http authority");
        let directory = cluster.scratch().join(cluster.unique("certificates"));
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("ca.crt"), authority.pem()).unwrap();
        let certificate = authority.certify(&directory, "tls");
        let driver_name = driver_name.to_owned();
        Self {
            cluster,
            driver_name,
            namespace,
            own,
            caller,
            authority,
            certificate,
            socket,
            server,
        }
    }

    /// Starts a sidecar without waiting for it.
    pub fn spawn(&self, flags: &[&str]) -> Replica {
        let port = free_port();
        let kubeconfig = self.cluster.kubeconfig_at(&self.server, &self.own);
        let (port_text, address) = (port.to_string(), format!("localhost:{port}"));
        let mut all = vec!["--cbt-http", "--metadata-api=false", "--cbt-http-port", &port_text];
        all.extend(["--namespace", &self.namespace, "--log-level", "trace"]);
        if !flags.contains(&"--cbt-http-service-address") {
            all.extend(["--cbt-http-service-address", &address]);
        }
        all.extend(flags);
        let served = spawn(self.cluster, &self.socket, &kubeconfig, &self.certificate, &all);
        Replica { served, port }
    }

    /// Starts a sidecar and waits until it leads.
    pub fn start(&self, flags: &[&str]) -> Replica {
        let replica = self.spawn(flags);
        self.cluster.wait_for("the replica leads", || replica.leads().then_some(()));
        replica
    }

    /// The caller's token for this driver.
    pub fn token(&self) -> String {
        self.cluster.token(&self.caller, Some(&audience(&self.driver_name)))
    }

    /// Sends any request.
    pub fn send(
        &self,
        replica: &Replica,
        (method, path): (Method, &str),
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> Reply {
        let url = format!("https://localhost{path}");
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(body.into()).unwrap();
        let authority = self.authority.pem();
        let sent = send(replica.port, &authority, "localhost", request);
        let sent = self.cluster.block_on(sent);
        sent.unwrap_or_else(|error| panic!("{error}\n{}", replica.served.process.log()))
    }

    /// Requests a page with this token.
    pub fn post(&self, replica: &Replica, token: &str, request: &PageRequest) -> Reply {
        let body = serde_json::to_vec(request).unwrap();
        let bearer = format!("Bearer {token}");
        self.send(replica, (Method::POST, PATH), &[("authorization", &bearer)], body)
    }

    pub fn ask(&self, replica: &Replica, request: &PageRequest) -> Reply {
        self.post(replica, &self.token(), request)
    }

    pub fn page_request(&self, base: &str, target: &str, offset: u64, limit: u32) -> PageRequest {
        page_request(&self.driver_name, base, target, offset, limit)
    }

    #[track_caller]
    pub fn page(&self, replica: &Replica, request: &PageRequest) -> Page {
        self.ask(replica, request).page()
    }

    #[track_caller]
    pub fn problem(&self, replica: &Replica, request: &PageRequest) -> Problem {
        self.ask(replica, request).problem()
    }

    /// All pages from `offset` together: (block, bytes).
    #[track_caller]
    pub fn all(
        &self,
        replica: &Replica,
        (base, target): (&str, &str),
        offset: u64,
        limit: u32,
    ) -> Vec<(u64, u64)> {
        let (mut all, mut offset, token) = (Vec::new(), offset, self.token());
        loop {
            let page =
                self.post(replica, &token, &self.page_request(base, target, offset, limit)).page();
            assert!(page.changed_blocks.len() <= limit as usize);
            all.extend(page.changed_blocks.iter().map(|one| (one.offset, one.block_size_bytes)));
            match page.next {
                Some(next) => {
                    assert!(
                        all.last().is_some_and(|(last, _)| *last < next),
                        "{next} is no way on"
                    );
                    offset = next;
                }
                None => return all,
            }
        }
    }

    /// The value of the metric's line with this prefix.
    pub fn metric(&self, replica: &Replica, line: &str) -> f64 {
        let page = page_of(replica, "/metrics");
        let found = page.lines().find_map(|one| one.strip_prefix(line));
        found.and_then(|value| value.trim().parse().ok()).unwrap_or_default()
    }
}

/// This project's driver with a raw volume of [`SIZE`], and a leading sidecar.
pub struct Rig<'a> {
    // Dropped in this order.
    pub replica: Replica,
    pub desk: Desk<'a>,
    pub driver: Driver,
    pub volume: String,
}

impl<'a> Rig<'a> {
    /// With these flags of the driver.
    pub fn new(cluster: &'a Cluster, flags: &[&str]) -> Self {
        Self::with(cluster, flags, &[])
    }

    pub fn with(cluster: &'a Cluster, flags: &[&str], sidecar: &[&str]) -> Self {
        let name = format!("{}.csi.local", cluster.unique("pages"));
        let driver = Driver::with(PoolKind::Image, &[&["--driver-name", &name], flags].concat());
        let volume = driver.volume("data", SIZE, block());
        let desk = Desk::new(cluster, &name, driver.socket());
        let replica = desk.start(sidecar);
        Self { replica, desk, driver, volume }
    }

    /// Writes these blocks and takes a snapshot.
    pub fn snapshot(&self, name: &str, blocks: impl IntoIterator<Item = u64>) -> String {
        self.driver.with_device(&self.volume, |device| {
            for block in blocks {
                let seed = block + name.len() as u64;
                write_direct(device, block * BLOCK, &pattern(seed, BLOCK as usize));
            }
        });
        self.driver.snapshot(name, &self.volume)
    }

    /// Two snapshots with runs of blocks and single blocks between them.
    pub fn sample(&self) -> (String, String) {
        let first = self.snapshot("first", [1, 2, 9, 14, 15, 16, 17, 300, 16383]);
        let changed = [0, 2, 3, 4, 40].into_iter().chain(60..69).chain([2000]);
        (first, self.snapshot("second", changed))
    }
}

/// A fake driver and a leading sidecar.
pub struct Stage<'a> {
    // Dropped in this order.
    pub replica: Replica,
    pub desk: Desk<'a>,
    _driver: Fake,
}

impl<'a> Stage<'a> {
    pub fn new(cluster: &'a Cluster, capable: bool, answers: Answers, flags: &[&str]) -> Self {
        let name = format!("{}.csi.local", cluster.unique("fake"));
        let directory = cluster.scratch();
        let driver =
            cluster.block_on(async { Fake::answering(directory, &name, capable, answers) });
        let desk = Desk::new(cluster, &name, driver.socket.clone());
        let replica = desk.start(flags);
        Self { replica, desk, _driver: driver }
    }
}
