//! The files of a content volume, laid out as kubelet lays out those of a Secret:
//!
//! ```text
//! NAME -> ..data/NAME     one for each file
//! ..data -> ..<16 hex>    the generation that is shown
//! ..<16 hex>/NAME         its files
//! ```
//!
//! A refresh writes a new generation beside the one that is shown and then exchanges `..data` by one rename: whoever opens
//! a name gets the old file or the new one, whole. The generation before stays until the next call, so that whoever has
//! opened the directory `..data` reads all files of one generation from it. What a crash left is swept by the next call.
//!
//! Only the driver should write here, but a pod whose mount is writable by mistake may have: so nothing is reached by a
//! path (`Root`), nothing that is there is written to, and whatever is not as it should be is replaced or removed.

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

/// What every file of a volume of content may be used for: read by anybody. Its group and the setgid bit of directories
/// come from the root of the volume (volume_mount_group).
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;
/// In a volume that a pod of any user writes to, whose root everybody may write to, nobody is kept from a file either.
const SEED_MODE: u32 = 0o666;

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";

/// Files of a volume by name, which is checked to be one. What they hold is not printed.
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

/// Makes the volume mounted at `root` hold these files and no others, from one moment to the next. What is so already is
/// not touched. If it fails before that moment the old content stays as it was; repeated, it goes on.
pub fn refresh(root: &Path, content: &Content) -> Result<()> {
    let at = || format!("writing the content of {}", root.display());
    let root = Root::open(root).context(at)?;
    let shown = shown(&root);
    let is_kept =
        |name: &[u8]| !name.starts_with(b"..") || name == DATA.as_bytes() || is_name(&shown, name);
    // First of all: the room of a generation that was not finished is needed for the new one.
    Sweep::default().all_but(&root, &is_kept).map_err(|error| told(error, at))?;
    if !shown.as_deref().is_some_and(|shown| holds(&root, shown, content)) {
        let new = generation()?;
        if let Err(error) = write(&root, &new, content) {
            // For want of room, most likely, which the pod may need. What stays is swept by the next call.
            let _ = Sweep::default().tree(&root, new.as_bytes());
            return Err(told(error, at));
        }
        show(&root, &new).map_err(|error| told(error, at))?;
    }
    name_files(&root, content).map_err(|error| told(error, at))
}

/// Writes the files that a volume begins with into the one mounted at `root`, which no pod has seen yet. Repeated, it
/// writes them again.
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
    write().map_err(|error| told(error, at))
}

/// Adds what was being done. The volume lacks room, and not the pool.
fn told(error: Error, doing: impl Fn() -> String) -> Error {
    match error {
        Error::Io { source, .. } if is_full(&source) => Error::Exhausted(
            "volume_context: size: the files do not fit into the volume, which holds what it shows and what comes next; ask \
             for a larger size"
                .to_owned(),
        ),
        Error::Io { doing: step, source } => Error::Io { doing: format!("{}: {step}", doing()), source },
        other => other,
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

/// An I/O error that keeps its kind until [`told`] says what it means here.
fn io_error(step: &str, source: impl Into<io::Error>) -> Error {
    Error::Io { doing: step.to_owned(), source: source.into() }
}

/// A name that nothing has.
fn generation() -> Result<String> {
    let mut nonce = [0; 8];
    getrandom::fill(&mut nonce)
        .map_err(|e| Error::Failed(format!("no random bits for a new directory: {e}")))?;
    Ok(format!("..{:016x}", u64::from_be_bytes(nonce)))
}

fn is_generation(name: &str) -> bool {
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    name.strip_prefix("..").is_some_and(|digits| digits.len() == 16 && digits.bytes().all(hex))
}

fn is_name(wanted: &Option<String>, name: &[u8]) -> bool {
    wanted.as_ref().is_some_and(|wanted| wanted.as_bytes() == name)
}

/// The generation that is shown. A link to anywhere else shows none.
fn shown(root: &Root) -> Option<String> {
    let target = root.link(DATA.as_bytes())?.into_os_string().into_string().ok()?;
    (is_generation(&target) && root.is_directory(&target)).then_some(target)
}

/// Whether a generation has these files and no others. What cannot be read is not what is wanted.
fn holds(root: &Root, generation: &str, content: &Content) -> bool {
    let compare = || -> io::Result<bool> {
        let mut count = 0;
        for name in root.names(generation)?.iter() {
            let wanted = name?.to_str().ok().and_then(|name| content.files.get_key_value(name));
            let Some((name, bytes)) = wanted else { return Ok(false) };
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

/// A new generation, whole before anybody sees it.
fn write(root: &Root, generation: &str, content: &Content) -> Result<()> {
    root.make_directory(generation, DIRECTORY_MODE)?;
    for (name, bytes) in &content.files {
        root.write(generation, name, bytes, FILE_MODE)?;
    }
    Ok(())
}

/// The moment.
fn show(root: &Root, generation: &str) -> Result<()> {
    if root.link(DATA.as_bytes()).is_none() {
        // Not a link, if anything.
        Sweep::default().tree(root, DATA.as_bytes())?;
    }
    root.make_link(Path::new(generation), NEW_DATA)?;
    root.rename(NEW_DATA, DATA)?;
    reach("content.shown")
}

/// One link for each file, and nothing else beside the data.
fn name_files(root: &Root, content: &Content) -> Result<()> {
    let is_wanted = |name: &[u8]| {
        let file = std::str::from_utf8(name).is_ok_and(|name| content.files.contains_key(name));
        // What is hidden was swept before; a former generation stays until the next call.
        name.starts_with(b"..") || (file && root.link(name) == Some(target(name)))
    };
    Sweep::default().all_but(root, &is_wanted)?;
    for name in content.files.keys() {
        if root.link(name.as_bytes()).is_none() {
            root.make_link(&target(name.as_bytes()), name)?;
        }
    }
    Ok(())
}

/// Where the link of a name leads.
fn target(name: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    Path::new(DATA).join(std::ffi::OsStr::from_bytes(name))
}

fn c_string(name: &[u8]) -> Result<CString> {
    CString::new(name).map_err(|e| io_error("naming a file", e))
}
