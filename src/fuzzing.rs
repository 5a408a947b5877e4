//! Access of the fuzz targets in fuzz/targets to private functions: readers of data that may be
//! damaged, and parsers of input that may be hostile. Only with the feature `fuzzing`, and without
//! additional logic.

use std::convert::Infallible;
use std::ffi::OsString;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tonic::body::Body;

use crate::backend::extents::{self, ExtentReader, Finding};
use crate::backend::{Capability, CreateVolume, Deferral, Result};
use crate::driver::topology::NodeTopology;
use crate::driver::{controller, deferral, group_controller, request, snapshot_metadata};
use crate::node_proxy::message::BufferLimit;
use crate::proto::csi::v1 as csi;

pub use crate::backend::catalog::{Catalog, ReadTx, read_verified};
pub use crate::backend::list::page;
pub use crate::backend::sys::FiemapExtent;
pub use crate::driver::fault::Rule;
pub use crate::driver::inline::inline_request;
pub use crate::driver::request::{
    capacity_range, id, is_inline, keys, max_entries, mutable_parameters, name, page as page_size,
    path, token, volume_context, volume_path,
};
pub use crate::grpc::call::{Describe, Subject};
pub use crate::node_proxy::call::{Call, DecodedRequest};
pub use crate::node_proxy::deferral_request::Group;
pub use crate::node_proxy::message::{unframe, with_defer_fs_ops};
pub use crate::node_proxy::publish_target::PublishTarget;
pub use crate::runtime_ops::output::{resized, stats as runtime_stats};

/// A fake FIEMAP: from the first requested byte to a batch of extents.
pub type Fetch<'a> = Box<dyn FnMut(u64) -> Result<Vec<FiemapExtent>> + 'a>;

/// Compares `new`, of `size` bytes, with `old`, of which the first `old_size` bytes are valid.
pub fn compare_extents(
    old: Option<(Fetch<'_>, u64)>,
    new: (Fetch<'_>, u64),
) -> Result<Vec<Finding>> {
    let (fetch, size) = new;
    let old = old.map(|(fetch, old_size)| ExtentReader::with(fetch, old_size.min(size)));
    let mut findings = Vec::new();
    extents::compare_maps(old, ExtentReader::with(fetch, size), size, &mut |finding| {
        findings.push(finding);
        Ok(())
    })?;
    Ok(findings)
}

pub fn rewrite(line: Vec<OsString>) -> Result<Vec<OsString>, clap::Error> {
    crate::cli::rewrite(line)
}

pub fn mode_names() -> Vec<String> {
    crate::cli::mode_names()
}

pub fn parse_timeout(text: &str) -> Option<Duration> {
    crate::grpc::parse_timeout(text)
}

/// The start of a response in bytes, and the extents per message.
pub fn part(starting_offset: i64, max_results: i32) -> Result<(u64, usize)> {
    let part = snapshot_metadata::part(starting_offset, max_results)?;
    Ok((part.starting_offset, part.extents_per_message))
}

pub fn create_volume_args(req: &csi::CreateVolumeRequest) -> Result<CreateVolume> {
    controller::create_volume_args(&NodeTopology::new("driver.example", "node"), req)
}

pub fn capability(wanted: Option<&csi::VolumeCapability>) -> Result<Capability> {
    Ok(request::capability("volume_capability", wanted)?)
}

/// The deferral that a publish of a persistent volume requests.
pub fn deferral(
    req: &csi::NodePublishVolumeRequest,
    capability: &Capability,
) -> Result<Option<Deferral>> {
    deferral::from_publish(req, capability, deferral::Volume::Persistent)
}

pub fn group_members(volume_ids: &[String]) -> Result<&[String]> {
    group_controller::members(volume_ids)
}

/// The body that the node proxy collects from these pieces; `None` if it exceeds the limit.
pub fn gather(pieces: Vec<Vec<u8>>) -> Option<Vec<u8>> {
    // No waiting is needed, but the stream of the pieces yields now and then.
    let polls = pieces.len() + 1;
    let pieces = pieces.into_iter().map(Ok::<_, Infallible>);
    let body = Body::new(axum::body::Body::from_stream(tokio_stream::iter(pieces)));
    let limit = BufferLimit::default();
    let mut future = pin!(limit.buffer(body));
    let mut context = Context::from_waker(Waker::noop());
    let body_result = (0..polls).find_map(|_| match future.as_mut().poll(&mut context) {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    });
    body_result?.ok().map(|body| body.bytes.to_vec())
}
