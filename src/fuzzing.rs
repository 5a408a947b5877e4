//! What the fuzz targets in fuzz/targets reach of what is private: readers of what may be damaged, parsers of
//! what may be hostile. Only with the feature `fuzzing`; nothing here does anything of its own.

use std::convert::Infallible;
use std::ffi::OsString;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tonic::body::Body;

use crate::backend::extents::{self, ExtentReader, Finding};
use crate::backend::{Capability, CreateVolume, Deferral, Result};
use crate::driver::topology::Place;
use crate::driver::{controller, deferral, group_controller, request, snapshot_metadata};
use crate::node_proxy::message::Room;
use crate::proto::csi::v1 as csi;

pub use crate::backend::catalog::{Catalog, Reading, read_verified};
pub use crate::backend::list::page;
pub use crate::backend::sys::FiemapExtent;
pub use crate::driver::call::{Describe, Subject};
pub use crate::driver::controller::{page as page_size, token};
pub use crate::driver::fault::Rule;
pub use crate::driver::inline::wanted as wanted_inline;
pub use crate::driver::request::{
    capacity_range, id, is_inline, keys, max_entries, mutable_parameters, name, path, place,
    volume_context,
};
pub use crate::node_proxy::call::{Asked, Call};
pub use crate::node_proxy::message::{deferred, unframed};
pub use crate::node_proxy::place::Place as Publishing;
pub use crate::node_proxy::wish::Group;
pub use crate::runtime_ops::answer::{resized, stats as runtime_stats};

/// What the kernel would answer to FIEMAP: (first byte asked for) → a batch of extents.
pub type Fetch<'a> = Box<dyn FnMut(u64) -> Result<Vec<FiemapExtent>> + 'a>;

/// What is found in `new`, of `size` bytes, against `old`, of which the first `old_size` bytes count.
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

/// Where in an answer to start (bytes), and extents per message.
pub fn window(starting_offset: i64, max_results: i32) -> Result<(u64, usize)> {
    let window = snapshot_metadata::window(starting_offset, max_results)?;
    Ok((window.starting_offset, window.extents_per_message))
}

pub fn wanted_volume(asked: &csi::CreateVolumeRequest) -> Result<CreateVolume> {
    controller::wanted_volume(&Place::new("driver.example", "node"), asked)
}

pub fn capability(wanted: Option<&csi::VolumeCapability>) -> Result<Capability> {
    Ok(request::capability("volume_capability", wanted)?)
}

/// What a publish of a volume of the catalog asks of a container runtime.
pub fn deferral(
    asked: &csi::NodePublishVolumeRequest,
    capability: &Capability,
) -> Result<Option<Deferral>> {
    deferral::of_publish(asked, capability, deferral::Volume::Persistent)
}

pub fn group_members(volume_ids: &[String]) -> Result<&[String]> {
    group_controller::members(volume_ids)
}

/// What the node proxy holds of a body that comes in these pieces; none where that is more than it holds.
pub fn gathered(pieces: Vec<Vec<u8>>) -> Option<Vec<u8>> {
    // Nobody has to be waited for, but the stream of the pieces pauses now and then for others.
    let polls = pieces.len() + 1;
    let pieces = pieces.into_iter().map(Ok::<_, Infallible>);
    let body = Body::new(axum::body::Body::from_stream(tokio_stream::iter(pieces)));
    let room = Room::default();
    let mut gathering = pin!(room.gather(body));
    let mut context = Context::from_waker(Waker::noop());
    let held = (0..polls).find_map(|_| match gathering.as_mut().poll(&mut context) {
        Poll::Ready(held) => Some(held),
        Poll::Pending => None,
    });
    held?.ok().map(|held| held.bytes.to_vec())
}
