//! The CSI SnapshotMetadata service: which ranges of a snapshot hold data, and which changed since
//! another snapshot. A stream holds no lock: it reads complete change records and runs while
//! volumes are in use.

use tonic::{Request, Response, Status};

use super::fault::{Requested, Stream};
use super::frame::Preamble;
use super::stream::{Batcher, Limits, Messages, extents_per_message, start};
use super::{Plugin, request, status};
use crate::status::Answer;
use csi::snapshot_metadata_server::SnapshotMetadata;
use grpc::call::{Call, Describe, Subject};
use grpc::deadline;
use grpc::proto::csi::v1 as csi;
use storage::{Backend, BlockMap, Error, Extents, Result as Checked, Style};
use telemetry::task;

#[tonic::async_trait]
impl SnapshotMetadata for Plugin {
    type GetMetadataAllocatedStream = Messages;
    type GetMetadataDeltaStream = Messages;

    async fn get_metadata_allocated(
        &self,
        request: Request<csi::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Messages>, Status> {
        let (method, req) = ("GetMetadataAllocated", request.get_ref());
        let Some(wrong) = self.faults.wrong(method, &Subject::of(req)) else {
            return self.metadata(method, request, allocated, number).await;
        };
        let requested = Requested {
            starting_offset: req.starting_offset,
            max_results: req.max_results,
            has_ids: !req.snapshot_id.is_empty(),
            deadline: deadline(request.metadata()),
        };
        let right = self.metadata(method, request, allocated, number).await;
        wrong.apply(requested, right).await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<csi::GetMetadataDeltaRequest>,
    ) -> Result<Response<Messages>, Status> {
        let (method, req) = ("GetMetadataDelta", request.get_ref());
        let Some(wrong) = self.faults.wrong(method, &Subject::of(req)) else {
            return self.metadata(method, request, delta, number).await;
        };
        let requested = Requested {
            starting_offset: req.starting_offset,
            max_results: req.max_results,
            has_ids: !req.base_snapshot_id.is_empty() && !req.target_snapshot_id.is_empty(),
            deadline: deadline(request.metadata()),
        };
        let right = self.metadata(method, request, delta, number).await;
        wrong.apply(requested, right).await
    }
}

/// A block map and the part of it that a request reads.
pub(super) struct MapRequest {
    pub map: BlockMap,
    pub part: Part,
}

impl Plugin {
    /// Opens the map that `open` finds and starts to stream it; `number` is the API's number of a
    /// style. An invalid request is the status of the call, before any message.
    pub(super) async fn metadata<Q>(
        &self,
        method: &'static str,
        request: Request<Q>,
        open: fn(&Backend, &Q) -> Checked<MapRequest>,
        number: fn(Style) -> i32,
    ) -> Result<Response<Messages>, Status>
    where
        Q: Describe + Send + 'static,
    {
        let limits =
            Limits { deadline: deadline(request.metadata()), shutdown: self.shutdown.clone() };
        let req = request.into_inner();
        let call = self.calls.begin(method, &req);
        let plugin = self.clone();
        let opening = task::blocking(move || {
            plugin.open(method, &req, plugin.style, open(&plugin.backend, &req)?)
        });
        let opened = opening.await.unwrap_or_else(|_| Err(status::panicked(method).into()));
        match opened {
            Ok(opened) => Ok(Response::new(opened.start(number(self.style), limits, call))),
            Err(failure) => {
                let status = status::of(failure);
                call.end(Some(&status));
                Err(status)
            }
        }
    }

    /// Opens a map at the requested offset. Blocks.
    pub(super) fn open(
        &self,
        method: &str,
        req: &impl Describe,
        style: Style,
        MapRequest { map, part }: MapRequest,
    ) -> Answer<Opened> {
        let subject = Subject::of(req);
        self.faults.check_ready(&self.backend, subject.snapshot_ids())?;
        self.faults.before(method, &subject)?;
        let (capacity_bytes, unit_bytes) = (map.capacity_bytes(), map.unit_bytes(style));
        let stream = self.faults.stream(method, &subject, part.extents(map, style)?);
        Ok(Opened { stream, capacity_bytes, unit_bytes, per_message: part.extents_per_message })
    }
}

/// A response that is ready to be streamed.
pub(super) struct Opened {
    pub stream: Stream<Extents>,
    pub capacity_bytes: u64,
    /// With the type fixed, the length of each extent.
    pub unit_bytes: u64,
    pub per_message: usize,
}

impl Opened {
    fn start(self, number: i32, limits: Limits, call: Call) -> Messages {
        let Self { stream, capacity_bytes, unit_bytes: _, per_message } = self;
        let preamble = Preamble::new(number, capacity_bytes);
        match stream {
            Stream::Intact(extents) => {
                start(Batcher::new(extents, preamble, per_message), limits, call)
            }
            Stream::Faulty(extents) => {
                start(Batcher::new(extents, preamble, per_message), limits, call)
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

fn allocated(backend: &Backend, req: &csi::GetMetadataAllocatedRequest) -> Checked<MapRequest> {
    let id = request::id("snapshot_id", &req.snapshot_id)?;
    let part = part(req.starting_offset, req.max_results)?;
    Ok(MapRequest { map: backend.allocated(id)?, part })
}

fn delta(backend: &Backend, req: &csi::GetMetadataDeltaRequest) -> Checked<MapRequest> {
    let base = request::id("base_snapshot_id", &req.base_snapshot_id)?;
    let target = request::id("target_snapshot_id", &req.target_snapshot_id)?;
    let part = part(req.starting_offset, req.max_results)?;
    Ok(MapRequest { map: backend.delta(base, target)?, part })
}

/// What a request reads of a block map.
#[derive(Debug, PartialEq, Eq)]
pub struct Part {
    /// In bytes.
    pub starting_offset: u64,
    pub extents_per_message: usize,
    /// The request's field for the offset.
    pub field: &'static str,
}

impl Part {
    fn extents(&self, map: BlockMap, style: Style) -> Checked<Extents> {
        map.extents(style, self.starting_offset).map_err(|error| match error {
            Error::OutOfRange(problem) => Error::OutOfRange(format!("{}: {problem}", self.field)),
            other => other,
        })
    }
}

pub fn part(starting_offset: i64, max_results: i32) -> Checked<Part> {
    let max_results =
        usize::try_from(max_results).map_err(|_| Error::invalid("max_results", "is negative"))?;
    // CSI GetMetadataAllocated, errors: an offset outside of the snapshot is OUT_OF_RANGE. A negative
    // one is outside.
    let field = "starting_offset";
    let starting_offset = u64::try_from(starting_offset)
        .map_err(|_| Error::OutOfRange(format!("{field}: is negative")))?;
    let extents_per_message = extents_per_message(max_results);
    Ok(Part { starting_offset, extents_per_message, field })
}
