//! Where a repository is: a directory, a bucket of S3 with a prefix, or a PersistentVolumeClaim.

use std::fmt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::prefix::PrefixStore;
use object_store::{ClientConfigKey, ObjectStore, RetryConfig};

use crate::backup::failure::Failure;
use kubernetes::name;

/// One file of credentials is short; a larger one is not what was meant.
const MAX_CREDENTIAL_BYTES: u64 = 64 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    Directory(PathBuf),
    S3 {
        bucket: String,
        prefix: String,
    },
    /// A PersistentVolumeClaim, which a mover pod mounts.
    Claim {
        name: String,
        /// Relative to the root of its filesystem, and not empty.
        path: String,
    },
}

impl FromStr for Location {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(claim) = text.strip_prefix("claim:") {
            return Self::claim(claim);
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            if text.is_empty() {
                return Err(
                    "is empty; write a directory, s3://BUCKET/PREFIX or claim:NAME".to_owned()
                );
            }
            // Such as s3:BUCKET or HOST:/PATH, which mean another place to other programs.
            if let Some((word, _)) = text.split_once(':')
                && !word.contains('/')
            {
                return Err(format!(
                    "{word}: is not supported; write ./{text} for a directory of this name, \
                     s3://BUCKET/PREFIX or claim:NAME"
                ));
            }
            return Ok(Self::Directory(PathBuf::from(text)));
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        match scheme {
            "s3" if !bucket.is_empty() => Ok(Self::S3 {
                bucket: bucket.to_owned(),
                prefix: prefix.trim_matches('/').to_owned(),
            }),
            "s3" => Err("names no bucket; write s3://BUCKET/PREFIX".to_owned()),
            "file" => Ok(Self::Directory(PathBuf::from(rest))),
            other => Err(format!(
                "{other}:// is not supported; write a directory, s3://BUCKET or claim:NAME"
            )),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(out, "{}", path.display()),
            Self::S3 { bucket, prefix } if prefix.is_empty() => write!(out, "s3://{bucket}"),
            Self::S3 { bucket, prefix } => write!(out, "s3://{bucket}/{prefix}"),
            Self::Claim { name, path } => write!(out, "claim:{name}/{path}"),
        }
    }
}

impl Location {
    pub fn is_bucket(&self) -> bool {
        matches!(self, Self::S3 { .. })
    }

    /// Of a repository in a directory.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Self::Directory(path) => Some(path),
            Self::S3 { .. } | Self::Claim { .. } => None,
        }
    }

    fn claim(text: &str) -> Result<Self, String> {
        let (claim, path) = text.split_once('/').unwrap_or((text, ""));
        let path = match path.trim_matches('/') {
            // The root of a filesystem is not empty: it has lost+found.
            "" => "backups",
            path => path,
        };
        if path.split('/').any(|part| part == "..") {
            return Err("leads out of the claim; write claim:NAME/PATH without ..".to_owned());
        }
        let name = name::object(claim).map_err(|error| format!("the claim {claim:?} {error}"))?;
        Ok(Self::Claim { name, path: path.to_owned() })
    }

    /// # Errors
    /// A directory is on a filesystem whose clients cache what a directory holds, so a list may lack
    /// what another machine has put. Writers and prunes rely on lists.
    pub fn check_lists(&self, is_only_machine: bool) -> Result<()> {
        let Self::Directory(path) = self else { return Ok(()) };
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        // A directory that is made later is on the filesystem of the first one that exists.
        let path = std::path::absolute(path)?;
        let existing = path.ancestors().find_map(|path| path.canonicalize().ok());
        match existing.and_then(|path| cached_filesystem(&mounts, &path)) {
            Some(kind) if !is_only_machine => bail!(
                "--repository {self} is on {kind}, whose lists may be stale; mount it with \
                 actimeo=0, or set --one-machine if no other machine writes to the repository"
            ),
            _ => Ok(()),
        }
    }

    /// Opens the store. A missing directory is made if `create` is set, readable by its owner
    /// alone.
    ///
    /// # Errors
    /// There is no such directory, or the environment or the files of credentials cannot be used.
    pub fn store(&self, create: bool, credentials: Option<&Path>) -> Result<Arc<dyn ObjectStore>> {
        match self {
            Self::Directory(_) if credentials.is_some() => {
                bail!("--s3-credentials: the repository {self} is a directory")
            }
            Self::Directory(path) => {
                if create {
                    let mut builder = std::fs::DirBuilder::new();
                    let made = builder.recursive(true).mode(0o700).create(path);
                    made.with_context(|| format!("make the directory {self}"))?;
                }
                ensure!(
                    path.is_dir(),
                    Failure::no_repository(format!(
                        "--repository {self}: there is no such directory"
                    ))
                );
                let store = LocalFileSystem::new_with_prefix(path)
                    .with_context(|| format!("--repository {self}: open the directory"))?;
                Ok(Arc::new(store.with_fsync(true)))
            }
            Self::Claim { .. } => {
                bail!("--repository {self}: only a mover pod can mount a claim; set --namespace")
            }
            Self::S3 { bucket, prefix } => {
                let s3 = s3(bucket, credentials)
                    .with_context(|| format!("--repository {self}: configure S3"))?;
                Ok(Arc::new(PrefixStore::new(s3, prefix.as_str())))
            }
        }
    }
}

/// The type of the network filesystem that holds a path, if its clients cache directories.
fn cached_filesystem(mountinfo: &str, path: &Path) -> Option<String> {
    const CACHED: [&str; 8] = ["nfs", "nfs4", "cifs", "smb3", "9p", "afs", "coda", "fuse"];
    let mounts = mountinfo.lines().filter_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let point = PathBuf::from(mount.split(' ').nth(4)?.replace("\\040", " "));
        let mut fields = filesystem.split(' ');
        let (kind, options) = (fields.next()?, fields.nth(1).unwrap_or_default());
        path.starts_with(&point).then(|| (point.as_os_str().len(), kind, options.to_owned()))
    });
    // The last of several at one place is on top.
    let (_, kind, options) = mounts.max_by_key(|(length, ..)| *length)?;
    let is_cached = CACHED.contains(&kind) || kind.starts_with("fuse.");
    let off = ["noac", "actimeo=0", "acdirmax=0"];
    let is_off = options.split(',').any(|option| off.contains(&option));
    (is_cached && !is_off).then(|| kind.to_owned())
}

/// The environment (`AWS_*`) is the configuration; files of the same names, as a mounted Secret has
/// them, come first.
fn s3(bucket: &str, credentials: Option<&Path>) -> Result<object_store::aws::AmazonS3> {
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry());
    // An object has up to 17 MiB, and a line may be slow: the default of 30 seconds is for small
    // ones.
    let timeout = AmazonS3ConfigKey::Client(ClientConfigKey::Timeout);
    builder = builder.with_config(timeout, "300 seconds");
    for (key, value) in credentials.map(read_credentials).transpose()?.unwrap_or_default() {
        builder = builder.with_config(key, value);
    }
    Ok(builder.build()?)
}

/// A server that does not answer is reported after about ten seconds, and not after minutes.
fn retry() -> RetryConfig {
    RetryConfig {
        max_retries: 6,
        retry_timeout: Duration::from_secs(120),
        ..RetryConfig::default()
    }
}

/// The files of a directory, each a setting named as its environment variable. Files of other names
/// are an error: a typing mistake must not select other credentials.
fn read_credentials(directory: &Path) -> Result<Vec<(AmazonS3ConfigKey, String)>> {
    let shown = directory.display();
    let entries =
        directory.read_dir().with_context(|| format!("--s3-credentials {shown}: read"))?;
    let mut settings = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // Kubernetes keeps the files of a Secret in a hidden directory.
        if name.starts_with('.') {
            continue;
        }
        let key: AmazonS3ConfigKey = name.to_ascii_lowercase().parse().map_err(|_| {
            anyhow::anyhow!(
                "--s3-credentials {shown}: {name} is not a setting; name files such as \
                 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        })?;
        let path = entry.path();
        let size = path.metadata().with_context(|| format!("read {}", path.display()))?.len();
        if size > MAX_CREDENTIAL_BYTES {
            bail!("--s3-credentials {shown}: {name} has {size} bytes");
        }
        let value = std::fs::read_to_string(&path);
        let value = value.with_context(|| format!("read {}", path.display()))?;
        settings.push((key, value.trim_end_matches(['\r', '\n']).to_owned()));
    }
    if settings.is_empty() {
        bail!("--s3-credentials {shown}: no file in it");
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_a_directory_a_bucket_or_a_claim() {
        let parse = |text: &str| text.parse::<Location>();
        assert_eq!(parse("/a/b").unwrap(), Location::Directory("/a/b".into()));
        assert_eq!(parse("s3://b/p/q/").unwrap().to_string(), "s3://b/p/q");
        assert_eq!(parse("s3://b").unwrap().to_string(), "s3://b");
        assert_eq!(parse("claim:c").unwrap().to_string(), "claim:c/backups");
        assert_eq!(parse("claim:c/p/q/").unwrap().to_string(), "claim:c/p/q");
        assert_eq!(parse("./a:b").unwrap(), Location::Directory("./a:b".into()));
        assert_eq!(parse("a/b:c").unwrap(), Location::Directory("a/b:c".into()));
        assert!(parse("").is_err());
        let wrong = "s3:// s3:///p gs://b http://h/p claim: claim:A claim:c/../d s3:b/p S3:b \
                     sftp:u@h:/p host:/p u@h:p file:/p claims:c :p";
        for wrong in wrong.split(' ') {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_filesystem_that_caches_directories_is_recognised() {
        let mounts = "\
            22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
            30 22 0:40 / /nfs rw shared:2 - nfs4 host:/x rw,vers=4.2,acdirmax=60\n\
            31 30 0:41 / /nfs/fresh rw - nfs host:/y rw,acregmin=0,acdirmax=0\n\
            32 22 0:42 / /with\\040blank rw - fuse.sshfs host: rw\n\
            33 22 0:43 / /ceph rw - ceph host: rw\n";
        let found = |path: &str| cached_filesystem(mounts, Path::new(path));
        assert_eq!(found("/nfs/a/b").as_deref(), Some("nfs4"));
        assert_eq!(found("/with blank/a").as_deref(), Some("fuse.sshfs"));
        for fine in ["/nfs/fresh/a", "/ceph/a", "/home", "/nfsd"] {
            assert_eq!(found(fine), None, "{fine}");
        }
    }

    #[test]
    fn an_unknown_credential_file_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let error = read_credentials(directory.path()).unwrap_err().to_string();
        assert!(error.contains("no file in it"), "{error}");
        std::fs::write(directory.path().join("AWS_ACCESS_KEY_ID"), "id\n").unwrap();
        let found = read_credentials(directory.path()).unwrap();
        assert_eq!(found, [(AmazonS3ConfigKey::AccessKeyId, "id".to_owned())]);
        std::fs::write(directory.path().join("AWS_SECRET"), "hidden").unwrap();
        let error = read_credentials(directory.path()).unwrap_err().to_string();
        assert!(error.contains("AWS_SECRET is not") && !error.contains("hidden"), "{error}");
    }
}
