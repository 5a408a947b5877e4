//! VolumeSnapshotDelta (KEP-3314): each request to the API server, which forwards it to the
//! aggregated API server, returns a page of blocks of one size. They become extents as in the other
//! APIs.
//!
//! Only a missing page is requested again: the server keeps no state.

use std::time::Duration;

use anyhow::anyhow;
use kube::Client;
use kube::core::ObjectMeta;
use tonic::codegen::http::{Request, header};

use super::super::block_map::{Message, Query, Window};
use super::failure::Failure;
use super::find::call_within;
use super::named;
use super::resume::BlockApi;
use super::session::Portion;
use grpc::proto::csi::v1::BlockMetadataType;
use kubernetes::snapshot_delta::{
    API_VERSION, ChangedBlock, KIND, PLURAL, SecretReference, VolumeSnapshotDelta,
    VolumeSnapshotDeltaSpec, VolumeSnapshotDeltaState as State, VolumeSnapshotDeltaStatus,
};
use storage::{BLOCK_SIZE, Extent};

/// Time limit of a page: the time limit of a request in the API server.
const PAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// Parameters besides the snapshots.
#[derive(Debug, Default)]
pub struct Paging {
    /// Maximum number of blocks per page; 0 means the server's default.
    pub size: u64,
    /// Name of the Secret that the driver needs.
    pub secret: Option<String>,
}

/// A listing, and how far it is.
pub struct Aggregated {
    client: Client,
    namespace: String,
    spec: VolumeSnapshotDeltaSpec,
    /// In bytes from the start of the volume.
    starting_offset: u64,
    next: Next,
    /// In bytes, after the first block.
    block_size: Option<u64>,
    /// The last extent so far, which the next page may continue.
    run: Option<Extent>,
}

/// The next request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// The first block from this one, for its size: offsets count blocks.
    Size(u64),
    /// The page that starts with this block.
    Page(u64),
    Nothing,
}

impl Aggregated {
    /// # Errors
    /// A name or the window is invalid.
    pub fn new(
        client: Client,
        namespace: &str,
        query: &Query,
        window: Window,
        paging: Paging,
    ) -> anyhow::Result<Self> {
        let Portion { starting_offset, max_results } = Portion::try_from(window)?;
        named(query, "in a VolumeSnapshotDelta")?;
        let (base, target) = match query {
            Query::Allocated { snapshot } => (String::new(), snapshot.clone()),
            Query::Delta { base, target } => (base.clone(), target.clone()),
        };
        let wanted = [paging.size, max_results.into()].into_iter().filter(|limit| *limit > 0);
        let spec = VolumeSnapshotDeltaSpec {
            base_volume_snapshot_name: base,
            target_volume_snapshot_name: target,
            secret_ref: paging.secret.map(|name| SecretReference { name, namespace: None }),
            limit: wanted.min().unwrap_or(0),
            ..VolumeSnapshotDeltaSpec::default()
        };
        let next = if starting_offset == 0 { Next::Page(0) } else { Next::Size(0) };
        let namespace = namespace.to_owned();
        Ok(Self { client, namespace, spec, starting_offset, next, block_size: None, run: None })
    }

    /// The next blocks; `None` at the end.
    async fn page(&mut self) -> Result<Option<Message>, Failure> {
        loop {
            let (offset, limit) = match self.next {
                Next::Nothing => return Ok(None),
                Next::Size(offset) => (offset, 1),
                Next::Page(offset) => (offset, self.spec.limit),
            };
            let page = self.create(offset, limit).await?;
            let follows = checked(&page, offset, limit, self.block_size)
                .map_err(|wrong| self.broken(&wrong))?;
            let VolumeSnapshotDeltaStatus { changed_blocks, volume_size_bytes, .. } = page;
            if volume_size_bytes.is_some_and(|size| size < self.starting_offset) {
                return Err(Failure::never(anyhow!(
                    "--starting-offset must lie within the volume, which has {} bytes",
                    volume_size_bytes.unwrap_or_default()
                )));
            }
            if let Some(block) = changed_blocks.first() {
                self.block_size = Some(block.block_size_bytes);
            }
            let at_the_end = volume_size_bytes == Some(self.starting_offset);
            let (next, blocks) = match (self.next, self.block_size) {
                (Next::Size(_), _) if at_the_end => (Next::Nothing, &[][..]),
                (Next::Size(_), Some(size)) => (Next::Page(self.starting_offset / size), &[][..]),
                (Next::Size(_), None) => (follows.map_or(Next::Nothing, Next::Size), &[][..]),
                _ => (follows.map_or(Next::Nothing, Next::Page), &changed_blocks[..]),
            };
            self.next = next;
            // Without a block the type of the blocks is unknown.
            if !blocks.is_empty() || next == Next::Nothing {
                return Ok(Some(self.message_of(blocks, volume_size_bytes)));
            }
        }
    }

    /// Creates one VolumeSnapshotDelta, which the server answers at once and does not store.
    async fn create(&self, offset: u64, limit: u64) -> Result<VolumeSnapshotDeltaStatus, Failure> {
        let what = self.what();
        let object = VolumeSnapshotDelta {
            api_version: API_VERSION.to_owned(),
            kind: KIND.to_owned(),
            metadata: ObjectMeta {
                name: Some(self.spec.target_volume_snapshot_name.clone()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
            spec: VolumeSnapshotDeltaSpec { offset, limit, ..self.spec.clone() },
            status: None,
        };
        let body = serde_json::to_vec(&object).map_err(|error| Failure::never(error.into()))?;
        let path = format!("/apis/{API_VERSION}/namespaces/{}/{PLURAL}", self.namespace);
        let request = Request::post(path)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json")
            .body(body)
            .map_err(|error| Failure::never(error.into()))?;
        let response = self.client.request::<VolumeSnapshotDelta>(request);
        let outcome = match call_within(PAGE_TIMEOUT, &what, async { Ok(response.await) }).await? {
            Ok(object) => object,
            Err(error) => return Err(Failure::delta(&what, &self.namespace, error)),
        };
        let status = outcome.status.ok_or_else(|| self.broken("it has no status"))?;
        if status.state == State::Failed {
            return Err(Failure::by_driver(&what, &status.error));
        }
        Ok(status)
    }

    /// The blocks as extents.
    fn message_of(&mut self, blocks: &[ChangedBlock], capacity: Option<u64>) -> Message {
        // The server splits extents of variable length into blocks of this size; larger blocks are
        // the driver's own.
        let variable = self.block_size.is_none_or(|size| size == BLOCK_SIZE);
        let mut extents = Vec::new();
        for extent in blocks.iter().map(|block| extent(block, capacity)) {
            match &mut self.run {
                Some(run) if variable && run.end() == extent.offset => run.length += extent.length,
                run => extents.extend(run.replace(extent)),
            }
        }
        if self.next == Next::Nothing {
            extents.extend(self.run.take());
        }
        let block = |extent: Extent| (extent.offset.into(), extent.length.into());
        Message {
            block_metadata_type: match variable {
                true => BlockMetadataType::VariableLength,
                false => BlockMetadataType::FixedLength,
            },
            capacity_bytes: capacity.map(i128::from),
            blocks: extents.into_iter().map(block).collect(),
        }
    }

    fn what(&self) -> String {
        let target = &self.spec.target_volume_snapshot_name;
        match self.spec.base_volume_snapshot_name.as_str() {
            "" => format!("{KIND} of {}/{target}", self.namespace),
            base => format!("{KIND} of {}/{base} and {target}", self.namespace),
        }
    }

    fn broken(&self, wrong: &str) -> Failure {
        let what = self.what();
        Failure::never(anyhow!(
            "{what}: the response of the aggregated API server is invalid: {wrong}; check its log and the log of \
             the driver's sidecar"
        ))
    }
}

/// The start of the page that follows, if one does.
///
/// # Errors
/// The page is invalid.
fn checked(
    page: &VolumeSnapshotDeltaStatus,
    offset: u64,
    limit: u64,
    block_size: Option<u64>,
) -> Result<Option<u64>, String> {
    let blocks = &page.changed_blocks;
    if limit > 0 && blocks.len() as u64 > limit {
        return Err(format!("it has {} blocks, but {limit} were requested", blocks.len()));
    }
    let size = block_size.or_else(|| blocks.first().map(|block| block.block_size_bytes));
    // The minimum number of the next block.
    let mut least = offset;
    for ChangedBlock { offset, block_size_bytes, .. } in blocks {
        if *block_size_bytes == 0 || Some(*block_size_bytes) != size {
            return Err(format!("blocks have several sizes, or none: {block_size_bytes} bytes"));
        }
        let end = offset.checked_add(1).and_then(|next| next.checked_mul(*block_size_bytes));
        if end.is_none() {
            return Err(format!("no volume has a block {offset} of {block_size_bytes} bytes"));
        }
        if *offset < least {
            return Err(format!("block {offset} is out of order: the minimum is {least}"));
        }
        least = offset + 1;
    }
    // A page without blocks must advance, too.
    let least = least.max(offset.saturating_add(1));
    match page.state {
        State::Continue if page.next < least => Err(format!(
            "status.continue is {}, which does not advance: the minimum is {least}",
            page.next
        )),
        State::Continue => Ok(Some(page.next)),
        State::Completed | State::Failed => Ok(None),
    }
}

/// The last block of a volume may extend beyond its end.
fn extent(block: &ChangedBlock, capacity: Option<u64>) -> Extent {
    let (offset, size) = (block.offset * block.block_size_bytes, block.block_size_bytes);
    let left = capacity.map_or(size, |capacity| capacity.saturating_sub(offset));
    // An extent completely beyond the end remains, and the check refuses it.
    let length = if left == 0 { size } else { size.min(left) };
    Extent { offset, length }
}

impl BlockApi for Aggregated {
    type Response = ();

    /// The next block is known already.
    async fn request(&mut self, _from: u64) -> Result<(), Failure> {
        Ok(())
    }

    async fn message(&mut self, (): &mut ()) -> Result<Option<Message>, Failure> {
        self.page().await
    }
}
