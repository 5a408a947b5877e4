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
