//! The proxy as a process between a scripted driver and a client that exposes everything it
//! receives.

use std::fs;
use std::os::unix::net::UnixStream as Socket;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use h2::client::{ResponseFuture, SendRequest};
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request, Response};
use tempfile::TempDir;
use tokio::net::{UnixListener, UnixSocket, UnixStream};
use tokio::runtime::Runtime;
use tokio::task::{JoinHandle, JoinSet};

use support::cluster::programs::Process;
use support::driver::{PATIENCE, binary};
pub use support::requests::framed;
use support::{have_root, path};

/// A call that the proxy only forwards, and one that it decodes.
pub const OTHER: &str = "/vendor.v9.Thing/Do";
pub const PUBLISH: &str = "/csi.v1.Node/NodePublishVolume";

/// Kubeconfig of an API server that does not exist.
const AWAY: &str = r#"{
    "apiVersion": "v1", "kind": "Config", "current-context": "away",
    "clusters": [{"name": "away", "cluster": {"server": "https://127.0.0.1:1"}}],
    "contexts": [{"name": "away", "context": {"cluster": "away", "user": "user"}}],
    "users": [{"name": "user", "user": {}}]
}"#;

/// Runs a test with a proxy whose driver is not started yet.
pub fn with_proxy(run: impl FnOnce(&mut Rig)) {
    if have_root() {
        run(&mut Rig::new());
    }
}

pub struct Rig {
    pub proxy: Process,
    runtime: Runtime,
    directory: TempDir,
}

impl Rig {
    fn new() -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        fs::write(directory.path().join("kubeconfig"), AWAY).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let proxy = start(directory.path());
        Self { proxy, runtime, directory }
    }

    /// Starts another proxy after one has ended.
    pub fn start_again(&mut self) {
        self.proxy = start(self.directory.path());
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("proxy.sock")
    }

    /// A driver that responds to each call with `answer`, until it is dropped.
    pub fn driver<F>(&self, answer: impl Fn(Call) -> F + Clone + Send + 'static) -> Scripted
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let _inside = self.runtime.enter();
        let listener = UnixListener::bind(self.driver_socket()).unwrap();
        self.driver_on(listener, answer)
    }

    /// A driver that records each request, and then responds.
    pub fn recording_driver(
        &self,
        answer: impl Fn(SendResponse<Bytes>) + Clone + Send + 'static,
    ) -> (Scripted, AllSeen) {
        let seen = AllSeen::default();
        let noted = Arc::clone(&seen);
        let driver = self.driver(move |call| {
            let (noted, answer) = (Arc::clone(&noted), answer.clone());
            async move {
                let (one, respond) = call.take().await;
                noted.lock().unwrap().push(one);
                answer(respond);
            }
        });
        (driver, seen)
    }

    /// The same on an existing socket.
    pub fn driver_on<F>(
        &self,
        listener: UnixListener,
        answer: impl Fn(Call) -> F + Clone + Send + 'static,
    ) -> Scripted
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let _inside = self.runtime.enter();
        Scripted::start(&self.driver_socket(), listener, answer)
    }

    pub fn driver_socket(&self) -> PathBuf {
        self.directory.path().join("csi.sock")
    }

    /// The driver's socket with a queue for this number of callers, not served yet.
    pub fn short_queue(&self, callers: u32) -> UnixListener {
        let _inside = self.runtime.enter();
        let socket = UnixSocket::new_stream().unwrap();
        socket.bind(self.driver_socket()).unwrap();
        socket.listen(callers).unwrap()
    }

    /// Runs a future, which must complete in time.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let in_time = async { tokio::time::timeout(PATIENCE, future).await };
        self.runtime.block_on(in_time).expect("the test ran out of patience")
    }

    pub fn client(&self) -> Client {
        self.block_on(Client::connect(&self.socket()))
    }

    /// Resident memory of the proxy in bytes.
    pub fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.proxy.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}

fn start(directory: &Path) -> Process {
    let socket = directory.join("proxy.sock");
    let mut command = Command::new(binary());
    command.env_remove("CSI_ENDPOINT").env_remove("NODE_NAME");
    command.args(["--mode", "node-proxy", "--node-name", "node", "--drain-timeout", "2s"]);
    for (flag, name) in [
        ("--endpoint", "proxy.sock"),
        ("--driver-endpoint", "csi.sock"),
        ("--kubeconfig", "kubeconfig"),
        ("--state-dir", "state"),
    ] {
        command.args([flag, path(&directory.join(name))]);
    }
    let mut process = Process::spawn("node-proxy", command, directory);
    process.wait_for("the proxy serves", |_| Socket::connect(&socket).ok());
    process
}

/// A call as received by the driver.
pub struct Call {
    pub request: Request<RecvStream>,
    pub respond: SendResponse<Bytes>,
}

/// The recorded parts of a call.
#[derive(Debug, Clone)]
pub struct Seen {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

pub type AllSeen = Arc<Mutex<Vec<Seen>>>;

impl Call {
    /// Reads the whole request.
    pub async fn take(self) -> (Seen, SendResponse<Bytes>) {
        let (parts, body) = self.request.into_parts();
        let path = parts.uri.path().to_owned();
        let body = read(body).await.unwrap_or_default().0;
        (Seen { path, headers: parts.headers, body }, self.respond)
    }

    /// Responds with OK and an empty message.
    pub async fn ok(self) {
        let (_, respond) = self.take().await;
        answer(respond, &[b""], &[("grpc-status", "0")]);
    }
}

/// A complete response: messages and trailers.
pub fn answer(
    mut respond: SendResponse<Bytes>,
    messages: &[&[u8]],
    trailers: &[(&'static str, &str)],
) {
    let Ok(mut stream) = respond.send_response(head(&[]), false) else { return };
    for message in messages {
        let _ = stream.send_data(framed(message), false);
    }
    let _ = stream.send_trailers(headers(trailers));
}

pub fn head(more: &[(&'static str, &str)]) -> Response<()> {
    let mut response = Response::new(());
    *response.headers_mut() = headers(more);
    response.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
    response
}

pub fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(*name, value.parse().unwrap());
    }
    headers
}

/// Reads data and trailers to the end.
pub async fn read(mut body: RecvStream) -> Result<(Bytes, HeaderMap), h2::Error> {
    let mut all = BytesMut::new();
    while let Some(piece) = body.data().await {
        let piece = piece?;
        let _ = body.flow_control().release_capacity(piece.len());
        all.extend_from_slice(&piece);
    }
    Ok((all.freeze(), body.trailers().await?.unwrap_or_default()))
}

pub struct Scripted {
    socket: PathBuf,
    task: JoinHandle<()>,
}

impl Scripted {
    fn start<F>(
        socket: &Path,
        listener: UnixListener,
        answer: impl Fn(Call) -> F + Clone + Send + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let task = tokio::spawn(async move {
            // Everything ends with this task.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let answer = answer.clone();
                connections.spawn(async move {
                    let mut calls = JoinSet::new();
                    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
                    while let Some(Ok((request, respond))) = connection.accept().await {
                        calls.spawn(answer(Call { request, respond }));
                    }
                    // If it broke during a send, its calls see that only when the connection ends.
                    drop(connection);
                    while calls.join_next().await.is_some() {}
                });
            }
        });
        Self { socket: socket.to_owned(), task }
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.task.abort();
        let _ = fs::remove_file(&self.socket);
    }
}

/// One connection to the proxy.
pub struct Client {
    send: SendRequest<Bytes>,
    connection: JoinHandle<()>,
}

/// The response.
#[derive(Debug)]
pub struct Answer {
    pub head: HeaderMap,
    pub body: Bytes,
    pub trailers: HeaderMap,
}

impl Answer {
    /// The status, from headers or trailers.
    pub fn code(&self) -> Option<&str> {
        let code = self.trailers.get("grpc-status").or_else(|| self.head.get("grpc-status"));
        code.and_then(|code| code.to_str().ok())
    }

    pub fn status_message(&self) -> &str {
        let words = self.trailers.get("grpc-message").or_else(|| self.head.get("grpc-message"));
        words.and_then(|words| words.to_str().ok()).unwrap_or_default()
    }
}

impl Client {
    pub async fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).await.unwrap();
        let (send, connection) = h2::client::handshake(stream).await.unwrap();
        let connection = tokio::spawn(async move { drop(connection.await) });
        Self { send, connection }
    }

    /// Starts a call; its request can then be sent.
    pub async fn open(
        &self,
        path: &str,
        more: &[(&'static str, &str)],
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let mut request = Request::post(format!("http://localhost{path}")).body(()).unwrap();
        *request.headers_mut() = headers(more);
        request.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
        request.headers_mut().insert("te", "trailers".parse().unwrap());
        let mut send = self.send.clone().ready().await.unwrap();
        send.send_request(request, false).unwrap()
    }

    /// Makes a call with these request bytes and reads the whole response.
    pub async fn call(
        &self,
        path: &str,
        more: &[(&'static str, &str)],
        bytes: impl Into<Bytes>,
    ) -> Result<Answer, h2::Error> {
        let (answer, mut body) = self.open(path, more).await;
        // The response may have ended the stream already.
        let _ = body.send_data(bytes.into(), true);
        take(answer).await
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// Reads a response to its end.
pub async fn take(answer: ResponseFuture) -> Result<Answer, h2::Error> {
    let (parts, body) = answer.await?.into_parts();
    let (body, trailers) = read(body).await?;
    Ok(Answer { head: parts.headers, body, trailers })
}
