//! Pages from CSI's SnapshotMetadata service, starting at the page's starting_offset. A stream is
//! read up to the end of the page and then dropped.
//!
//! An offset counts blocks, and the size of a block follows from the driver's extents. Extents of
//! variable length are counted in blocks of [`UNIT`] bytes, so the first call assumes those. If
//! extents turn out to have a larger fixed length, a second call starts at the right position.

use prost::Message;
use tokio::time::Instant;

use super::blocks::{Blocks, UNIT};
use super::pages::PageCall;
use super::problem::{misbehaves, of_driver, out_of_range, too_long};
use crate::kubernetes::cbt_http::{Page, Problem};
use crate::proto::csi::v1 as csi;
use crate::sidecar::driver_link::{DriverRequest, MetadataStream};

pub async fn page(call: &PageCall<'_>) -> Result<Page, Problem> {
    let request = call.request;
    let blocks = |unit| Blocks::new(request.offset, request.limit as usize, unit);
    let found = read(call, position(request.offset, UNIT)?, blocks(None)).await?;
    if !found.needs_reread() {
        return Ok(found.page());
    }
    let unit = match found.unit() {
        Some(unit) => unit,
        None => read(call, 0, Blocks::new(0, 1, None)).await?.unit().unwrap_or(UNIT),
    };
    Ok(read(call, position(request.offset, unit)?, blocks(Some(unit))).await?.page())
}

/// Start of a block in the volume, in bytes.
fn position(block: u64, unit: u64) -> Result<i64, Problem> {
    let begin = block.checked_mul(unit).and_then(|begin| i64::try_from(begin).ok());
    begin
        .ok_or_else(|| out_of_range(format!("offset: block {block} is past the end of any volume")))
}

/// Fills `blocks` with the driver's extents from `begin` (bytes).
async fn read(call: &PageCall<'_>, begin: i64, mut blocks: Blocks) -> Result<Blocks, Problem> {
    let mut answer = open(call, begin, blocks.extents()).await?;
    while !blocks.is_complete() {
        match answer.message().await {
            Ok(Some(message)) => {
                // Responses for deltas and for allocated blocks have the same encoding.
                let message = csi::GetMetadataDeltaResponse::decode(message.0);
                blocks.add(&message.map_err(|_| misbehaves("a message cannot be decoded"))?)?;
            }
            // The driver may have ended the stream because its time is over.
            Ok(None) if Instant::now() >= call.deadline => return Err(too_long()),
            Ok(None) => break,
            Err(status) => return Err(of_driver(&status, &call.request.secrets)),
        }
    }
    Ok(blocks)
}

async fn open(call: &PageCall<'_>, begin: i64, extents: i32) -> Result<MetadataStream, Problem> {
    let request = call.request;
    let base = Some(request.base_snapshot_id.clone()).filter(|base| !base.is_empty());
    let target = request.target_snapshot_id.clone();
    let driver_request =
        DriverRequest { target, base, starting_offset: begin, max_results: extents };
    let opened =
        call.driver.get_metadata(driver_request, request.secrets.reveal(), call.timeout()).await;
    opened.map_err(|status| of_driver(&status, &request.secrets))
}
