//! A restore to a new volume: created, published as a raw block device below a private directory,
//! written, and taken down again. A restore that fails removes the volume.

use anyhow::{Context, Result, ensure};

use super::restoring::{Done, Restorer};
use crate::client::connection::Connection;
use crate::client::names;
use crate::client::scratch::Scratch;

pub async fn restore(
    from: &Restorer<'_>,
    connection: &Connection,
    reference: &str,
    name: &str,
) -> Result<Done> {
    let backup = from.inventory.find(reference)?;
    let existing = from.stop.wait(names::find_volume(connection, name)).await?;
    ensure!(existing.is_none(), "--to-volume {name}: the volume exists already; name a new one");
    let mut scratch = Scratch::start(connection).await?;
    let capacity = backup.subject.capacity_bytes;
    let restored = async {
        let device = scratch.attach_empty(connection, from.stop, name, capacity).await?;
        from.restore(backup, &device).await
    }
    .await;
    let restored = restored.map(|done| done.with_target(format!("volume {name}")));
    match restored {
        Ok(done) => {
            scratch.release(connection).await.context("take down the restored volume")?;
            Ok(done)
        }
        Err(error) => match scratch.clean(connection).await {
            Ok(()) => Err(error),
            Err(left) => Err(error.context(format!("{left:#}"))),
        },
    }
}
