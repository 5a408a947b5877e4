//! Pages of rows, in order of id. The token of a page is the last id that the caller has seen, so
//! that it stays good whatever is created or deleted in between.

use super::catalog::{Reading, Row};
use super::error::{Error, Result};
use super::ids;

/// A part of a list.
#[derive(Debug)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// Where the next page starts; `None` at the end.
    pub next: Option<String>,
}

/// Up to `max` rows (0: all) after the token `after`. A token that this driver never gave out is
/// `Busy`, since CSI answers it with ABORTED: start over.
pub fn page<R: Row>(
    reading: &Reading,
    after: Option<&str>,
    max: usize,
    wanted: impl Fn(&R) -> bool,
) -> Result<Page<R>> {
    check_token(after)?;
    let mut rows: Vec<R> = Vec::new();
    reading.scan(after, |row: R| {
        if wanted(&row) {
            rows.push(row);
        }
        // One more than the page holds says that there is a next one.
        Ok(max == 0 || rows.len() <= max)
    })?;
    Ok(first_of(rows, max))
}

/// Like [`page`], of rows in order of their keys.
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
        Some(token) if ids::name_of(token).is_none() => Err(Error::Busy(format!(
            "starting_token: {token:?} is not a token of this list; start from the beginning"
        ))),
        _ => Ok(()),
    }
}
