//! Pages of rows, in order of id. The token of a page is the last id of the previous page, so it
//! remains valid when rows are created or deleted.

use super::catalog::{ReadTx, Row};
use super::error::{Error, Result};
use super::ids;

/// A page of a list.
#[derive(Debug)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// The token of the next page; `None` at the end.
    pub next: Option<String>,
}

/// Up to `max` rows (0: all) after the token `after`. An invalid token is `StaleToken`, which CSI
/// reports as ABORTED.
pub fn page<R: Row>(
    reading: &ReadTx,
    after: Option<&str>,
    max: usize,
    filter: impl Fn(&R) -> bool,
) -> Result<Page<R>> {
    check_token(after)?;
    let mut rows: Vec<R> = Vec::new();
    reading.scan(after, |row: R| {
        if filter(&row) {
            rows.push(row);
        }
        // One row more than the page holds shows that a next page exists.
        Ok(max == 0 || rows.len() <= max)
    })?;
    Ok(first_of(rows, max))
}

/// Like [`page`], for rows that are sorted by key.
pub fn page_of<R: Row>(mut rows: Vec<R>, after: Option<&str>, max: usize) -> Result<Page<R>> {
    check_token(after)?;
    rows.retain(|row| after.is_none_or(|after| row.key() > after));
    Ok(first_of(rows, max))
}

fn first_of<R: Row>(mut items: Vec<R>, max: usize) -> Page<R> {
    let has_more = max > 0 && items.len() > max;
    if has_more {
        items.truncate(max);
    }
    let next = items.last().filter(|_| has_more).map(|last| last.key().to_owned());
    Page { items, next }
}

fn check_token(after: Option<&str>) -> Result<()> {
    match after {
        Some(token) if ids::name_of(token).is_none() => Err(Error::stale_token(token)),
        _ => Ok(()),
    }
}
