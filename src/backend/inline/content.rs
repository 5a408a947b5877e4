//! The files of a content volume.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use super::super::error::{Error, Result};

/// Files of a volume by name, which is checked to be one. What they hold is not printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Content {
    files: BTreeMap<String, Vec<u8>>,
    has_secrets: bool,
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.files.keys()).finish()
    }
}

impl Content {
    /// `has_secrets`: whether any of it must not be found on the disk afterwards.
    pub fn new(files: BTreeMap<String, Vec<u8>>, has_secrets: bool) -> Self {
        Self { files, has_secrets }
    }

    pub fn has_secrets(&self) -> bool {
        self.has_secrets
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }
}

/// Makes the volume mounted at `root` hold these files and no others, from one moment to the next.
pub fn refresh(_root: &Path, content: &Content) -> Result<()> {
    if content.is_empty() { Ok(()) } else { Err(Error::Failed("content is not built yet".into())) }
}

/// Writes the files that a volume begins with into the one mounted at `root`, which is new.
pub fn seed(_root: &Path, content: &Content) -> Result<()> {
    if content.is_empty() { Ok(()) } else { Err(Error::Failed("content is not built yet".into())) }
}
