//! The files of a content volume, in the layout that kubelet uses for Secrets:
//!
//! ```text
//! NAME -> ..data/NAME     one for each file
//! ..data -> ..<16 hex>    the current generation
//! ..<16 hex>/NAME         its files
//! ```
//!
//! A refresh writes a new generation and then replaces `..data` by one rename, so a reader gets the
//! complete old file or the complete new one. The previous generation remains until the next call:
//! a reader that has opened the directory `..data` reads all files from one generation. The next
//! call removes the remains of a crash.
//!
//! Only the driver should write here, but an earlier version left the mount writable. Therefore
//! paths are not used (`Root`), existing files are never written to, and unexpected entries are
//! replaced or removed.

mod root;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use root::{Root, Sweep};

/// Mode of the files of a content volume: readable by all. The group and the setgid bit of
/// directories come from the root of the volume (volume_mount_group).
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;
/// Mode of initial files: writable by all, like the root of a volume that a pod of any user writes
/// to.
const SEED_MODE: u32 = 0o666;

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";

/// Files of a volume by name. The caller has validated the names. `Debug` does not print file
/// contents.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Content {
    files: BTreeMap<String, Vec<u8>>,
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.files.keys()).finish()
    }
}

impl Content {
    pub fn new(files: BTreeMap<String, Vec<u8>>) -> Self {
        Self { files }
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }
}

/// Atomically makes the volume mounted at `root` contain exactly these files. Does nothing if it
/// already does. On an error before the rename the old content is unchanged, and a repeated call
/// continues.
pub fn refresh(root: &Path, content: &Content) -> Result<()> {
    let at = || "writing the content of the volume".to_owned();
    let root = Root::open(root).context(at)?;
    let current = current_generation(&root);
    let is_kept = |name: &[u8]| {
        !name.starts_with(b"..") || name == DATA.as_bytes() || is_name(&current, name)
    };
    // First: the new generation may need the space of an unfinished one.
    Sweep::default().retain(&root, &is_kept).map_err(|error| explain(error, at))?;
    if !current.as_deref().is_some_and(|current| has_content(&root, current, content)) {
        let new = new_generation()?;
        if let Err(error) = write(&root, &new, content) {
            // The usual cause is lack of space, which the pod may need. The next call removes the
            // rest.
            let _ = Sweep::default().remove_tree(&root, new.as_bytes());
            return Err(explain(error, at));
        }
        make_current(&root, &new).map_err(|error| explain(error, at))?;
    }
    link_files(&root, content).map_err(|error| explain(error, at))
}

/// Writes the initial files into the volume mounted at `root`, which no pod has seen yet. A
/// repeated call writes them again.
pub fn seed(root: &Path, content: &Content) -> Result<()> {
    if content.is_empty() {
        return Ok(());
    }
    let at = || format!("writing the first files of {}", root.display());
    let root = Root::open(root).context(at)?;
    let write = || -> Result<()> {
        for (name, bytes) in &content.files {
            root.write(".", name, bytes, SEED_MODE)?;
        }
        Ok(())
    };
    write().map_err(|error| explain(error, at))
}

/// Adds the failed action. ENOSPC means that the volume is full, not the pool.
fn explain(error: Error, doing: impl Fn() -> String) -> Error {
    match error {
        Error::Io { source, .. } if is_full(&source) => Error::Exhausted(
            "volume_context: size: the files do not fit into the volume, which must hold the old and the new content; \
             request a larger size"
                .to_owned(),
        ),
        Error::Io { doing: step, source } => Error::Io { doing: format!("{}: {step}", doing()), source },
        other => other,
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

/// An I/O error that keeps its kind until [`explain`] interprets it.
fn io_error(step: &str, source: impl Into<io::Error>) -> Error {
    Error::Io { doing: step.to_owned(), source: source.into() }
}

/// A new unique name for a generation.
fn new_generation() -> Result<String> {
    let mut nonce = [0; 8];
    getrandom::fill(&mut nonce).map_err(|e| {
        Error::Failed(format!("failed to get random bytes for a directory name: {e}"))
    })?;
    Ok(format!("..{:016x}", u64::from_be_bytes(nonce)))
}

fn is_generation(name: &str) -> bool {
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    name.strip_prefix("..").is_some_and(|digits| digits.len() == 16 && digits.bytes().all(hex))
}

fn is_name(expected: &Option<String>, name: &[u8]) -> bool {
    expected.as_ref().is_some_and(|expected| expected.as_bytes() == name)
}

/// The current generation. `None` if the link has another target.
fn current_generation(root: &Root) -> Option<String> {
    let target = root.link(DATA.as_bytes())?.into_os_string().into_string().ok()?;
    (is_generation(&target) && root.is_directory(&target)).then_some(target)
}

/// Whether a generation contains exactly these files. An unreadable one does not.
fn has_content(root: &Root, generation: &str, content: &Content) -> bool {
    let compare = || -> io::Result<bool> {
        let mut count = 0;
        for name in root.names(generation)?.iter() {
            let expected = name?.to_str().ok().and_then(|name| content.files.get_key_value(name));
            let Some((name, bytes)) = expected else { return Ok(false) };
            let Some(mut file) = root.read(generation, name, bytes.len() as u64)? else {
                return Ok(false);
            };
            let mut found = Vec::with_capacity(bytes.len());
            file.by_ref().take(bytes.len() as u64 + 1).read_to_end(&mut found)?;
            if found != *bytes {
                return Ok(false);
            }
            count += 1;
        }
        Ok(count == content.files.len())
    };
    compare().unwrap_or(false)
}

/// Writes a new generation.
fn write(root: &Root, generation: &str, content: &Content) -> Result<()> {
    root.make_directory(generation, DIRECTORY_MODE)?;
    for (name, bytes) in &content.files {
        root.write(generation, name, bytes, FILE_MODE)?;
    }
    Ok(())
}

/// Makes a generation current.
fn make_current(root: &Root, generation: &str) -> Result<()> {
    if root.link(DATA.as_bytes()).is_none() {
        // Remove anything that is not a link.
        Sweep::default().remove_tree(root, DATA.as_bytes())?;
    }
    root.make_link(Path::new(generation), NEW_DATA)?;
    root.rename(NEW_DATA, DATA)?;
    reach("content.shown")
}

/// Creates one link for each file and removes all other entries except the data.
fn link_files(root: &Root, content: &Content) -> Result<()> {
    let is_wanted = |name: &[u8]| {
        let file = std::str::from_utf8(name).is_ok_and(|name| content.files.contains_key(name));
        // Hidden entries were removed before; the previous generation remains until the next call.
        name.starts_with(b"..") || (file && root.link(name) == Some(target(name)))
    };
    Sweep::default().retain(root, &is_wanted)?;
    for name in content.files.keys() {
        if root.link(name.as_bytes()).is_none() {
            root.make_link(&target(name.as_bytes()), name)?;
        }
    }
    Ok(())
}

/// The target of the link for a file.
fn target(name: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    Path::new(DATA).join(std::ffi::OsStr::from_bytes(name))
}

fn c_string(name: &[u8]) -> Result<CString> {
    CString::new(name).map_err(|e| io_error("naming a file", e))
}
