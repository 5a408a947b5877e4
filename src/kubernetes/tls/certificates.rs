//! The certificate that new connections get now. Replacing it touches no connection that is there.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use x509_parser::parse_x509_certificate;

/// A certificate, those between it and its authority, and its key, which belong together.
#[derive(Clone)]
pub(super) struct Pair {
    key: Arc<CertifiedKey>,
    not_after: SystemTime,
}

impl Pair {
    /// Takes a chain and a private key in PEM.
    ///
    /// # Errors
    /// What is wrong with one of them, or that they do not belong together. Nothing of the key is told.
    pub fn from_pem(chain: &[u8], key: &[u8]) -> anyhow::Result<Self> {
        let chain = super::chain(chain).context("certificate")?;
        let not_after = chain.first().context("no certificate").and_then(|leaf| not_after(leaf))?;
        // The parser's own words could have bytes of the key in them.
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|_| anyhow::anyhow!("no private key in PEM (BEGIN PRIVATE KEY)"))?;
        let key = CertifiedKey::from_der(chain, key, &super::provider())
            .context("certificate and private key")?;
        Ok(Self { key: Arc::new(key), not_after })
    }

    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }
}

fn not_after(certificate: &[u8]) -> anyhow::Result<SystemTime> {
    let (_, parsed) = parse_x509_certificate(certificate).context("certificate: not X.509")?;
    let seconds = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or(0);
    Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
}

/// The certificate that connections get from now on. Cheap to clone; all clones are the same.
#[derive(Clone)]
pub struct Certificates(Arc<Shared>);

struct Shared {
    now: RwLock<Pair>,
    reload_failures: AtomicU64,
}

impl Certificates {
    pub(super) fn new(pair: Pair) -> Self {
        Self(Arc::new(Shared { now: RwLock::new(pair), reload_failures: AtomicU64::new(0) }))
    }

    /// From now on connections get this one.
    pub(super) fn replace(&self, pair: Pair) {
        *self.0.now.write().unwrap_or_else(PoisonError::into_inner) = pair;
    }

    pub(super) fn reload_failed(&self) {
        self.0.reload_failures.fetch_add(1, Ordering::Relaxed);
    }

    fn now(&self) -> Pair {
        self.0.now.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// When the certificate that is served now ends.
    pub fn not_after(&self) -> SystemTime {
        self.now().not_after
    }

    /// How many changed certificates could not be taken over.
    pub fn reload_failures(&self) -> u64 {
        self.0.reload_failures.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").field("not_after", &self.not_after()).finish_non_exhaustive()
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.now().key)
    }
}
