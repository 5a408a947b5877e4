//! A driver with protocol violations that our driver never has. It implements gRPC on HTTP/2
//! directly, so that it can omit parts that a library always sends.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use csi::plugin_capability::service::Type as Service;
use csi_loopback::proto::csi::v1 as csi;
use h2::server::SendResponse;
use http::{HeaderMap, Request, Response};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;
use tonic::Code;

use crate::requests::framed;

/// The response to a metadata call.
#[derive(Debug, Clone)]
pub enum Script {
    /// One message, then this status.
    Ends(Code, String),
    /// One message, and an end without a status.
    EndsWithoutStatus,
    /// No message, and OK in the headers, like servers in Go.
    Nothing,
    /// One message with this number of bytes.
    Large(usize),
    /// One message with these bytes.
    Bytes(Vec<u8>),
}

/// Returns messages, or a code and a message, for a method and a request. None: the default
/// response.
pub type Answers =
    Arc<dyn Fn(&str, Bytes) -> Option<Result<Vec<Vec<u8>>, (Code, String)>> + Send + Sync>;

pub type Seen = Arc<Mutex<Vec<Bytes>>>;

pub struct Fake {
    /// Empty if it listens on TCP.
    pub socket: PathBuf,
    /// Where it listens, as CSI writes it.
    pub endpoint: String,
    /// Encoded metadata requests of CSI.
    pub seen: Seen,
    /// Encoded requests of the session API, which it does not implement.
    pub seen_sessions: Seen,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fake {
    /// Must be called in a tokio runtime.
    pub fn start(directory: &Path, name: &str, capable: bool, script: Script) -> Self {
        let socket = directory.join(format!("{name}.sock"));
        Self::at(socket, name, capable, script, Arc::new(|_, _| None))
    }

    /// A driver with these responses. Must be called in a tokio runtime.
    pub fn answering(directory: &Path, name: &str, capable: bool, answers: Answers) -> Self {
        Self::answering_at(directory.join(format!("{name}.sock")), name, capable, answers)
    }

    /// The same at this socket.
    pub fn answering_at(socket: PathBuf, name: &str, capable: bool, answers: Answers) -> Self {
        Self::at(socket, name, capable, Script::Nothing, answers)
    }

    /// The same on a port of 127.0.0.1.
    pub async fn answering_at_tcp(name: &str, capable: bool, answers: Answers) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        let listener = Listener::Tcp(listener);
        Self::on(listener, PathBuf::new(), endpoint, name, capable, Script::Nothing, answers)
    }

    fn at(socket: PathBuf, name: &str, capable: bool, script: Script, answers: Answers) -> Self {
        // A stopped driver leaves its socket.
        let _ = std::fs::remove_file(&socket);
        let listener = Listener::Unix(UnixListener::bind(&socket).unwrap());
        let endpoint = format!("unix://{}", socket.display());
        Self::on(listener, socket, endpoint, name, capable, script, answers)
    }

    fn on(
        listener: Listener,
        socket: PathBuf,
        endpoint: String,
        name: &str,
        capable: bool,
        script: Script,
        answers: Answers,
    ) -> Self {
        let (seen, seen_sessions) = (Seen::default(), Seen::default());
        let (name, noted) = (name.to_owned(), (seen.clone(), seen_sessions.clone()));
        let task = tokio::spawn(async move {
            // Dropping the set closes the connections.
            let mut connections = JoinSet::new();
            while let Ok(stream) = listener.accept().await {
                let (name, script, noted) = (name.clone(), script.clone(), noted.clone());
                let answers = answers.clone();
                connections.spawn(async move {
                    // A client that only checks the socket sends nothing.
                    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
                    while let Some(Ok((request, respond))) = connection.accept().await {
                        let (name, script, noted) = (name.clone(), script.clone(), noted.clone());
                        let answers = answers.clone();
                        tokio::spawn(async move {
                            answer(request, respond, name, capable, script, noted, answers).await;
                        });
                    }
                });
            }
        });
        Self { socket, endpoint, seen, seen_sessions, task }
    }
}

trait Connected: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connected for T {}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    async fn accept(&self) -> std::io::Result<Box<dyn Connected>> {
        Ok(match self {
            Self::Unix(listener) => Box::new(listener.accept().await?.0),
            Self::Tcp(listener) => Box::new(listener.accept().await?.0),
        })
    }
}

async fn answer(
    request: Request<h2::RecvStream>,
    respond: SendResponse<Bytes>,
    name: String,
    capable: bool,
    script: Script,
    (seen, seen_sessions): (Seen, Seen),
    answers: Answers,
) {
    let path = request.uri().path().to_owned();
    let mut body = BytesMut::new();
    let mut incoming = request.into_body();
    while let Some(Ok(chunk)) = incoming.data().await {
        let _ = incoming.flow_control().release_capacity(chunk.len());
        body.extend_from_slice(&chunk);
    }
    let message = Bytes::copy_from_slice(body.get(5..).unwrap_or_default());
    let method = path.rsplit('/').next().unwrap_or_default().to_owned();
    // Some responses block.
    let given = tokio::task::spawn_blocking(move || answers(&method, message)).await;
    if let Some(answer) = given.unwrap() {
        let (messages, code, words) = match answer {
            Ok(messages) => (messages, Code::Ok, String::new()),
            Err((code, words)) => (Vec::new(), code, words),
        };
        send_all(respond, messages, code, &words);
        return;
    }
    let capability =
        csi::plugin_capability::Service { r#type: Service::SnapshotMetadataService.into() };
    let capability =
        csi::PluginCapability { r#type: Some(csi::plugin_capability::Type::Service(capability)) };
    let ok = Script::Ends(Code::Ok, String::new());
    match path.rsplit('/').next().unwrap_or_default() {
        "Probe" => send(respond, csi::ProbeResponse { ready: Some(true) }.encode_to_vec(), ok),
        "GetPluginInfo" => {
            let info = csi::GetPluginInfoResponse { name, ..Default::default() };
            send(respond, info.encode_to_vec(), ok);
        }
        "GetPluginCapabilities" => {
            let capabilities = if capable { vec![capability] } else { Vec::new() };
            let all = csi::GetPluginCapabilitiesResponse { capabilities };
            send(respond, all.encode_to_vec(), ok);
        }
        "ControllerGetCapabilities" => unimplemented(respond),
        "GetAllocated" | "GetDelta" => {
            seen_sessions.lock().unwrap().push(body.split_off(5).freeze());
            unimplemented(respond);
        }
        _ => {
            seen.lock().unwrap().push(body.split_off(5).freeze());
            let message = csi::GetMetadataAllocatedResponse {
                block_metadata_type: 2,
                volume_capacity_bytes: 1 << 30,
                block_metadata: vec![csi::BlockMetadata { byte_offset: 0, size_bytes: 4096 }],
            };
            match script {
                Script::Large(bytes) => send(respond, vec![0; bytes], ok),
                Script::Bytes(bytes) => send(respond, bytes, ok),
                script => send(respond, message.encode_to_vec(), script),
            }
        }
    }
}

/// UNIMPLEMENTED in the headers, like servers without the method.
fn unimplemented(mut respond: SendResponse<Bytes>) {
    let head = Response::builder().header("content-type", "application/grpc");
    let head = head.header("grpc-status", (Code::Unimplemented as i32).to_string());
    respond.send_response(head.body(()).unwrap(), true).unwrap();
}

fn send(mut respond: SendResponse<Bytes>, message: Vec<u8>, script: Script) {
    let head = Response::builder().header("content-type", "application/grpc");
    if matches!(script, Script::Nothing) {
        let head = head.header("grpc-status", "0").body(()).unwrap();
        respond.send_response(head, true).unwrap();
        return;
    }
    let Script::Ends(code, words) = script else {
        let mut stream = respond.send_response(head.body(()).unwrap(), false).unwrap();
        stream.send_data(framed(&message), true).unwrap();
        return;
    };
    send_all(respond, vec![message], code, &words);
}

fn send_all(mut respond: SendResponse<Bytes>, messages: Vec<Vec<u8>>, code: Code, words: &str) {
    let head = Response::builder().header("content-type", "application/grpc");
    // The client may have disconnected.
    let Ok(mut stream) = respond.send_response(head.body(()).unwrap(), false) else { return };
    for message in messages {
        if stream.send_data(framed(&message), false).is_err() {
            return;
        }
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", (code as i32).to_string().parse().unwrap());
    if !words.is_empty() {
        trailers.insert("grpc-message", words.parse().unwrap());
    }
    let _ = stream.send_trailers(trailers);
}
