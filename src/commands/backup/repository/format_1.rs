//! A new repository in the place of one of format 1, whose backups are lost. Only objects that
//! format 2 does not have are removed, and what is put is the same for all: it harms no repository
//! that another process has made since, whenever it continues.

use std::path::Path;

use anyhow::Result;

use super::names::{BACKUPS, DESCRIPTION};
use super::store::Store;
use super::{Description, Location, MAX_DOCUMENT, make, other_format};
use crate::backup::document::{self, OtherVersion};

/// Where format 1 had its locks.
const LOCKS: &str = "locks";
/// The random part of its ids had half of the digits.
const ID_LENGTH: usize = "00000000T000000000Z-00000000".len();

fn is_own(path: &str) -> bool {
    let mut parts = path.split('/');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(LOCKS), Some(_), _) => true,
        (Some(BACKUPS), Some(id), Some(_)) => id.len() == ID_LENGTH,
        _ => false,
    }
}

/// Does nothing where there is no repository of format 1.
///
/// # Errors
/// The place cannot be read or written, or has a repository of a third format.
pub async fn replace(location: &Location, credentials: Option<&Path>) -> Result<()> {
    let root = location.directory();
    if root.is_some_and(|root| !root.exists()) {
        return Ok(());
    }
    let store = Store::new(location.store(false, credentials)?, root.map(Path::to_owned));
    let Some(description) = store.get(DESCRIPTION, MAX_DOCUMENT).await? else { return Ok(()) };
    let found = document::read::<Description>("repository", DESCRIPTION, &description);
    let is_old = match found {
        Ok(_) => false,
        Err(error) => match error.downcast_ref::<OtherVersion>() {
            Some(OtherVersion { version: 1, .. }) => true,
            _ => return Err(other_format(location, error)),
        },
    };
    for object in store.list(None).await? {
        if is_own(&object.path) {
            store.delete(&object.path).await?;
        }
    }
    if is_old {
        make(&store, root).await?;
    }
    Ok(())
}
