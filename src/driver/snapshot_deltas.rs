//! ListSnapshotDeltas (KEP-3314, VolumeSnapshotDelta): the content of the metadata streams, in
//! pages. All blocks of a response have one size: `--block-size` with the type fixed, otherwise the
//! backend's block size. A page is opened at its start, so its cost is proportional to its own
//! content, and the driver keeps no state between pages.

use super::delta_token::DeltaToken;
use super::fault::Stream;
use super::request::{page, token};
use super::snapshot_metadata::{MapRequest, Part};
use super::{Plugin, request, status};
use crate::status::{Answer, Failure};
use grpc::proto::csi::v1 as csi;
use storage::{BLOCK_SIZE, Backend, Error, Extent, Result as Checked, Style};

pub const METHOD: &str = "ListSnapshotDeltas";
const FROM: &str = "from_snapshot_id";
const STARTING_TOKEN: &str = "starting_token";

pub fn list(
    plugin: &Plugin,
    req: &csi::ListSnapshotDeltasRequest,
) -> Answer<csi::ListSnapshotDeltasResponse> {
    if !plugin.snapshot_deltas {
        return Err(status::disabled(METHOD, "--enable-snapshot-deltas"));
    }
    // Block numbers need blocks of one size.
    let style = match plugin.style {
        Style::Variable => Style::Fixed(BLOCK_SIZE),
        fixed => fixed,
    };
    let opened = plugin.open(METHOD, req, style, open(&plugin.backend, req, style)?)?;
    let (size, max) = (opened.unit_bytes, opened.per_message);
    let (changed_blocks, next) = match opened.stream {
        Stream::Intact(extents) => take(extents, size, max)?,
        Stream::Faulty(extents) => take(extents, size, max)?,
    };
    let token = |next| DeltaToken::new(&req.from_snapshot_id, &req.to_snapshot_id, next, size);
    Ok(csi::ListSnapshotDeltasResponse {
        volume_size_bytes: opened.capacity_bytes,
        next_token: next.map(|next| token(next).to_string()).unwrap_or_default(),
        changed_blocks,
    })
}

fn open(
    backend: &Backend,
    req: &csi::ListSnapshotDeltasRequest,
    style: Style,
) -> Checked<MapRequest> {
    let base = request::optional_id(FROM, &req.from_snapshot_id)?;
    let target = request::id("to_snapshot_id", &req.to_snapshot_id)?;
    let max_entries = page(request::max_entries(req.max_entries)?);
    let start = token(&req.starting_token).map(|text| start(text, base, target)).transpose()?;
    let map = match base {
        "" => backend.allocated(target),
        base => backend.delta(base, target).map_err(rename_base_field),
    };
    let map = map.map_err(|error| if start.is_some() { stale_if_gone(error) } else { error })?;
    let starting_offset = match start {
        None => 0,
        Some(token) => offset(&token, map.unit_bytes(style))?,
    };
    let part = Part { starting_offset, extents_per_message: max_entries, field: STARTING_TOKEN };
    Ok(MapRequest { map, part })
}

fn start(text: &str, base: &str, target: &str) -> Checked<DeltaToken> {
    let invalid = |reason: &str| {
        let advice =
            "pass next_token of the previous page, or leave it empty to start from the beginning";
        Error::invalid(STARTING_TOKEN, format!("{reason}; {advice}"))
    };
    let token: DeltaToken = text.parse().map_err(invalid)?;
    if !token.is_of(base, target) {
        return Err(invalid("belongs to other snapshots than the request"));
    }
    Ok(token)
}

/// Offset of the page in bytes. Saturates for a block beyond the end of any volume.
fn offset(token: &DeltaToken, block_size: u64) -> Checked<u64> {
    let token_size = token.block_size();
    if token_size != block_size {
        return Err(stale(&format!(
            "it uses blocks of {token_size} bytes, and this driver blocks of {block_size} bytes"
        )));
    }
    Ok(token.next_block().saturating_mul(block_size))
}

/// CSI ListSnapshots, errors: a token that is no longer valid is ABORTED, and the client starts
/// again.
fn stale(reason: &str) -> Error {
    Error::StaleToken(format!("{STARTING_TOKEN}: is stale: {reason}; start from the beginning"))
}

/// A token is stale if the target was deleted or the base's retention has ended.
fn stale_if_gone(error: Error) -> Error {
    match error {
        Error::NotFound { .. } | Error::Precondition(_) => stale(&error.to_string()),
        other => other,
    }
}

/// Replaces CSI's field name, which the backend uses for the base.
fn rename_base_field(error: Error) -> Error {
    const BACKEND_FIELD: &str = "base_snapshot_id";
    match error {
        Error::Invalid { field: BACKEND_FIELD, reason } => Error::Invalid { field: FROM, reason },
        Error::Precondition(text) => Error::Precondition(match text.strip_prefix(BACKEND_FIELD) {
            Some(rest) => format!("{FROM}{rest}"),
            None => text,
        }),
        other => other,
    }
}

/// Up to `max` extents of one block each, and the number of the next block if there is one.
fn take<E: Into<Failure>>(
    extents: impl Iterator<Item = Result<Extent, E>>,
    block_size: u64,
    max: usize,
) -> Answer<(Vec<csi::BlockSnapshotChangedBlock>, Option<u64>)> {
    let mut blocks = Vec::new();
    for extent in extents {
        let offset = extent.map_err(Into::into)?.offset / block_size;
        if blocks.len() == max {
            return Ok((blocks, Some(offset)));
        }
        // No data token: this driver does not serve block data.
        blocks.push(csi::BlockSnapshotChangedBlock {
            offset,
            block_size_bytes: block_size,
            token: None,
        });
    }
    Ok((blocks, None))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Status;

    #[test]
    fn a_full_page_names_the_next_changed_block() {
        let extents = |numbers: &'static [u64]| {
            numbers.iter().map(|n| Ok::<_, Status>(Extent { offset: n * 8192, length: 8192 }))
        };
        let page = |numbers, max| {
            let (blocks, next) = take(extents(numbers), 8192, max).unwrap();
            (blocks.iter().map(|block| block.offset).collect::<Vec<_>>(), next)
        };
        assert_eq!(page(&[1, 2, 9], 2), (vec![1, 2], Some(9)));
        assert_eq!(page(&[1, 2, 9], 3), (vec![1, 2, 9], None));
        assert_eq!(page(&[], 3), (vec![], None));
    }

    #[test]
    fn a_block_beyond_any_volume_does_not_overflow() {
        let token = DeltaToken::new("a", "b", u64::MAX, 4096);
        assert_eq!(offset(&token, 4096).unwrap(), u64::MAX);
    }
}
