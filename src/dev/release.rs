//! Releases all volumes of a driver: unpublishes and unstages them.

use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::{Instant, sleep};
use tonic::Status;

use crate::client::connection::Connection;
use crate::client::{names, node};
use crate::grpc::Endpoint;
use crate::proto::csi::v1::{NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest};

/// Time limit for programs that still use a volume.
const PATIENCE: Duration = Duration::from_secs(10);
/// Wait before a call is repeated.
const PAUSE: Duration = Duration::from_millis(250);

/// Volumes that could not be released.
#[derive(Debug, thiserror::Error)]
#[error(
    "not released: {0}; end what uses them, and start csi-loopback dev again, which removes them"
)]
pub struct InUse(String);

/// # Errors
/// [`InUse`], or the driver does not respond.
pub async fn all(endpoint: &Endpoint) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    let connection = Connection::open(endpoint, until + PATIENCE).await?;
    let mut ids = Vec::new();
    names::each_volume(&connection, |entry| {
        ids.push(entry.volume.unwrap_or_default().volume_id);
    })
    .await?;
    let mut uses = Vec::new();
    for volume_id in ids {
        let Some(volume) = node::details(&connection, &volume_id).await? else { continue };
        let targets = volume.publications.into_iter().map(|one| Use::Published(one.target_path));
        let staging = Some(volume.staging_path).filter(|path| !path.is_empty()).map(Use::Staged);
        uses.extend(targets.chain(staging).map(|one| (volume_id.clone(), one)));
    }
    let inline = node::inline_volumes(&connection).await?.unwrap_or_default().into_iter();
    uses.extend(inline.map(|one| (one.handle, Use::Published(one.target_path))));
    let mut remaining = Vec::new();
    for (volume_id, used) in uses {
        if let Err(status) = end(&connection, &volume_id, &used, until).await {
            let (Use::Published(path) | Use::Staged(path)) = used;
            remaining.push(format!("{volume_id} at {path} ({})", status.message()));
        }
    }
    match remaining.is_empty() {
        true => Ok(()),
        false => bail!(InUse(remaining.join("; "))),
    }
}

enum Use {
    Published(String),
    Staged(String),
}

/// Repeats the call until it succeeds or time is over.
async fn end(
    connection: &Connection,
    volume_id: &str,
    used: &Use,
    until: Instant,
) -> Result<(), Status> {
    let volume_id = volume_id.to_owned();
    loop {
        let mut node = connection.node();
        let ended = match used {
            Use::Published(target_path) => {
                let (volume_id, target_path) = (volume_id.clone(), target_path.clone());
                let request =
                    NodeUnpublishVolumeRequest { volume_id, target_path, ..Default::default() };
                node.node_unpublish_volume(request).await.map(drop)
            }
            Use::Staged(staging_target_path) => {
                let (volume_id, staging_target_path) =
                    (volume_id.clone(), staging_target_path.clone());
                let request = NodeUnstageVolumeRequest { volume_id, staging_target_path };
                node.node_unstage_volume(request).await.map(drop)
            }
        };
        match ended {
            Err(_) if Instant::now() < until => sleep(PAUSE).await,
            ended => return ended,
        }
    }
}
