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
    let mut items: Vec<R> = Vec::new();
    let mut more = false;
    reading.scan(after, |row: R| {
        if !wanted(&row) {
            return Ok(true);
        }
        more = max > 0 && items.len() == max;
        if !more {
            items.push(row);
        }
        Ok(!more)
    })?;
    let next = items.last().filter(|_| more).map(|last| last.key().to_owned());
    Ok(Page { items, next })
}

/// Like [`page`], of rows in order of their keys.
pub fn page_of<R: Row>(mut rows: Vec<R>, after: Option<&str>, max: usize) -> Result<Page<R>> {
    check_token(after)?;
    rows.retain(|row| after.is_none_or(|after| row.key() > after));
    let more = max > 0 && rows.len() > max;
    if more {
        rows.truncate(max);
    }
    let next = rows.last().filter(|_| more).map(|last| last.key().to_owned());
    Ok(Page { items: rows, next })
}

fn check_token(after: Option<&str>) -> Result<()> {
    match after {
        Some(token) if ids::name_of(token).is_none() => Err(Error::Busy(format!(
            "starting_token: {token:?} is not a token of this list; start from the beginning"
        ))),
        _ => Ok(()),
    }
}
