//! A metadata stream while it is read.

use std::time::{Duration, Instant};

use tonic::{Status, Streaming};

use super::calls::Stop;
use super::door::{End, Message, Stream, Tuple};
use grpc::proto::csi::v1 as csi;
use grpc::proto::snapshotmetadata as k8s;

/// More tuples than a stream of a test volume can have.
const MAX_TUPLES: usize = 10_000_000;

/// A response of either call, in CSI or through a sidecar.
pub trait Answer: prost::Message + Default + 'static {
    fn message(self) -> Message;
}

macro_rules! answer {
    ($($response:ty),* $(,)?) => {$(
        impl Answer for $response {
            fn message(self) -> Message {
                let tuples = self.block_metadata.iter().map(|block| Tuple {
                    offset: block.byte_offset,
                    size: block.size_bytes,
                });
                Message {
                    block_metadata_type: self.block_metadata_type,
                    capacity: self.volume_capacity_bytes,
                    tuples: tuples.collect(),
                }
            }
        }
    )*};
}

answer!(
    csi::GetMetadataAllocatedResponse,
    csi::GetMetadataDeltaResponse,
    k8s::GetMetadataAllocatedResponse,
    k8s::GetMetadataDeltaResponse,
);

/// A stream that is being read.
pub struct Reading {
    pub start: Instant,
    pub stream: Stream,
}

impl Reading {
    pub fn new() -> Self {
        let stream = Stream {
            messages: Vec::new(),
            end: End::Complete,
            first_message: Duration::ZERO,
            whole: Duration::ZERO,
        };
        Self { start: Instant::now(), stream }
    }

    pub fn push(&mut self, message: Message) {
        if self.stream.messages.is_empty() {
            self.stream.first_message = self.start.elapsed();
        }
        self.stream.messages.push(message);
    }

    pub fn end(self, end: End) -> Stream {
        let Self { start, stream } = self;
        Stream { end, whole: start.elapsed(), ..stream }
    }
}

/// Reads a response to its end.
pub async fn read<A: Answer>(
    reading: &mut Reading,
    call: impl Future<Output = Result<tonic::Response<Streaming<A>>, Status>>,
    stop: &Stop,
    patience: Duration,
) -> End {
    let timed = tokio::time::timeout(patience, call);
    let mut stream = tokio::select! {
        response = timed => match response {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return End::Failed(status.into()),
            Err(_) => return End::Endless(patience),
        },
        () = stop.wait() => return End::Stopped,
    };
    let (mut until, mut count) = (Instant::now() + patience, 0);
    loop {
        let next = tokio::time::timeout_at(until.into(), stream.message());
        let message = tokio::select! {
            message = next => message,
            () = stop.wait() => return End::Stopped,
        };
        let message = match message {
            Ok(Ok(Some(message))) => message.message(),
            Ok(Ok(None)) => return End::Complete,
            Ok(Err(status)) => return End::Failed(status.into()),
            Err(_) => return End::Endless(patience),
        };
        count += message.tuples.len();
        if !message.tuples.is_empty() {
            until = Instant::now() + patience;
        } else if reading.stream.messages.len() > 1 {
            // A message without tuples is legal, but it may be one of an endless number.
            reading.stream.messages.pop_if(|last| *last == message);
        }
        reading.push(message);
        if count > MAX_TUPLES {
            return End::Endless(patience);
        }
    }
}
