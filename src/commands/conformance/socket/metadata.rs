//! Metadata streams. One kind is read with tonic. The other is read as HTTP/2: tonic enforces the
//! deadline of a call itself, so that it never sees what a driver does at the deadline.

use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http2;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::TokioExecutor;
use prost::Message as _;
use tonic::Code;

use super::super::door::{End, Failure, Message, Query, Stream, Window};
use super::super::reading::{Answer, Reading, read};
use super::SocketDoor;
use csi::snapshot_metadata_client::SnapshotMetadataClient;
use grpc::proto::csi::v1 as csi;

/// HTTP/2 bytes that the driver may send before the client reads. A stream with more waits.
const WINDOW: u32 = 2048;
/// How long after the deadline the client reads.
const LATE: Duration = Duration::from_millis(250);
/// Time limit of reading after the deadline.
const READING: Duration = Duration::from_secs(10);

impl SocketDoor {
    fn allocated_request(
        &self,
        snapshot: &str,
        window: Window,
    ) -> csi::GetMetadataAllocatedRequest {
        csi::GetMetadataAllocatedRequest {
            snapshot_id: snapshot.to_owned(),
            starting_offset: window.starting_offset,
            max_results: window.max_results,
            secrets: self.secrets.snapshot_metadata_secret.clone(),
        }
    }

    fn delta_request(
        &self,
        base: &str,
        target: &str,
        window: Window,
    ) -> csi::GetMetadataDeltaRequest {
        csi::GetMetadataDeltaRequest {
            base_snapshot_id: base.to_owned(),
            target_snapshot_id: target.to_owned(),
            starting_offset: window.starting_offset,
            max_results: window.max_results,
            secrets: self.secrets.snapshot_metadata_secret.clone(),
        }
    }

    pub(super) fn metadata_stream(
        &self,
        query: &Query,
        window: Window,
        patience: Duration,
    ) -> Stream {
        let mut reading = Reading::new();
        if self.calls.stop.is_now() {
            return reading.end(End::Stopped);
        }
        let mut client = SnapshotMetadataClient::new(self.metadata.clone())
            .max_decoding_message_size(usize::MAX);
        let stop = &self.calls.stop;
        let end = self.calls.runtime.block_on(async {
            match query {
                Query::Allocated { snapshot } => {
                    let request = self.allocated_request(snapshot, window);
                    let call = client.get_metadata_allocated(request);
                    read(&mut reading, call, stop, patience).await
                }
                Query::Delta { base, target } => {
                    let request = self.delta_request(base, target, window);
                    let call = client.get_metadata_delta(request);
                    read(&mut reading, call, stop, patience).await
                }
            }
        });
        reading.end(end)
    }

    /// A call with a deadline that only the driver enforces. Reads nothing before it.
    pub(super) async fn raw_stream(
        &self,
        query: &Query,
        window: Window,
        deadline: Duration,
    ) -> Stream {
        let message = match query {
            Query::Allocated { snapshot } => {
                self.allocated_request(snapshot, window).encode_to_vec()
            }
            Query::Delta { base, target } => {
                self.delta_request(base, target, window).encode_to_vec()
            }
        };
        let mut reading = Reading::new();
        let work = async {
            let response = self.post(query.method(), &message, deadline).await?;
            tokio::time::sleep_until((reading.start + deadline + LATE).into()).await;
            receive(&mut reading, query, response).await
        };
        let limit = deadline + LATE + READING;
        let end = tokio::select! {
            end = tokio::time::timeout(limit, work) => match end {
                Ok(Ok(end)) => end,
                Ok(Err(problem)) => End::Failed(unsent(problem)),
                Err(_) => End::Endless(limit),
            },
            () = self.calls.stop.wait() => End::Stopped,
        };
        reading.end(end)
    }

    async fn post(
        &self,
        method: &str,
        message: &[u8],
        deadline: Duration,
    ) -> Result<Response<Incoming>, String> {
        let socket = self.endpoint.connect().await.map_err(|error| error.to_string())?;
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(u32::from(u16::MAX));
        let (mut sender, connection) =
            builder.handshake(socket).await.map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        let length = u32::try_from(message.len()).map_err(|error| error.to_string())?;
        let frame = [&[0], &length.to_be_bytes()[..], message].concat();
        let request = Request::post(format!("http://localhost/csi.v1.SnapshotMetadata/{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("grpc-timeout", format!("{}m", deadline.as_millis()))
            .body(Full::new(Bytes::from(frame)))
            .map_err(|error| error.to_string())?;
        sender.send_request(request).await.map_err(|error| error.to_string())
    }
}

/// Reads an HTTP/2 response to its end.
async fn receive(
    reading: &mut Reading,
    query: &Query,
    response: Response<Incoming>,
) -> Result<End, String> {
    let headers = response.headers().clone();
    let mut body = response.into_body();
    let (mut bytes, mut trailers) = (Vec::new(), None);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| error.to_string())?;
        match frame.into_data() {
            Ok(data) => bytes.extend_from_slice(&data),
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    for message in messages(query, &bytes)? {
        reading.push(message);
    }
    let status = trailers.as_ref().and_then(status).or_else(|| status(&headers));
    match status {
        Some(0) => Ok(End::Complete),
        Some(number) => Ok(End::Failed(Failure {
            code: Code::from_i32(number),
            message: String::new(),
            has_details: false,
            is_sent: false,
        })),
        None => Err("the stream ended without a status".to_owned()),
    }
}

fn status(headers: &HeaderMap) -> Option<i32> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

/// The messages of a body.
fn messages(query: &Query, mut bytes: &[u8]) -> Result<Vec<Message>, String> {
    let mut messages = Vec::new();
    while let [0, a, b, c, d, rest @ ..] = bytes {
        let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
        let message = rest.get(..length).ok_or("the last message is incomplete")?;
        messages.push(match query {
            Query::Allocated { .. } => decoded::<csi::GetMetadataAllocatedResponse>(message)?,
            Query::Delta { .. } => decoded::<csi::GetMetadataDeltaResponse>(message)?,
        });
        bytes = &rest[length..];
    }
    match bytes.is_empty() {
        true => Ok(messages),
        false => Err("the body is not gRPC".to_owned()),
    }
}

fn decoded<A: Answer>(bytes: &[u8]) -> Result<Message, String> {
    A::decode(bytes).map(A::message).map_err(|error| error.to_string())
}

/// A failure of the transport.
fn unsent(message: String) -> Failure {
    Failure { code: Code::Unavailable, message, has_details: false, is_sent: false }
}
