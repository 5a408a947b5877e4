//! Pages from CSI's SnapshotMetadata service, starting at the page's starting_offset. A stream is
//! read up to the end of the page and then dropped.
//!
//! An offset counts blocks, and the size of a block follows from the driver's extents. Extents of
//! variable length are counted in blocks of [`UNIT`] bytes, so the first call assumes those. If
//! extents turn out to have a larger fixed length, a second call starts at the right position.

use prost::Message;
use tokio::time::Instant;
use tonic::Status;

use super::blocks::{Blocks, UNIT};
use super::pages::PageCall;
use super::problem::{misbehaves, of_driver, of_refusal, out_of_range, too_long};
use crate::sidecar::driver_link::{DriverRequest, MetadataStream};
use crate::sidecar::fields::{BLOCK_METADATA, Value, next_field};
use crate::sidecar::nodes::FromNode;
use grpc::proto::csi::v1 as csi;
use kubernetes::cbt_http::{Page, Problem};
use kubernetes::secret::Secrets;

/// Number of extents that are decoded at once.
const PART: usize = 1024;

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
        match answer.stream().message().await {
            Ok(Some(message)) => add(&mut blocks, &message.0)?,
            // The driver may have ended the stream because its time is over.
            Ok(None) if Instant::now() >= call.deadline => return Err(too_long()),
            Ok(None) => break,
            Err(status) => return Err(answer.problem(&status, &call.request.secrets)),
        }
    }
    Ok(blocks)
}

/// Adds the extents of an encoded message, in parts and only up to the end of the page: an extent of
/// two bytes takes 16 when decoded, and a message may have 32 MiB of them.
fn add(blocks: &mut Blocks, message: &[u8]) -> Result<(), Problem> {
    let malformed = |_| misbehaves("a message cannot be decoded");
    // Responses for deltas and for allocated blocks have the same encoding. The other fields first:
    // they apply to all extents, wherever they are.
    let mut part = csi::GetMetadataDeltaResponse::default();
    let mut rest = message;
    loop {
        let before = rest;
        let Some((field, _)) = next_field(&mut rest).map_err(malformed)? else { break };
        if field != BLOCK_METADATA {
            part.merge(&before[..before.len() - rest.len()]).map_err(malformed)?;
        }
    }
    let (mut rest, mut added) = (message, false);
    while !blocks.is_complete() {
        let is_last = match next_field(&mut rest).map_err(malformed)? {
            Some((BLOCK_METADATA, Value::Bytes(extent))) => {
                let extent = csi::BlockMetadata::decode(extent).map_err(malformed)?;
                part.block_metadata.push(extent);
                false
            }
            Some((BLOCK_METADATA, _)) => return Err(misbehaves("a message cannot be decoded")),
            Some(_) => continue,
            None => true,
        };
        let is_full = part.block_metadata.len() == PART;
        if is_full || is_last && !(added && part.block_metadata.is_empty()) {
            blocks.add(&part)?;
            part.block_metadata.clear();
            added = true;
        }
        if is_last {
            break;
        }
    }
    Ok(())
}

/// A stream of the driver, or of one on a node.
enum Opened {
    Driver(MetadataStream),
    Node(FromNode),
}

impl Opened {
    fn stream(&mut self) -> &mut MetadataStream {
        match self {
            Self::Driver(stream) | Self::Node(FromNode { stream, .. }) => stream,
        }
    }

    /// The error that ended the stream.
    fn problem(&self, status: &Status, secrets: &Secrets) -> Problem {
        match self {
            Self::Driver(_) => of_driver(status, secrets),
            Self::Node(stream) => of_refusal(&stream.refusal(status, secrets)),
        }
    }
}

async fn open(call: &PageCall<'_>, begin: i64, extents: i32) -> Result<Opened, Problem> {
    let request = call.request;
    let base = Some(request.base_snapshot_id.clone()).filter(|base| !base.is_empty());
    let target = request.target_snapshot_id.clone();
    let driver_request =
        DriverRequest { target, base, starting_offset: begin, max_results: extents };
    let secrets = &request.secrets;
    match call.remote {
        Some(remote) => {
            let stream =
                remote.get_metadata(&request.driver, driver_request, secrets, call.deadline);
            stream.await.map(Opened::Node).map_err(|refusal| of_refusal(&refusal))
        }
        None => {
            let stream = call.driver.get_metadata(driver_request, secrets.reveal(), call.timeout());
            stream.await.map(Opened::Driver).map_err(|status| of_driver(&status, secrets))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(extents: i64) -> csi::GetMetadataDeltaResponse {
        let block =
            |index| csi::BlockMetadata { byte_offset: index * 8192, size_bytes: UNIT as i64 };
        csi::GetMetadataDeltaResponse {
            block_metadata_type: csi::BlockMetadataType::VariableLength.into(),
            volume_capacity_bytes: 1 << 40,
            block_metadata: (0..extents).map(block).collect(),
        }
    }

    #[test]
    fn a_message_added_in_parts_gives_the_same_page() {
        let part = PART as i64;
        for extents in [0, 1, part - 1, part, part + 1, 3 * part] {
            for limit in [1, 1500, 4096] {
                let message = message(extents);
                let (mut whole, mut parts) =
                    (Blocks::new(0, limit, None), Blocks::new(0, limit, None));
                whole.add(&message).unwrap();
                add(&mut parts, &message.encode_to_vec()).unwrap();
                assert_eq!(parts.page(), whole.page(), "{extents} extents, {limit}");
            }
        }
        // The type may follow the extents.
        let mut typeless = message(2 * part);
        typeless.block_metadata_type = 0;
        let style = csi::GetMetadataDeltaResponse { block_metadata: Vec::new(), ..message(0) };
        let bytes = [typeless.encode_to_vec(), style.encode_to_vec()].concat();
        let mut blocks = Blocks::new(0, 4096, None);
        add(&mut blocks, &bytes).unwrap();
        assert_eq!(blocks.page().changed_blocks.len(), 2 * PART);
    }

    #[test]
    fn a_malformed_message_is_refused() {
        for bad in [&[0x1a, 5, 0][..], &[0x18, 1], &[0xff]] {
            assert!(add(&mut Blocks::new(0, 1, None), bad).is_err(), "{bad:?}");
        }
    }
}
