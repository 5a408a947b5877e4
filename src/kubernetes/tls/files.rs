//! Certificate and key in files that somebody else replaces: by rename, by a switched symbolic link as kubelet
//! does it, or in place. So what counts is the content, looked at once a second.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use sha2::{Digest, Sha256};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};

use super::certificates::{Certificates, Pair};
use crate::telemetry::shutdown::Shutdown;

/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// No file of certificates is longer, in bytes.
const MAX_FILE: u64 = 1 << 20;

impl Certificates {
    /// Reads certificate and key (PEM) from two files, those of --tls-cert and --tls-key. They are read
    /// again by what is returned beside.
    ///
    /// # Errors
    /// A file that cannot be read or is not what it should be, or a key of another certificate.
    pub fn from_files(cert: &Path, key: &Path) -> anyhow::Result<(Self, FilesWatcher)> {
        let files = Files { cert: cert.to_owned(), key: key.to_owned() };
        let Look { digest, found } = files.look();
        let certificates = Self::new(found?);
        certificates.warn_if_over();
        let watcher = FilesWatcher {
            certificates: certificates.clone(),
            files,
            served: digest,
            refused: None,
        };
        Ok((certificates, watcher))
    }

    fn warn_if_over(&self) {
        if self.not_after() < SystemTime::now() {
            tracing::warn!("--tls-cert: the certificate has expired; clients will refuse it");
        }
    }
}

#[derive(Debug, Clone)]
struct Files {
    cert: PathBuf,
    key: PathBuf,
}

/// What the files hold, and by what that is told from anything else.
struct Look {
    digest: [u8; 32],
    found: anyhow::Result<Pair>,
}

impl Files {
    /// Blocks.
    fn look(&self) -> Look {
        let contents = read("--tls-cert", &self.cert)
            .and_then(|cert| Ok((cert, read("--tls-key", &self.key)?)));
        let digest = match &contents {
            Ok((cert, key)) => digest(&[cert, key]),
            Err(error) => digest(&[format!("{error:#}").as_bytes()]),
        };
        let found = contents.and_then(|(cert, key)| {
            let (cert_file, key_file) = (self.cert.display(), self.key.display());
            Pair::from_pem(&cert, &key)
                .with_context(|| format!("--tls-cert {cert_file}, --tls-key {key_file}"))
        });
        Look { digest, found }
    }
}

fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_be_bytes());
        digest.update(part);
    }
    digest.finalize().into()
}

/// The content of a file that `flag` names, of at most 1 MiB.
///
/// # Errors
/// It cannot be read or is longer; with the flag's name.
pub fn read(flag: &str, path: &Path) -> anyhow::Result<Vec<u8>> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut content = Vec::new();
        File::open(path)?.take(MAX_FILE + 1).read_to_end(&mut content)?;
        Ok(content)
    };
    let content = read().with_context(|| format!("{flag} {}", path.display()))?;
    let small = content.len() as u64 <= MAX_FILE;
    anyhow::ensure!(small, "{flag} {}: longer than {MAX_FILE} bytes", path.display());
    Ok(content)
}

/// Looks at the files and replaces the certificate when they have changed.
#[derive(Debug)]
pub struct FilesWatcher {
    certificates: Certificates,
    files: Files,
    served: [u8; 32],
    refused: Option<Refused>,
}

/// What the files held when it could not be taken over.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Refused {
    digest: [u8; 32],
    told: bool,
}

impl FilesWatcher {
    /// Looks once a second until the end begins. What cannot be taken over is kept out, and the certificate
    /// stays what it was.
    pub async fn watch(mut self, shutdown: Shutdown) {
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = looks.tick() => {}
                // Until the very end: clients may come while others are drained.
                () = shutdown.ending() => return,
            }
            let files = self.files.clone();
            // A panic is in the log already.
            if let Ok(look) = spawn_blocking(move || files.look()).await {
                self.saw(look);
            }
        }
    }

    fn saw(&mut self, look: Look) {
        let Look { digest, found } = look;
        if digest == self.served {
            self.refused = None;
            return;
        }
        match found {
            Ok(pair) => {
                self.certificates.replace(pair);
                (self.served, self.refused) = (digest, None);
                tracing::info!("new connections get the changed certificate");
                self.certificates.warn_if_over();
            }
            Err(error) => self.refuse(digest, &error),
        }
    }

    /// Whoever replaces the files does it one after the other, so between two looks they may not fit.
    /// What is the same at the second look is meant to be so, and is told once.
    fn refuse(&mut self, digest: [u8; 32], error: &anyhow::Error) {
        let before = self.refused.filter(|before| before.digest == digest);
        self.refused = Some(Refused { digest, told: before.is_some() });
        if before.is_some_and(|before| !before.told) {
            self.certificates.reload_failed();
            let error = format!("{error:#}");
            tracing::warn!(error, "the changed certificate is not taken; the one before stays");
        }
    }
}
