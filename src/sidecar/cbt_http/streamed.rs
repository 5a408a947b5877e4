//! Pages by CSI's SnapshotMetadata service, for a driver without ListSnapshotDeltas. A stream is read as far as the page
//! goes and then dropped.

use prost::Message;

use super::blocks::Blocks;
use super::pages::Asking;
use super::problem::{misbehaves, of_driver, out_of_range};
use crate::kubernetes::cbt_http::{Page, Problem};
use crate::proto::csi::v1 as csi;
use crate::sidecar::driver_link::{Answer, Question};

pub async fn page(asking: &Asking<'_>) -> Result<Page, Problem> {
    let (asked, memory) = (asking.asked, asking.memory);
    let unit = match asked.offset {
        0 => None,
        _ => match memory.unit(asked).await {
            Some(unit) => Some(unit),
            None => {
                // What the numbers of blocks count is told by the first of them.
                let first = read(asking, 0, Blocks::new(0, 1, None)).await?;
                let Some(unit) = first.unit() else { return Ok(first.page()) };
                Some(unit)
            }
        },
    };
    let begin = asked.offset.checked_mul(unit.unwrap_or_default());
    let Some(begin) = begin.and_then(|begin| i64::try_from(begin).ok()) else {
        let message = format!("offset: block {} is past the end of any volume", asked.offset);
        return Err(out_of_range(message));
    };
    let blocks = Blocks::new(asked.offset, asked.limit as usize, unit);
    let blocks = read(asking, begin, blocks).await?;
    if let Some(unit) = blocks.unit() {
        memory.note_unit(asked, unit).await;
    }
    Ok(blocks.page())
}

/// Fills `blocks` with what the driver tells from `begin` (bytes) on.
async fn read(asking: &Asking<'_>, begin: i64, mut blocks: Blocks) -> Result<Blocks, Problem> {
    let mut answer = open(asking, begin, blocks.extents()).await?;
    while !blocks.are_enough() {
        match answer.message().await {
            Ok(Some(message)) => {
                // Both answers are alike on the wire.
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
