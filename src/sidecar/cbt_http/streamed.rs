//! Pages by CSI's SnapshotMetadata service, from the page's own starting_offset. A stream is read as far as the page goes and
//! then dropped.
//!
//! An offset counts blocks, and what a block is follows from the driver's extents. Extents of variable length are counted in
//! blocks of [`UNIT`] bytes, so the first call is made for those; where extents turn out to have a fixed length that
//! is larger, a second call starts at the right place.

use prost::Message;

use super::blocks::{Blocks, UNIT};
use super::pages::Asking;
use super::problem::{misbehaves, of_driver, out_of_range};
use crate::kubernetes::cbt_http::{Page, Problem};
use crate::proto::csi::v1 as csi;
use crate::sidecar::driver_link::{Answer, Question};

pub async fn page(asking: &Asking<'_>) -> Result<Page, Problem> {
    let asked = asking.asked;
    let blocks = |unit| Blocks::new(asked.offset, asked.limit as usize, unit);
    let found = read(asking, position(asked.offset, UNIT)?, blocks(None)).await?;
    if !found.is_elsewhere() {
        return Ok(found.page());
    }
    let unit = match found.unit() {
        Some(unit) => unit,
        None => read(asking, 0, Blocks::new(0, 1, None)).await?.unit().unwrap_or(UNIT),
    };
    Ok(read(asking, position(asked.offset, unit)?, blocks(Some(unit))).await?.page())
}

/// Where in the volume a block begins, in bytes.
fn position(block: u64, unit: u64) -> Result<i64, Problem> {
    let begin = block.checked_mul(unit).and_then(|begin| i64::try_from(begin).ok());
    begin
        .ok_or_else(|| out_of_range(format!("offset: block {block} is past the end of any volume")))
}

/// Fills `blocks` with the driver's extents from `begin` (bytes) on.
async fn read(asking: &Asking<'_>, begin: i64, mut blocks: Blocks) -> Result<Blocks, Problem> {
    let mut answer = open(asking, begin, blocks.extents()).await?;
    while !blocks.are_enough() {
        match answer.message().await {
            Ok(Some(message)) => {
                // The answers for a delta and for allocated blocks are alike on the wire.
                let message = csi::GetMetadataDeltaResponse::decode(message.0);
                blocks.add(&message.map_err(|_| misbehaves("a message cannot be decoded"))?)?;
            }
            Ok(None) => break,
            Err(status) => return Err(of_driver(&status, &asking.asked.secrets)),
        }
    }
    Ok(blocks)
}

async fn open(asking: &Asking<'_>, begin: i64, extents: i32) -> Result<Answer, Problem> {
    let asked = asking.asked;
    let base = Some(asked.base_snapshot_id.clone()).filter(|base| !base.is_empty());
    let target = asked.target_snapshot_id.clone();
    let question = Question { target, base, starting_offset: begin, max_results: extents };
    let opened = asking.driver.ask(question, asked.secrets.reveal(), asking.left()).await;
    opened.map_err(|status| of_driver(&status, &asked.secrets))
}
