//! The secrets that a driver requires in its calls (CSI, "Secrets Requirements"), from a directory
//! with a file for each, as a Secret is mounted in a pod.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use kubernetes::secret::Secrets;

/// Maximum bytes of a file: the limit of a whole Secret.
const MAX_BYTES: u64 = 1 << 20;

/// # Errors
/// The directory or a file cannot be read, or a file is too large or no UTF-8 text.
pub fn read(directory: &Path) -> Result<Secrets> {
    let shown = directory.display();
    let entries = fs::read_dir(directory).with_context(|| format!("--secrets {shown}"))?;
    let mut secrets = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("--secrets {shown}"))?.path();
        let named = || format!("--secrets {}", path.display());
        let name = path.file_name().and_then(|name| name.to_str()).with_context(named)?;
        // Of a Secret, the files are links into such a directory.
        let data = fs::metadata(&path).with_context(named)?;
        if name.starts_with("..") || data.is_dir() {
            continue;
        }
        ensure!(data.is_file() && data.len() <= MAX_BYTES, "{}: is no file of a secret", named());
        secrets.push((name.to_owned(), fs::read_to_string(&path).with_context(named)?));
    }
    Ok(secrets.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn each_file_of_a_mounted_secret_is_a_secret() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("..2026")).unwrap();
        fs::write(directory.path().join("..2026/userKey"), "hunter2").unwrap();
        symlink("..2026", directory.path().join("..data")).unwrap();
        symlink("..data/userKey", directory.path().join("userKey")).unwrap();
        let secrets = read(directory.path()).unwrap();
        assert_eq!(secrets.reveal(), [("userKey".to_owned(), "hunter2".to_owned())].into());
        fs::write(directory.path().join("binary"), [0xff]).unwrap();
        let error = read(directory.path()).unwrap_err();
        assert!(format!("{error:#}").contains("binary"), "{error:#}");
        assert!(read(Path::new("/none")).is_err());
    }
}
