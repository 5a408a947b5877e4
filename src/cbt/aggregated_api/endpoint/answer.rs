//! Validates the pages of a driver's endpoint. A client that pages through invalid pages would miss
//! blocks or never reach the end.

use kubernetes::cbt_http::{Page, PageRequest};

/// Returns what is wrong with the page as a response to the request.
pub fn check(request: &PageRequest, page: &Page) -> Result<(), String> {
    let blocks = &page.changed_blocks;
    if blocks.len() > request.limit as usize {
        return Err(format!(
            "it returned {} blocks, but {} were requested",
            blocks.len(),
            request.limit
        ));
    }
    let size = blocks.first().map_or(1, |block| block.block_size_bytes);
    // The lowest number that the next block can have.
    let mut lowest = Some(request.offset);
    for block in blocks {
        if block.block_size_bytes != size || size == 0 {
            return Err("its blocks do not have one size above 0".into());
        }
        match lowest {
            Some(lowest) if block.offset >= lowest => {}
            _ => return Err(format!("its blocks are not ascending from {}", request.offset)),
        }
        if block.offset.checked_add(1).and_then(|end| end.checked_mul(size)).is_none() {
            return Err("a block is past the end of any volume".into());
        }
        lowest = block.offset.checked_add(1);
    }
    // An empty page must make progress, too.
    let at_least = if blocks.is_empty() { request.offset.checked_add(1) } else { lowest };
    match (page.next, at_least) {
        (None, _) => Ok(()),
        (Some(next), Some(at_least)) if next >= at_least => Ok(()),
        (Some(next), _) => {
            Err(format!("it continues at block {next}, which is before the end of the page"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kubernetes::snapshot_delta::ChangedBlock;

    fn checked(blocks: &[(u64, u64)], next: Option<u64>) -> Result<(), String> {
        let request = PageRequest {
            driver: "d".into(),
            base_snapshot_id: String::new(),
            target_snapshot_id: "t".into(),
            offset: 10,
            limit: 3,
            secrets: Default::default(),
        };
        let block = |&(offset, block_size_bytes)| ChangedBlock {
            offset,
            block_size_bytes,
            data_token: None,
        };
        let changed_blocks = blocks.iter().map(block).collect();
        check(&request, &Page { volume_size_bytes: None, changed_blocks, next })
    }

    #[test]
    fn a_valid_page_is_accepted() {
        for (blocks, next) in [
            (&[][..], None),
            (&[], Some(11)),
            (&[(10, 4096)], None),
            (&[(10, 4096), (11, 4096), (900, 4096)], Some(901)),
            (&[(12, 1)], Some(u64::MAX)),
        ] {
            assert_eq!(checked(blocks, next), Ok(()), "{blocks:?} {next:?}");
        }
    }

    #[test]
    fn an_invalid_page_is_refused() {
        for (blocks, next, why) in [
            (&[(10, 1), (11, 1), (12, 1), (13, 1)][..], None, "3 were requested"),
            (&[(10, 4096), (11, 512)], None, "one size"),
            (&[(10, 0)], None, "one size"),
            (&[(9, 4096)], None, "not ascending"),
            (&[(11, 4096), (11, 4096)], None, "not ascending"),
            (&[(12, 4096), (11, 4096)], None, "not ascending"),
            (&[(u64::MAX, 1)], None, "past the end"),
            (&[(u64::MAX / 4096, 4096)], None, "past the end"),
            (&[(11, 4096)], Some(11), "before the end"),
            (&[(11, 4096)], Some(0), "before the end"),
            (&[], Some(10), "before the end"),
        ] {
            let error = checked(blocks, next).unwrap_err();
            assert!(error.contains(why), "{blocks:?} {next:?}: {error}");
        }
    }
}
