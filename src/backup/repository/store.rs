//! Objects by path, for all kinds of repository. A path is relative to the repository.

use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result};
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions};
use tokio_stream::StreamExt;

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    objects: Arc<dyn ObjectStore>,
}

/// An object of a list.
#[derive(Debug)]
pub struct Listed {
    pub path: String,
    pub modified: SystemTime,
}

impl Store {
    pub fn new(objects: Arc<dyn ObjectStore>) -> Self {
        Self { objects }
    }

    /// Writes an object, or replaces it. Durable and whole when this returns.
    pub async fn put(&self, path: &str, bytes: Vec<u8>) -> Result<()> {
        let at = Path::from(path);
        let put = self.objects.put(&at, bytes.into());
        put.await.map(|_| ()).with_context(|| format!("write {path}"))
    }

    /// Writes an object that must not exist. Returns `false` if it does.
    pub async fn create(&self, path: &str, bytes: Vec<u8>) -> Result<bool> {
        let options = PutOptions::from(PutMode::Create);
        match self.objects.put_opts(&Path::from(path), bytes.into(), options).await {
            Ok(_) => Ok(true),
            Err(Error::AlreadyExists { .. }) => Ok(false),
            Err(error) => Err(error).with_context(|| format!("create {path}")),
        }
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
        anyhow::ensure!(size <= limit, "{path} is damaged: it has {size} bytes, {limit} at most");
        Ok(Some(found.bytes().await.with_context(read)?.into()))
    }

    /// Bytes of an object from `offset` on.
    pub async fn get_range(&self, path: &str, offset: u64, length: u64) -> Result<Vec<u8>> {
        let range = offset..offset.saturating_add(length);
        let bytes = self.objects.get_range(&Path::from(path), range).await;
        Ok(bytes.with_context(|| format!("read {length} bytes of {path} at {offset}"))?.into())
    }

    /// The objects whose path begins with `directory/`.
    pub async fn list(&self, directory: &str) -> Result<Vec<Listed>> {
        let path = Path::from(directory);
        let mut objects = self.objects.list(Some(&path));
        let mut listed = Vec::new();
        while let Some(object) = objects.next().await {
            let object = object.with_context(|| format!("list {directory}"))?;
            listed.push(Listed {
                path: object.location.to_string(),
                modified: object.last_modified.into(),
            });
        }
        Ok(listed)
    }

    /// The names that follow `directory/` in the paths of objects, up to the next `/`.
    pub async fn directories(&self, directory: &str) -> Result<Vec<String>> {
        let listed = self.objects.list_with_delimiter(Some(&Path::from(directory))).await;
        let listed = listed.with_context(|| format!("list {directory}"))?;
        let name = |path: &Path| path.filename().map(str::to_owned);
        Ok(listed.common_prefixes.iter().filter_map(name).collect())
    }

    /// Whether there is any object, of whatever path.
    pub async fn is_empty(&self) -> Result<bool> {
        match self.objects.list(None).next().await {
            None => Ok(true),
            Some(first) => first.map(|_| false).context("list the repository"),
        }
    }

    /// Removes an object, if it exists.
    pub async fn delete(&self, path: &str) -> Result<()> {
        match self.objects.delete(&Path::from(path)).await {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error).with_context(|| format!("delete {path}")),
        }
    }

    /// Removes all objects below `directory/`, as many at once as the store can.
    pub async fn delete_all(&self, directory: &str) -> Result<()> {
        let paths = self.objects.list(Some(&Path::from(directory)));
        let paths = paths.map(|object| object.map(|object| object.location));
        let mut deleted = self.objects.delete_stream(Box::pin(paths));
        while let Some(outcome) = deleted.next().await {
            match outcome {
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error).with_context(|| format!("delete {directory}")),
            }
        }
        Ok(())
    }
}
