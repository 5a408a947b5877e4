//! ListSnapshotDeltas (KEP-3314, VolumeSnapshotDelta): what the metadata streams say, in pages. Blocks of an answer are of
//! one size: that of `--block-size` in the style fixed, else the backend's. A page is opened where it
//! begins, so that it costs what is on it, and the driver keeps nothing between two pages.

use tonic::Status;

use super::controller::{page, token};
use super::delta_token::DeltaToken;
use super::fault::Stream;
use super::snapshot_metadata::{Asked, Window};
use super::{Plugin, request, status};
use crate::backend::{BLOCK_SIZE, Backend, Error, Extent, Result as Checked, Style};
use crate::proto::csi::v1 as csi;

pub const METHOD: &str = "ListSnapshotDeltas";
const FROM: &str = "from_snapshot_id";
const STARTING_TOKEN: &str = "starting_token";

pub fn list(
    plugin: &Plugin,
    asked: &csi::ListSnapshotDeltasRequest,
) -> Result<csi::ListSnapshotDeltasResponse, Status> {
    if !plugin.snapshot_deltas {
        return Err(status::switched_off(METHOD, "--enable-snapshot-deltas"));
    }
    // Numbers of blocks say nothing unless blocks have one size.
    let style = match plugin.style {
        Style::Variable => Style::Fixed(BLOCK_SIZE),
        fixed => fixed,
    };
    let opened = plugin.open(METHOD, asked, style, |backend| open(backend, asked, style))?;
    let (size, max) = (opened.unit_bytes, opened.per_message);
    let (changed_blocks, next) = match opened.stream {
        Stream::Whole(extents) => take(extents, size, max)?,
        Stream::Spoilt(extents) => take(extents, size, max)?,
    };
    let token = |next| DeltaToken::new(&asked.from_snapshot_id, &asked.to_snapshot_id, next, size);
    Ok(csi::ListSnapshotDeltasResponse {
        volume_size_bytes: opened.capacity_bytes,
        next_token: next.map(|next| token(next).to_string()).unwrap_or_default(),
        changed_blocks,
    })
}

fn open(backend: &Backend, asked: &csi::ListSnapshotDeltasRequest, style: Style) -> Checked<Asked> {
    let base = request::optional_id(FROM, &asked.from_snapshot_id)?;
    let target = request::id("to_snapshot_id", &asked.to_snapshot_id)?;
    let max_entries = page(request::max_entries(asked.max_entries)?);
    let start = token(&asked.starting_token).map(|text| start(text, base, target)).transpose()?;
    let map = match base {
        "" => backend.allocated(target),
        base => backend.delta(base, target).map_err(of_base),
    };
    let map = map.map_err(|error| if start.is_some() { outlived(error) } else { error })?;
    let starting_offset = match start {
        None => 0,
        Some(token) => offset(&token, map.unit_bytes(style))?,
    };
    let window =
        Window { starting_offset, extents_per_message: max_entries, field: STARTING_TOKEN };
    Ok(Asked { map, window })
}

fn start(text: &str, base: &str, target: &str) -> Checked<DeltaToken> {
    let invalid = |reason: &str| {
        let advice = "pass next_token of the page before, or nothing to start from the beginning";
        Error::invalid(STARTING_TOKEN, format!("{reason}; {advice}"))
    };
    let token: DeltaToken = text.parse().map_err(invalid)?;
    if !token.is_of(base, target) {
        return Err(invalid("was given for other snapshots than those of the request"));
    }
    Ok(token)
}

/// Where in the volume the page begins, in bytes; past any volume for a block that is.
fn offset(token: &DeltaToken, block_size: u64) -> Checked<u64> {
    let counted_in = token.block_size();
    if counted_in != block_size {
        return Err(stale(&format!(
            "it counts in blocks of {counted_in} bytes, and those of this driver have {block_size}"
        )));
    }
    Ok(token.next_block().saturating_mul(block_size))
}

/// CSI ListSnapshots, errors: a token that was good once is ABORTED, and the client starts over.
fn stale(reason: &str) -> Error {
    Error::Busy(format!("{STARTING_TOKEN}: is stale: {reason}; start from the beginning"))
}

/// What a token began on there is no more: the target was deleted, or the base is past its retention.
fn outlived(error: Error) -> Error {
    match error {
        Error::NotFound { .. } | Error::Precondition(_) => stale(&error.to_string()),
        other => other,
    }
}

/// The backend calls the base by the name that it has in CSI.
fn of_base(error: Error) -> Error {
    const BACKENDS: &str = "base_snapshot_id";
    match error {
        Error::Invalid { field: BACKENDS, reason } => Error::Invalid { field: FROM, reason },
        Error::Precondition(text) => Error::Precondition(match text.strip_prefix(BACKENDS) {
            Some(rest) => format!("{FROM}{rest}"),
            None => text,
        }),
        other => other,
    }
}

/// Up to `max` extents, each of one block, and the number of the block behind them if there is one.
fn take<E: Into<Status>>(
    extents: impl Iterator<Item = Result<Extent, E>>,
    block_size: u64,
    max: usize,
) -> Result<(Vec<csi::BlockSnapshotChangedBlock>, Option<u64>), Status> {
    let mut blocks = Vec::new();
    for extent in extents {
        let offset = extent.map_err(Into::into)?.offset / block_size;
        if blocks.len() == max {
            return Ok((blocks, Some(offset)));
        }
        // No token: this driver hands out no data.
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

    #[test]
    fn a_page_ends_where_it_is_full_and_names_the_next_block_that_changed() {
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
    fn a_block_past_any_volume_is_no_overflow() {
        let token = DeltaToken::new("a", "b", u64::MAX, 4096);
        assert_eq!(offset(&token, 4096).unwrap(), u64::MAX);
    }
}
