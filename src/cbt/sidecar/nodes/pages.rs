//! Pages of changed blocks from the drivers of many nodes: their requests have handles only, and the
//! VolumeSnapshotContent with the handle of the target names the node.

use tokio::time::Instant;
use tonic::Status;

use super::{Nodes, of_node};
use crate::sidecar::driver_link::{DriverRequest, MetadataStream};
use crate::sidecar::refusal::{Reason, Refusal};
use crate::sidecar::resolve::Resolver;
use kubernetes::secret::Secrets;

/// The drivers of all nodes. Clones share watches and connections.
#[derive(Clone)]
pub struct Remote {
    pub nodes: Nodes,
    pub resolver: Resolver,
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
        let found = self.resolver.newest_contents(driver, &request.target).await?;
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
}
