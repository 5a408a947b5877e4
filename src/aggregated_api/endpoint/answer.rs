//! Whether what a driver's endpoint answers can be true. Whoever pages through an answer that is not would miss blocks, or never
//! come to an end.

use crate::kubernetes::cbt_http::{Page, PageRequest};

/// What is wrong with the page, as an answer to what was asked.
pub fn check(asked: &PageRequest, page: &Page) -> Result<(), String> {
    let blocks = &page.changed_blocks;
    if blocks.len() > asked.limit as usize {
        return Err(format!("it sent {} blocks, and {} were asked for", blocks.len(), asked.limit));
    }
    let size = blocks.first().map_or(1, |block| block.block_size_bytes);
    // One that is higher than any before.
    let mut lowest = Some(asked.offset);
    for block in blocks {
        if block.block_size_bytes != size || size == 0 {
            return Err("its blocks are not of one size above 0".into());
        }
        match lowest {
            Some(lowest) if block.offset >= lowest => {}
            _ => return Err(format!("its blocks do not ascend from {} on", asked.offset)),
        }
        if block.offset.checked_add(1).and_then(|end| end.checked_mul(size)).is_none() {
            return Err("a block lies beyond the end of any volume".into());
        }
        lowest = block.offset.checked_add(1);
    }
    // An empty page has to get on too.
    let at_least = if blocks.is_empty() { asked.offset.checked_add(1) } else { lowest };
    match (page.next, at_least) {
        (None, _) => Ok(()),
        (Some(next), Some(at_least)) if next >= at_least => Ok(()),
        (Some(next), _) => Err(format!("it says to go on from block {next}, which it has passed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::snapshot_delta::ChangedBlock;

    fn checked(blocks: &[(u64, u64)], next: Option<u64>) -> Result<(), String> {
        let asked = PageRequest {
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
        check(&asked, &Page { volume_size_bytes: None, changed_blocks, next })
    }

    #[test]
    fn a_page_that_can_be_true_is_taken() {
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
    fn a_page_that_misleads_is_refused() {
        for (blocks, next, why) in [
            (&[(10, 1), (11, 1), (12, 1), (13, 1)][..], None, "3 were asked for"),
            (&[(10, 4096), (11, 512)], None, "one size"),
            (&[(10, 0)], None, "one size"),
            (&[(9, 4096)], None, "ascend"),
            (&[(11, 4096), (11, 4096)], None, "ascend"),
            (&[(12, 4096), (11, 4096)], None, "ascend"),
            (&[(u64::MAX, 1)], None, "beyond"),
            (&[(u64::MAX / 4096, 4096)], None, "beyond"),
            (&[(11, 4096)], Some(11), "passed"),
            (&[(11, 4096)], Some(0), "passed"),
            (&[], Some(10), "passed"),
        ] {
            let said = checked(blocks, next).unwrap_err();
            assert!(said.contains(why), "{blocks:?} {next:?}: {said}");
        }
    }
}
