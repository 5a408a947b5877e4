//! A client that takes the frames of a metadata stream as they come, undecoded: HTTP/2 and nothing
//! above it. What a relay such as the snapshot-metadata sidecar can do. The bytes are kept and decoded
//! afterwards, outside of the timing.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use csi_loopback::proto::csi::v1 as csi;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tonic::codegen::{Bytes, http};

/// What came.
#[derive(Debug, Default)]
pub struct Taken {
    pub whole: Duration,
    pub frames: Vec<Bytes>,
}

/// The call of a CSI driver.
pub const DELTA: &str = "/csi.v1.SnapshotMetadata/GetMetadataDelta";

/// Windows of a stream and of a connection, in bytes, that hold up nobody.
pub const WINDOWS: (u32, u32) = (4 << 20, 8 << 20);

/// Asks a driver for a delta and takes the answer.
pub async fn take(socket: &Path, base: &str, target: &str, max: i32) -> Result<Taken> {
    let stream = UnixStream::connect(socket).await?;
    let message = csi::GetMetadataDeltaRequest {
        base_snapshot_id: base.to_owned(),
        target_snapshot_id: target.to_owned(),
        max_results: max,
        ..Default::default()
    };
    let mut frames = Vec::new();
    let taken = take_from(stream, DELTA, &message, |frame| frames.push(frame)).await?;
    Ok(Taken { frames, ..taken })
}

/// Sends one message over a connection and gives each frame of the answer to `each`.
pub async fn take_from(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    call: &str,
    message: &impl Message,
    mut each: impl FnMut(Bytes),
) -> Result<Taken> {
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
    let (answer, mut body) = sending.send_request(request, false)?;
    body.send_data(framed(message), true)?;
    let answer = answer.await?;
    let refused = answer.headers().get("grpc-message").cloned();
    let mut answer = answer.into_body();
    while let Some(frame) = answer.data().await {
        let frame = frame?;
        answer.flow_control().release_capacity(frame.len())?;
        each(frame);
    }
    ensure!(refused.is_none(), "the call was refused: {refused:?}");
    let trailers = answer.trailers().await?.context("the stream ended without trailers")?;
    let whole = begun.elapsed();
    let status = trailers.get("grpc-status").and_then(|status| status.to_str().ok());
    ensure!(status == Some("0"), "the stream ended with status {status:?}");
    drop(sending);
    connection.abort();
    Ok(Taken { whole, frames: Vec::new() })
}

/// A message with gRPC's head of five bytes.
fn framed(message: &impl Message) -> Bytes {
    let encoded = message.encode_to_vec();
    let mut framed = vec![0];
    framed.extend((encoded.len() as u32).to_be_bytes());
    framed.extend(encoded);
    framed.into()
}

impl Taken {
    /// All bytes in one piece.
    pub fn joined(&self) -> Vec<u8> {
        self.frames.concat()
    }

    /// Checks that the bytes are messages of these extents (offset and length in bytes), at most `max`
    /// in each (0: any number), and no others. Returns the number of messages.
    pub fn check(&self, expected: impl Iterator<Item = (u64, u64)>, max: usize) -> Result<usize> {
        let joined = self.joined();
        let (mut rest, mut expected, mut messages) = (joined.as_slice(), expected, 0);
        while !rest.is_empty() {
            let (head, behind) = rest.split_at_checked(5).context("half a head")?;
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            let (body, behind) = behind.split_at_checked(length).context("half a message")?;
            ensure!(head[0] == 0, "a compressed message");
            let message = csi::GetMetadataDeltaResponse::decode(body)?;
            ensure!(max == 0 || message.block_metadata.len() <= max, "a message is too long");
            for extent in &message.block_metadata {
                let extent = (extent.byte_offset as u64, extent.size_bytes as u64);
                if expected.next() != Some(extent) {
                    bail!("the extent {extent:?} was not expected");
                }
            }
            (rest, messages) = (behind, messages + 1);
        }
        ensure!(expected.next().is_none(), "extents are missing");
        Ok(messages)
    }
}
