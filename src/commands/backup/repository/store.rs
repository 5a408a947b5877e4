//! Objects by path, for all kinds of repository. A path is relative to the repository. Every
//! operation that changes something is one request: no multipart upload, which no list shows.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result};
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutPayload};
use tokio_stream::StreamExt;

use crate::backup::failure::Failure;
use common::fail_point::hit;

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    objects: Arc<dyn ObjectStore>,
    /// Of a repository in a directory.
    root: Option<PathBuf>,
}

/// An object of a list.
#[derive(Debug)]
pub struct Listed {
    pub path: String,
    pub size: u64,
    /// By the clock of the store.
    pub modified: SystemTime,
}

impl Store {
    pub fn new(objects: Arc<dyn ObjectStore>, root: Option<PathBuf>) -> Self {
        Self { objects, root }
    }

    /// Writes an object. Durable and whole when this returns.
    pub async fn put(&self, path: &str, bytes: impl Into<PutPayload>) -> Result<()> {
        hit("backup.put")?;
        let at = Path::from(path);
        let put = self.objects.put(&at, bytes.into());
        put.await.map(|_| ()).with_context(|| format!("write {path}"))?;
        Ok(hit("backup.was_put")?)
    }

    /// The bytes of an object; `None` if there is none. An object larger than `limit` bytes is an
    /// error.
    pub async fn get(&self, path: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        let read = || format!("read {path}");
        let found = match self.objects.get(&Path::from(path)).await {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error).with_context(read),
        };
        let size = found.meta.size;
        anyhow::ensure!(
            size <= limit,
            Failure::damaged(format!("{path} is damaged: it has {size} bytes, {limit} at most"))
        );
        Ok(Some(found.bytes().await.with_context(read)?.into()))
    }

    /// Bytes of an object from `offset` on.
    pub async fn get_range(&self, path: &str, offset: u64, length: u64) -> Result<Vec<u8>> {
        let range = offset..offset.saturating_add(length);
        let bytes = self.objects.get_range(&Path::from(path), range).await;
        let bytes = bytes.map_err(|error| match error {
            Error::NotFound { .. } => Failure::damaged(format!("{path} is missing")).into(),
            error => anyhow::Error::from(error),
        });
        Ok(bytes.with_context(|| format!("read {length} bytes of {path} at {offset}"))?.into())
    }

    /// The objects whose path begins with `directory/`; all without one.
    pub async fn list(&self, directory: Option<&str>) -> Result<Vec<Listed>> {
        let path = directory.map(Path::from);
        let mut objects = self.objects.list(path.as_ref());
        let mut listed = Vec::new();
        while let Some(object) = objects.next().await {
            let shown = directory.unwrap_or("the repository");
            let object = object.with_context(|| format!("list {shown}"))?;
            listed.push(Listed {
                path: object.location.to_string(),
                size: object.size,
                modified: object.last_modified.into(),
            });
        }
        Ok(listed)
    }

    /// Removes an object, if it exists.
    pub async fn delete(&self, path: &str) -> Result<()> {
        hit("backup.delete")?;
        match self.objects.delete(&Path::from(path)).await {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(hit("backup.deleted")?),
            Err(error) => Err(error).with_context(|| format!("delete {path}")),
        }
    }

    /// Removes objects, as many at once as the store can.
    pub async fn delete_all(&self, paths: Vec<String>) -> Result<()> {
        if paths.is_empty() {
            return Ok(());
        }
        hit("backup.delete")?;
        let paths = tokio_stream::iter(paths)
            .map(|path| Ok(Path::parse(&path).unwrap_or_else(|_| Path::from(path))));
        let mut deleted = self.objects.delete_stream(Box::pin(paths));
        while let Some(outcome) = deleted.next().await {
            match outcome {
                Ok(_) | Err(Error::NotFound { .. }) => hit("backup.deleted")?,
                Err(error) => return Err(error).context("delete objects"),
            }
        }
        Ok(())
    }

    /// Removes directories with the files that a killed process was writing, which no list shows.
    /// What a live one writes at this moment is found by a later prune.
    pub fn clear(&self, directories: &[String]) {
        let Some(root) = &self.root else { return };
        for directory in directories {
            let _ = std::fs::remove_dir_all(root.join(directory));
        }
    }

    /// Removes files of the directory `directory` that killed processes were writing, and
    /// directories without an object, unless they are newer than `age` at `now`.
    pub fn sweep(&self, directory: &str, known: impl Fn(&str) -> bool, before: SystemTime) {
        let Some(root) = &self.root else { return };
        let Ok(entries) = root.join(directory).read_dir() else { return };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_old = entry.metadata().and_then(|meta| meta.modified());
            if !is_old.is_ok_and(|modified| modified < before) {
                continue;
            }
            // What cannot be removed is found again by the next prune.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if !known(&name) {
                    let _ = std::fs::remove_dir_all(entry.path());
                }
            } else if is_staged(&name) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// Whether object_store writes to such a file before it renames it: `NAME#NUMBER`.
fn is_staged(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name.rsplit_once('#').is_some_and(|(_, number)| is_number(number))
}
