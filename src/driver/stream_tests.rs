use prost::Message;
use tokio_stream::StreamExt;
use tonic::Code;

use super::*;
use grpc::call::Calls;
use grpc::proto::csi::v1::{
    BlockMetadata, BlockMetadataType, GetMetadataAllocatedRequest, GetMetadataAllocatedResponse,
};
use storage::{Error, Result as Checked};
use telemetry::metrics::Metrics;
use telemetry::shutdown::Phase;

fn call() -> Call {
    let calls = Calls::new(Metrics::new(Vec::new()));
    calls.begin("GetMetadataAllocated", &GetMetadataAllocatedRequest::default())
}

fn extents(count: u64) -> impl Iterator<Item = Checked<Extent>> + Send + 'static {
    (0..count).map(|block| Ok(Extent { offset: block * 8192, length: 4096 }))
}

/// The sizes of the messages, and the status if the stream ends with an error.
async fn sizes(
    extents: impl Iterator<Item = Checked<Extent>> + Send + 'static,
    per_message: usize,
) -> (Vec<usize>, Option<Status>) {
    let (_running, shutdown) = Shutdown::manual();
    let limits = Limits { deadline: None, shutdown };
    collect(start(batcher(extents, per_message), limits, call())).await
}

fn batcher<I: Iterator<Item = Checked<Extent>>>(extents: I, per_message: usize) -> Batcher<I> {
    Batcher::new(
        extents,
        Preamble::new(BlockMetadataType::VariableLength.into(), 1 << 30),
        per_message,
    )
}

fn size(message: RawMessage) -> usize {
    let message = GetMetadataAllocatedResponse::decode(message.0).unwrap();
    assert_eq!(message.volume_capacity_bytes, 1 << 30);
    message.block_metadata.len()
}

async fn collect(mut stream: Messages) -> (Vec<usize>, Option<Status>) {
    let mut sizes = Vec::new();
    while let Some(message) = stream.next().await {
        match message {
            Ok(message) => sizes.push(size(message)),
            Err(status) => return (sizes, Some(status)),
        }
    }
    (sizes, None)
}

#[test]
fn the_first_message_is_sent_alone_and_others_in_batches() {
    let mut batcher = batcher(extents(1 << 20), 256);
    // Independent of how long this thread is not scheduled.
    batcher.batch_time = Duration::MAX;
    let first = batcher.next_batch();
    assert_eq!((first.messages.len(), first.extents), (1, 256));
    let next = batcher.next_batch();
    assert!(next.messages.len() > 1 && next.extents == next.messages.len() * 256);
    let bytes: usize = next.messages.iter().map(|message| message.0.len()).sum();
    assert!(bytes < BATCH_BYTES + (256 << 5), "{bytes} bytes at once");
}

#[test]
fn slow_extents_do_not_delay_each_other() {
    let slow = extents(1000).inspect(|_| std::thread::sleep(BATCH_TIME));
    let mut batcher = batcher(slow, 1);
    batcher.next_batch();
    assert_eq!(batcher.next_batch().extents, 1);
}

#[tokio::test]
async fn a_failure_during_a_stream_is_an_error() {
    let failing = extents(4).chain([Err(Error::Damaged("record".into()))]);
    let (sizes, error) = sizes(failing, 2).await;
    assert_eq!(sizes, [2, 2]);
    assert_eq!(error.unwrap().code(), Code::DataLoss);
}

#[tokio::test]
async fn a_panic_during_a_stream_is_an_error() {
    let panicking = extents(4).chain(std::iter::from_fn(|| panic!("on purpose")));
    let (sizes, error) = sizes(panicking, 2).await;
    assert_eq!(sizes, [2]);
    assert_eq!(error.unwrap().code(), Code::Internal);
}

#[tokio::test]
async fn a_shutdown_during_a_stream_is_an_error() {
    let (phase, shutdown) = Shutdown::manual();
    let limits = Limits { deadline: None, shutdown };
    let slow = extents(1000).inspect(|_| std::thread::sleep(Duration::from_millis(5)));
    let stream = start(batcher(slow, 1), limits, call());
    phase.send_replace(Phase::Draining);
    tokio::time::sleep(Duration::from_millis(30)).await;
    phase.send_replace(Phase::Ending);
    assert_eq!(collect(stream).await.1.unwrap().code(), Code::Unavailable);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_complete_stream_is_already_counted() {
    let metrics = Metrics::new(Vec::new());
    let calls = Calls::new(metrics.clone());
    // If it were counted after the last message, one of these rounds would fail.
    for number in 1..=2000 {
        let (_running, shutdown) = Shutdown::manual();
        let call = calls.begin("GetMetadataAllocated", &GetMetadataAllocatedRequest::default());
        let limits = Limits { deadline: None, shutdown };
        assert_eq!(collect(start(batcher(extents(3), 3), limits, call)).await.0, [3]);
        let counted = metrics.scrape().unwrap();
        for line in [
            format!("count{{method=\"GetMetadataAllocated\",code=\"OK\"}} {number}\n"),
            format!("streamed_extents_total {}\n", 3 * number),
        ] {
            assert!(counted.contains(&line), "{line}{counted}");
        }
    }
}

#[tokio::test]
async fn a_lost_producer_is_an_error() {
    let (sender, receiver) = mpsc::channel(1);
    let message = batcher(extents(1), 3).next_batch().messages.remove(0);
    sender.send(Batch { messages: vec![message], extents: 1, end: None }).await.unwrap();
    drop(sender);
    let (sizes, error) = collect(Messages::new(receiver)).await;
    assert_eq!(sizes, [1]);
    assert_eq!(error.unwrap().code(), Code::Unavailable);
}

#[test]
fn a_full_message_is_below_the_default_client_limit() {
    let largest = BlockMetadata { byte_offset: 64 << 40, size_bytes: 64 << 40 };
    let message = GetMetadataAllocatedResponse {
        block_metadata_type: 2,
        volume_capacity_bytes: 64 << 40,
        block_metadata: vec![largest; extents_per_message(usize::MAX)],
    };
    assert!(message.encoded_len() < 4 << 20);
    assert_eq!((extents_per_message(0), extents_per_message(5)), (DEFAULT_EXTENTS, 5));
}
