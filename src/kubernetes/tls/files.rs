//! Certificate and key from files that another process replaces: by rename, by a switched symbolic
//! link (kubelet), or in place. Therefore the content is compared, every second.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use sha2::{Digest, Sha256};
use tokio::time::{MissedTickBehavior, interval};

use super::certificates::{Certificates, Pair};
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum bytes of a file.
const MAX_FILE: u64 = 1 << 20;

impl Certificates {
    /// Reads certificate and key (PEM) from the files of --tls-cert and --tls-key. The returned
    /// watcher reloads them.
    ///
    /// # Errors
    /// A file cannot be read or has other content, or the key belongs to another certificate.
    pub fn from_files(cert: &Path, key: &Path) -> anyhow::Result<(Self, FilesWatcher)> {
        let files = Files { cert: cert.to_owned(), key: key.to_owned() };
        let Content { digest, found } = files.read();
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

/// The content of the files, and a digest to detect changes.
struct Content {
    digest: [u8; 32],
    found: anyhow::Result<Pair>,
}

impl Files {
    /// Reads the files. Blocks.
    fn read(&self) -> Content {
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
        Content { digest, found }
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

/// Reads a file of at most 1 MiB. `flag` names the file in errors.
///
/// # Errors
/// It cannot be read or is larger.
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

/// Polls the files and replaces the certificate when they change.
#[derive(Debug)]
pub struct FilesWatcher {
    certificates: Certificates,
    files: Files,
    served: [u8; 32],
    refused: Option<Refused>,
}

/// The rejected content of the files.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Refused {
    digest: [u8; 32],
    logged: bool,
}

impl FilesWatcher {
    /// Polls every second until the process ends. Invalid content is rejected, and the current
    /// certificate is kept.
    pub async fn watch(mut self, shutdown: Shutdown) {
        let mut polls = interval(POLL_INTERVAL);
        polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = polls.tick() => {}
                // Until the process ends: clients may connect while others are drained.
                () = shutdown.ending() => return,
            }
            let files = self.files.clone();
            // A panic is already in the log.
            if let Ok(content) = task::blocking(move || files.read()).await {
                self.update(content);
            }
        }
    }

    fn update(&mut self, content: Content) {
        let Content { digest, found } = content;
        if digest == self.served {
            self.refused = None;
            return;
        }
        match found {
            Ok(pair) => {
                self.certificates.replace(pair);
                (self.served, self.refused) = (digest, None);
                tracing::info!("new connections use the changed certificate");
                self.certificates.warn_if_over();
            }
            Err(error) => self.refuse(digest, &error),
        }
    }

    /// Files are replaced one after the other, so they may not match at one poll. Content that is
    /// unchanged at the next poll is final, and its error is logged once.
    fn refuse(&mut self, digest: [u8; 32], error: &anyhow::Error) {
        let before = self.refused.filter(|before| before.digest == digest);
        self.refused = Some(Refused { digest, logged: before.is_some() });
        if before.is_some_and(|before| !before.logged) {
            self.certificates.reload_failed();
            let error = format!("{error:#}");
            tracing::warn!(error, "rejected the changed certificate; keeping the current one");
        }
    }
}
