//! A driver without the session API: a proxy to the real driver that returns UNIMPLEMENTED for
//! these calls, like a gRPC server without the service.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{Request, Response};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;
use tonic::Code;

pub struct Older {
    pub socket: PathBuf,
    /// Calls of the session API that it received.
    pub unimplemented: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Drop for Older {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Older {
    /// Must be called inside a runtime.
    pub fn start(directory: &Path, driver: &Path) -> Self {
        let socket = directory.join("older.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let unimplemented = Arc::<AtomicUsize>::default();
        let (driver, count) = (driver.to_owned(), unimplemented.clone());
        let task = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                // A driver that exits closes its connections.
                let Ok(far) = UnixStream::connect(&driver).await else { continue };
                tokio::spawn(connection(near, far, count.clone()));
            }
        });
        Self { socket, unimplemented, task }
    }
}

async fn connection(near: UnixStream, far: UnixStream, count: Arc<AtomicUsize>) {
    let (driver, link) = h2::client::handshake(far).await.unwrap();
    let mut link = tokio::spawn(link);
    let mut near = h2::server::handshake(near).await.unwrap();
    loop {
        let accepted = tokio::select! {
            accepted = near.accept() => accepted,
            _ = &mut link => return,
        };
        let Some(Ok((request, mut respond))) = accepted else { break };
        if request.uri().path().starts_with("/snapshotsession.") {
            count.fetch_add(1, Ordering::SeqCst);
            let head = Response::builder()
                .header("content-type", "application/grpc")
                .header("grpc-status", (Code::Unimplemented as i32).to_string());
            respond.send_response(head.body(()).unwrap(), true).unwrap();
            continue;
        }
        tokio::spawn(pass_on(request, respond, driver.clone()));
    }
    link.abort();
}

async fn pass_on(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    driver: SendRequest<Bytes>,
) -> Option<()> {
    let (head, body) = request.into_parts();
    let mut driver = driver.ready().await.ok()?;
    let (answer, upward) = driver.send_request(Request::from_parts(head, ()), false).ok()?;
    pump(body, upward).await?;
    let (head, body) = answer.await.ok()?.into_parts();
    if body.is_end_stream() {
        respond.send_response(Response::from_parts(head, ()), true).ok()?;
        return Some(());
    }
    let downward = respond.send_response(Response::from_parts(head, ()), false).ok()?;
    pump(body, downward).await
}

async fn pump(mut from: RecvStream, mut to: SendStream<Bytes>) -> Option<()> {
    while let Some(chunk) = from.data().await {
        let chunk = chunk.ok()?;
        from.flow_control().release_capacity(chunk.len()).ok()?;
        to.send_data(chunk, false).ok()?;
    }
    match from.trailers().await.ok()? {
        Some(trailers) => to.send_trailers(trailers).ok(),
        None => to.send_data(Bytes::new(), true).ok(),
    }
}
