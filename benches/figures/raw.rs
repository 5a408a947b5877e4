//! A client that reads the HTTP/2 frames of a metadata stream without decoding messages, like a
//! relay such as the snapshot-metadata sidecar. The bytes are kept and verified afterwards, outside
//! of the timing.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use csi_loopback::proto::csi::v1 as csi;
use prost::Message;
use support::requests::{delta, framed};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tonic::codegen::{Bytes, http};

/// A received stream.
#[derive(Debug, Default)]
pub struct Received {
    pub whole: Duration,
    pub frames: Vec<Bytes>,
}

/// The method of a CSI driver.
pub const DELTA: &str = "/csi.v1.SnapshotMetadata/GetMetadataDelta";

/// Flow-control windows of a stream and of a connection in bytes, large enough not to limit either
/// side.
pub const WINDOWS: (u32, u32) = (4 << 20, 8 << 20);

/// Gets a delta from a driver.
pub async fn get_delta(socket: &Path, base: &str, target: &str, max: i32) -> Result<Received> {
    let stream = UnixStream::connect(socket).await?;
    let message = csi::GetMetadataDeltaRequest { max_results: max, ..delta(base, target) };
    let mut frames = Vec::new();
    let received = receive(stream, DELTA, &message, |frame| frames.push(frame)).await?;
    Ok(Received { frames, ..received })
}

/// Sends one message over a connection and passes each frame of the response to `each`.
pub async fn receive(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    call: &str,
    message: &impl Message,
    mut each: impl FnMut(Bytes),
) -> Result<Received> {
    let (mut sending, connection) = h2::client::Builder::new()
        .initial_window_size(WINDOWS.0)
        .initial_connection_window_size(WINDOWS.1)
        .handshake::<_, Bytes>(stream)
        .await?;
    let connection = tokio::spawn(connection);
    let request = http::Request::post(format!("http://localhost{call}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())?;
    let begun = Instant::now();
    let (response, mut body) = sending.send_request(request, false)?;
    body.send_data(framed(&message.encode_to_vec()), true)?;
    let response = response.await?;
    let error = response.headers().get("grpc-message").cloned();
    let mut response = response.into_body();
    while let Some(frame) = response.data().await {
        let frame = frame?;
        response.flow_control().release_capacity(frame.len())?;
        each(frame);
    }
    ensure!(error.is_none(), "the call failed: {error:?}");
    let trailers = response.trailers().await?.context("the stream ended without trailers")?;
    let whole = begun.elapsed();
    let status = trailers.get("grpc-status").and_then(|status| status.to_str().ok());
    ensure!(status == Some("0"), "the stream ended with status {status:?}");
    drop(sending);
    connection.abort();
    Ok(Received { whole, frames: Vec::new() })
}

impl Received {
    /// All bytes.
    pub fn joined(&self) -> Vec<u8> {
        self.frames.concat()
    }

    /// Checks that the messages have exactly these extents (offset and length in bytes), with at
    /// most `max` per message (0: unlimited). Returns the number of messages.
    pub fn check(&self, expected: impl Iterator<Item = (u64, u64)>, max: usize) -> Result<usize> {
        let joined = self.joined();
        let (mut rest, mut expected, mut messages) = (joined.as_slice(), expected, 0);
        while !rest.is_empty() {
            let (head, after) = rest.split_at_checked(5).context("a truncated prefix")?;
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            let (body, after) = after.split_at_checked(length).context("a truncated message")?;
            ensure!(head[0] == 0, "a compressed message");
            let message = csi::GetMetadataDeltaResponse::decode(body)?;
            ensure!(
                max == 0 || message.block_metadata.len() <= max,
                "too many extents in a message"
            );
            for extent in &message.block_metadata {
                let extent = (extent.byte_offset as u64, extent.size_bytes as u64);
                if expected.next() != Some(extent) {
                    bail!("unexpected extent {extent:?}");
                }
            }
            (rest, messages) = (after, messages + 1);
        }
        ensure!(expected.next().is_none(), "extents are missing");
        Ok(messages)
    }
}
