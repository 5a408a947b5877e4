//! Pages of changed blocks from the drivers of many nodes: their requests have handles only, and the
//! VolumeSnapshotContent with the handle of the target names the node.

use std::sync::Arc;

use tokio::time::Instant;
use tonic::Status;

use super::{Nodes, of_node};
use crate::sidecar::driver_link::{DriverRequest, MetadataStream};
use crate::sidecar::refusal::{Reason, Refusal};
use kubernetes::cache::Cache;
use kubernetes::secret::Secrets;
use kubernetes::snapshot::VolumeSnapshotContent;

/// The drivers of all nodes. Clones share watches and connections.
#[derive(Clone)]
pub struct Remote {
    pub nodes: Nodes,
    /// Indexed by handle.
    pub contents: Cache<VolumeSnapshotContent>,
}

/// A stream from a node.
pub struct FromNode {
    pub stream: MetadataStream,
    node: String,
}

impl FromNode {
    /// The error that ended the stream.
    pub fn refusal(&self, status: &Status, secrets: &Secrets) -> Refusal {
        of_node(status, &self.node, secrets)
    }
}

impl Remote {
    /// Calls the driver on the node that holds the target of the request.
    pub async fn get_metadata(
        &self,
        driver: &str,
        request: DriverRequest,
        secrets: &Secrets,
        deadline: Instant,
    ) -> Result<FromNode, Refusal> {
        let found = self.contents_of(driver, &request.target).await?;
        if found.is_empty() {
            let message = format!(
                "targetSnapshotId: no VolumeSnapshotContent of driver {driver} has the handle {}",
                request.target
            );
            return Err(Refusal::new(Reason::SnapshotMissing, message));
        }
        let node = found.iter().find_map(|content| content.node());
        let stream = self.nodes.get_metadata(node, request, secrets, deadline).await?;
        Ok(FromNode { stream, node: node.unwrap_or_default().to_owned() })
    }

    async fn contents_of(
        &self,
        driver: &str,
        handle: &str,
    ) -> Result<Vec<Arc<VolumeSnapshotContent>>, Refusal> {
        let failed = |error: &kube::Error| Refusal::api("read VolumeSnapshotContents", error);
        let own = |content: &Arc<VolumeSnapshotContent>| content.spec.driver == driver;
        let mut found = self.contents.with_recent(handle).await.map_err(|error| failed(&error))?;
        found.retain(own);
        if found.is_empty() {
            // It may be newer than the watch's last report.
            found = self.contents.fetch_with(handle).await.map_err(|error| failed(&error))?;
            found.retain(own);
        }
        Ok(found)
    }
}
