//! What clients are to trust, on its way from who keeps the authorities to everything in which it is published, and back: who keeps
//! them is told what clients find in each place.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::files;
use crate::telemetry::complaint::Complaint;
use crate::telemetry::shutdown::Shutdown;

/// Time between two looks at a file.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Certificates of authorities in PEM, which may change at any time. Empty: not known well enough to be published now.
#[derive(Debug)]
pub struct Bundles {
    pem: watch::Receiver<String>,
    published: watch::Sender<Vec<String>>,
}

/// One object, or one of another kind, in which the certificates are published.
#[derive(Debug)]
pub struct Place {
    /// What is to be published.
    pub pem: watch::Receiver<String>,
    published: watch::Sender<Vec<String>>,
    index: usize,
}

/// What clients find, as far as it was told.
#[derive(Debug)]
pub(super) struct Published(watch::Receiver<Vec<String>>);

impl Bundles {
    pub(super) fn new(pem: watch::Receiver<String>) -> (Self, Published) {
        let (published, told) = watch::channel(Vec::new());
        (Self { pem, published }, Published(told))
    }

    /// A place for whoever publishes. A next authority does not sign before it is in all of them: so all are to be taken
    /// before the first one is used.
    pub fn place(&self) -> Place {
        let mut index = 0;
        self.published.send_modify(|places| {
            index = places.len();
            places.push(String::new());
        });
        Place { pem: self.pem.clone(), published: self.published.clone(), index }
    }

    /// The authorities of a file, read again when it changes. `flag` names it.
    ///
    /// # Errors
    /// The file cannot be read or holds something else; which.
    pub fn of_file(flag: &'static str, file: &Path, shutdown: Shutdown) -> anyhow::Result<Self> {
        let (sender, pem) = watch::channel(authorities(flag, file)?);
        let file = file.to_owned();
        tokio::spawn(async move {
            tokio::select! {
                () = follow(flag, file, sender) => {}
                () = shutdown.draining() => {}
            }
        });
        Ok(Self::new(pem).0)
    }
}

impl Place {
    /// Tells what clients find here now, in PEM.
    pub fn tell(&self, pem: &str) {
        self.published.send_if_modified(|places| match places.get_mut(self.index) {
            Some(place) if place != pem => {
                pem.clone_into(place);
                true
            }
            _ => false,
        });
    }
}

impl Published {
    /// Whether clients find the certificate wherever they may look.
    pub(super) fn everywhere(&self, certificate: &str) -> bool {
        let places = self.0.borrow();
        !places.is_empty() && places.iter().all(|pem| pem.contains(certificate.trim_end()))
    }
}

/// What clients may see of a file: certificates that can be trusted, and never a key.
fn authorities(flag: &'static str, file: &Path) -> anyhow::Result<String> {
    let content = files::read(flag, file)?;
    let name = || format!("{flag} {}", file.display());
    let text = String::from_utf8(content).map_err(|_| anyhow::anyhow!("{}: not text", name()))?;
    anyhow::ensure!(!text.contains("PRIVATE KEY"), "{}: holds a private key", name());
    super::client_config(text.as_bytes()).with_context(name)?;
    Ok(text)
}

async fn follow(flag: &'static str, file: PathBuf, pem: watch::Sender<String>) {
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut complaint = Complaint::default();
    loop {
        looks.tick().await;
        let path = file.clone();
        // A panic is in the log already.
        let Ok(found) = tokio::task::spawn_blocking(move || authorities(flag, &path)).await else {
            continue;
        };
        match found {
            Ok(text) => {
                pem.send_if_modified(|pem| std::mem::replace(pem, text.clone()) != text);
                complaint.is_over();
            }
            Err(error) => {
                let error = format!("{error:#}");
                if complaint.is_new(&error) {
                    tracing::warn!(
                        error,
                        "the changed authorities are not taken; those before stay"
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn a_certificate_counts_as_published_when_it_is_in_every_place() {
        let (bundles, published) = Bundles::new(watch::channel(String::new()).1);
        assert!(!published.everywhere("next\n"), "nobody publishes yet");
        let (one, two) = (bundles.place(), bundles.place());
        one.tell("now\nnext\n");
        assert!(!published.everywhere("next\n"), "one place lacks it");
        two.tell("now\nnext\n");
        assert!(published.everywhere("next\n"));
        one.tell("now\n");
        assert!(!published.everywhere("next\n"), "it was taken out of one");
    }

    #[test]
    fn a_private_key_is_never_published() {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("ca.crt");
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(["x".to_owned()]).unwrap();
        let cert = params.self_signed(&key).unwrap().pem();
        std::fs::write(&file, &cert).unwrap();
        assert_eq!(authorities("--ca", &file).unwrap(), cert);
        for bad in [format!("{cert}{}", key.serialize_pem()), String::new(), "x".into()] {
            std::fs::write(&file, bad).unwrap();
            let error = format!("{:#}", authorities("--ca", &file).unwrap_err());
            assert!(error.contains("--ca"), "{error}");
        }
    }
}
