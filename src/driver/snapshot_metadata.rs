//! CSI SnapshotMetadata: which ranges of a snapshot hold data, and which changed since another. A
//! stream holds no lock: it reads finished records and runs while volumes are in use.

use tonic::{Request, Response, Status};

use super::call::{Call, Describe, Subject};
use super::fault::Stream;
use super::frame::Head;
use super::stream::{Batches, Limits, Messages, extents_per_message, start};
use super::{Plugin, request, status};
use crate::backend::{Backend, BlockMap, Error, Extents, Result as Checked, Style};
use crate::grpc::deadline;
use crate::proto::csi::v1 as csi;
use csi::snapshot_metadata_server::SnapshotMetadata;

#[tonic::async_trait]
impl SnapshotMetadata for Plugin {
    type GetMetadataAllocatedStream = Messages;
    type GetMetadataDeltaStream = Messages;

    async fn get_metadata_allocated(
        &self,
        request: Request<csi::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Messages>, Status> {
        self.metadata("GetMetadataAllocated", request, allocated, number).await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<csi::GetMetadataDeltaRequest>,
    ) -> Result<Response<Messages>, Status> {
        self.metadata("GetMetadataDelta", request, delta, number).await
    }
}

/// A block map and where in it to start.
pub(super) struct Asked {
    pub map: BlockMap,
    pub window: Window,
}

impl Plugin {
    /// Opens the map that `open` finds and starts to stream it; `number` is what the API has for a style. What is
    /// wrong with the request is the status of the call, with no message before it.
    pub(super) async fn metadata<Q>(
        &self,
        method: &'static str,
        request: Request<Q>,
        open: fn(&Backend, &Q) -> Checked<Asked>,
        number: fn(Style) -> i32,
    ) -> Result<Response<Messages>, Status>
    where
        Q: Describe + Send + 'static,
    {
        let limits =
            Limits { deadline: deadline(request.metadata()), shutdown: self.shutdown.clone() };
        let asked = request.into_inner();
        let call = self.calls.begin(method, &asked);
        let plugin = self.clone();
        let opening = tokio::task::spawn_blocking(move || {
            plugin.open(method, &asked, plugin.style, |backend| open(backend, &asked))
        });
        let opened = opening.await.unwrap_or_else(|_| Err(status::panicked(method)));
        match opened {
            Ok(opened) => Ok(Response::new(opened.start(number(self.style), limits, call))),
            Err(status) => {
                call.end(Some(&status));
                Err(status)
            }
        }
    }

    /// Opens the map that `open` finds for a request, from where it is to start. Blocks.
    pub(super) fn open(
        &self,
        method: &str,
        asked: &impl Describe,
        style: Style,
        open: impl FnOnce(&Backend) -> Checked<Asked>,
    ) -> Result<Opened, Status> {
        let Asked { map, window } = open(&self.backend)?;
        let subject = Subject::of(asked);
        self.faults.check_ready(&self.backend, subject.snapshot_ids())?;
        self.faults.before(method, &subject)?;
        let (capacity_bytes, unit_bytes) = (map.capacity_bytes(), map.unit_bytes(style));
        let stream = self.faults.stream(method, &subject, window.extents(map, style)?);
        Ok(Opened { stream, capacity_bytes, unit_bytes, per_message: window.extents_per_message })
    }
}

/// An answer that can begin.
pub(super) struct Opened {
    pub stream: Stream<Extents>,
    pub capacity_bytes: u64,
    /// In the style fixed, the length of each extent.
    pub unit_bytes: u64,
    pub per_message: usize,
}

impl Opened {
    fn start(self, number: i32, limits: Limits, call: Call) -> Messages {
        let Self { stream, capacity_bytes, unit_bytes: _, per_message } = self;
        let head = Head::new(number, capacity_bytes);
        match stream {
            Stream::Whole(extents) => start(Batches::new(extents, head, per_message), limits, call),
            Stream::Spoilt(extents) => {
                start(Batches::new(extents, head, per_message), limits, call)
            }
        }
    }
}

fn number(style: Style) -> i32 {
    match style {
        Style::Variable => csi::BlockMetadataType::VariableLength.into(),
        Style::Fixed(_) => csi::BlockMetadataType::FixedLength.into(),
    }
}

fn allocated(backend: &Backend, asked: &csi::GetMetadataAllocatedRequest) -> Checked<Asked> {
    let id = request::id("snapshot_id", &asked.snapshot_id)?;
    let window = window(asked.starting_offset, asked.max_results)?;
    Ok(Asked { map: backend.allocated(id)?, window })
}

fn delta(backend: &Backend, asked: &csi::GetMetadataDeltaRequest) -> Checked<Asked> {
    let base = request::id("base_snapshot_id", &asked.base_snapshot_id)?;
    let target = request::id("target_snapshot_id", &asked.target_snapshot_id)?;
    let window = window(asked.starting_offset, asked.max_results)?;
    Ok(Asked { map: backend.delta(base, target)?, window })
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// Bytes.
    pub starting_offset: u64,
    pub extents_per_message: usize,
    /// What the request calls the offset.
    pub field: &'static str,
}

impl Window {
    fn extents(&self, map: BlockMap, style: Style) -> Checked<Extents> {
        map.extents(style, self.starting_offset).map_err(|error| match error {
            Error::OutOfRange(problem) => Error::OutOfRange(format!("{}: {problem}", self.field)),
            other => other,
        })
    }
}

pub(crate) fn window(starting_offset: i64, max_results: i32) -> Checked<Window> {
    let max_results =
        usize::try_from(max_results).map_err(|_| Error::invalid("max_results", "is negative"))?;
    // CSI GetMetadataAllocated, errors: an offset outside of the snapshot is OUT_OF_RANGE, and so is
    // one before its start.
    let field = "starting_offset";
    let starting_offset = u64::try_from(starting_offset)
        .map_err(|_| Error::OutOfRange(format!("{field}: is negative")))?;
    let extents_per_message = extents_per_message(max_results);
    Ok(Window { starting_offset, extents_per_message, field })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_numbers_are_refused_each_with_its_own_code() {
        assert!(matches!(window(-1, 0), Err(Error::OutOfRange(_))));
        assert!(matches!(window(0, -1), Err(Error::Invalid { field: "max_results", .. })));
        let window = window(4097, 10).unwrap();
        assert_eq!((window.starting_offset, window.extents_per_message), (4097, 10));
    }
}
