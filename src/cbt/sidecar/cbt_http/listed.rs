//! Pages from ListSnapshotDeltas, for a driver without the SnapshotMetadata service. The driver's
//! pages start at a token, the caller's at a block: the list is read from its start up to that
//! block.

use k8s_openapi::jiff::Timestamp;
use prost::Message;

use super::pages::PageCall;
use super::problem::{misbehaves, of_driver};
use crate::sidecar::fields::next_field;
use grpc::proto::csi::v1 as csi;
use kubernetes::cbt_http::{MAX_LIMIT, Page, PageRequest, Problem};
use kubernetes::snapshot_delta::{ChangedBlock, DataToken};

/// Number of the field that holds the blocks of a page.
const CHANGED_BLOCKS: u32 = 3;
/// Maximum bytes of a driver's page token. CSI's default limit is 128.
const MAX_TOKEN: usize = 4096;
/// Maximum bytes of a token for a block's data.
const MAX_DATA_TOKEN: usize = 1024;
/// Maximum number of consecutive pages without a block.
const MAX_EMPTY: usize = 16;

/// A page of the driver's list.
struct Start {
    token: String,
    /// Entries to request.
    entries: u32,
}

pub async fn page(call: &PageCall<'_>) -> Result<Page, Problem> {
    let request = call.request;
    // Until the block is found, the largest pages cost the fewest calls.
    let entries = if request.offset == 0 { request.limit } else { MAX_LIMIT };
    let mut start = Start { token: String::new(), entries };
    let mut progress = Progress::default();
    loop {
        let answer = list(call, &start).await?;
        progress.check(&answer, &start)?;
        if let Some(page) = page_from(request, &answer)? {
            return Ok(page);
        }
        if answer.next_token.is_empty() {
            return Ok(Page { volume_size_bytes: size(&answer), ..Page::default() });
        }
        start = Start { token: answer.next_token, entries: MAX_LIMIT };
    }
}

async fn list(
    call: &PageCall<'_>,
    start: &Start,
) -> Result<csi::ListSnapshotDeltasResponse, Problem> {
    let secrets = &call.request.secrets;
    let request = call.request;
    let request = csi::ListSnapshotDeltasRequest {
        from_snapshot_id: request.base_snapshot_id.clone(),
        to_snapshot_id: request.target_snapshot_id.clone(),
        secrets: request.secrets.reveal(),
        max_entries: start.entries as i32,
        starting_token: start.token.clone(),
    };
    let answer = call.driver.list_deltas(request, call.timeout()).await;
    decode(&answer.map_err(|status| of_driver(&status, secrets))?.0, start.entries)
}

/// Decodes a page of at most this many blocks. They are counted first: a block of two bytes takes
/// more than 70 when decoded, and a message may have 32 MiB of them.
fn decode(message: &[u8], entries: u32) -> Result<csi::ListSnapshotDeltasResponse, Problem> {
    let malformed = |_| misbehaves("a page cannot be decoded");
    let (mut rest, mut blocks) = (message, 0);
    while let Some((field, _)) = next_field(&mut rest).map_err(malformed)? {
        blocks += usize::from(field == CHANGED_BLOCKS);
    }
    if blocks > entries as usize {
        let message = format!("a page has {blocks} blocks, but max_entries was {entries}");
        return Err(misbehaves(message));
    }
    csi::ListSnapshotDeltasResponse::decode(message).map_err(malformed)
}

/// What the driver's pages have shown so far.
#[derive(Default)]
struct Progress {
    /// Number of the last reported block.
    last: Option<u64>,
    /// Consecutive pages without a block.
    empty: usize,
}

impl Progress {
    /// Refuses a page that makes no progress or that block numbers cannot express.
    fn check(
        &mut self,
        answer: &csi::ListSnapshotDeltasResponse,
        start: &Start,
    ) -> Result<(), Problem> {
        let blocks = &answer.changed_blocks;
        if answer.next_token.len() > MAX_TOKEN {
            return Err(misbehaves(format!("next_token has more than {MAX_TOKEN} bytes")));
        }
        if !answer.next_token.is_empty() && answer.next_token == start.token {
            return Err(misbehaves("next_token is the token of the same page"));
        }
        self.empty = if blocks.is_empty() { self.empty + 1 } else { 0 };
        if self.empty > MAX_EMPTY {
            return Err(misbehaves(format!("{MAX_EMPTY} consecutive pages have no block")));
        }
        for csi::BlockSnapshotChangedBlock { offset, block_size_bytes, .. } in blocks {
            if *block_size_bytes == 0 {
                return Err(misbehaves(format!("block {offset} has a size of 0 bytes")));
            }
            let end = offset.checked_add(1).and_then(|end| end.checked_mul(*block_size_bytes));
            if end.is_none_or(|end| i64::try_from(end).is_err()) {
                return Err(misbehaves(format!("block {offset} is past the end of any volume")));
            }
            if self.last.is_some_and(|last| *offset <= last) {
                return Err(misbehaves(format!(
                    "block {offset} follows block {}; blocks must be ascending",
                    self.last.unwrap_or_default()
                )));
            }
            self.last = Some(*offset);
        }
        Ok(())
    }
}

/// The caller's page from a driver's page: blocks of one size from the offset up to the limit, or
/// `None` if there are no such blocks.
fn page_from(
    request: &PageRequest,
    answer: &csi::ListSnapshotDeltasResponse,
) -> Result<Option<Page>, Problem> {
    let is_requested = |block: &&csi::BlockSnapshotChangedBlock| block.offset >= request.offset;
    let mut blocks: Vec<ChangedBlock> = Vec::new();
    let mut next = None;
    for block in answer.changed_blocks.iter().filter(is_requested) {
        let is_other = |first: &ChangedBlock| first.block_size_bytes != block.block_size_bytes;
        if blocks.len() >= request.limit as usize || blocks.first().is_some_and(is_other) {
            next = Some(block.offset);
            break;
        }
        blocks.push(changed(block)?);
    }
    let Some(last) = blocks.last() else { return Ok(None) };
    if next.is_none() && !answer.next_token.is_empty() {
        next = Some(last.offset.saturating_add(1));
    }
    Ok(Some(Page { volume_size_bytes: size(answer), changed_blocks: blocks, next }))
}

fn size(answer: &csi::ListSnapshotDeltasResponse) -> Option<u64> {
    Some(answer.volume_size_bytes).filter(|bytes| *bytes != 0)
}

fn changed(block: &csi::BlockSnapshotChangedBlock) -> Result<ChangedBlock, Problem> {
    let wrong = |what: &str| misbehaves(format!("the token of block {} {what}", block.offset));
    let token = |token: &csi::BlockSnapshotChangedBlockToken| {
        if token.token.len() > MAX_DATA_TOKEN {
            return Err(wrong(&format!("has more than {MAX_DATA_TOKEN} bytes")));
        }
        let issued = token.issuance_time.as_ref();
        let issued = issued.and_then(|time| Timestamp::new(time.seconds, time.nanos).ok());
        let issued = issued.ok_or_else(|| wrong("has no valid issuance_time"))?;
        let ttl = u32::try_from(token.ttl_seconds).map_err(|_| wrong("has a negative ttl"))?;
        Ok(DataToken {
            token: token.token.clone(),
            issuance_time: issued.to_string(),
            ttl: go_duration(ttl),
        })
    };
    Ok(ChangedBlock {
        offset: block.offset,
        block_size_bytes: block.block_size_bytes,
        data_token: block.token.as_ref().map(token).transpose()?,
    })
}

/// Formats a duration like Go's time.Duration.
fn go_duration(seconds: u32) -> String {
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, minutes) => format!("{minutes}m{rest}s"),
        (hours, minutes) => format!("{hours}h{minutes}m{rest}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(offset: u64, block_size_bytes: u64) -> csi::BlockSnapshotChangedBlock {
        csi::BlockSnapshotChangedBlock { offset, block_size_bytes, token: None }
    }

    #[test]
    fn a_data_token_is_returned_in_the_format_of_the_kep() {
        let with = |token: csi::BlockSnapshotChangedBlockToken| {
            changed(&csi::BlockSnapshotChangedBlock { token: Some(token), ..block(1, 512) })
        };
        let time = prost_types::Timestamp { seconds: 1_657_682_370, nanos: 0 };
        let good = csi::BlockSnapshotChangedBlockToken {
            token: "ieEEQ9Bj7E6XR".into(),
            issuance_time: Some(time),
            ttl_seconds: 10_800,
        };
        let token = with(good.clone()).unwrap().data_token.unwrap();
        assert_eq!(
            (token.issuance_time.as_str(), token.ttl.as_str()),
            ("2022-07-13T03:19:30Z", "3h0m0s")
        );
        assert_eq!([0, 59, 60, 3601].map(go_duration), ["0s", "59s", "1m0s", "1h0m1s"]);
        let long = "x".repeat(MAX_DATA_TOKEN + 1);
        let odd = prost_types::Timestamp { seconds: i64::MAX, nanos: -5 };
        for bad in [
            csi::BlockSnapshotChangedBlockToken { ttl_seconds: -1, ..good.clone() },
            csi::BlockSnapshotChangedBlockToken { issuance_time: None, ..good.clone() },
            csi::BlockSnapshotChangedBlockToken { issuance_time: Some(odd), ..good.clone() },
            csi::BlockSnapshotChangedBlockToken { token: long, ..good },
        ] {
            assert!(with(bad).unwrap_err().message.contains("block 1"));
        }
    }
}
