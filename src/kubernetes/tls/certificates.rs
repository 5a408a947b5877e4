//! The certificate of new connections. Replacing it does not affect existing connections.

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

/// A certificate chain and its private key.
#[derive(Clone)]
pub(super) struct Pair {
    key: Arc<CertifiedKey>,
    not_after: SystemTime,
}

impl Pair {
    /// Parses a chain and a private key in PEM.
    ///
    /// # Errors
    /// One of them is invalid, or they do not match. The error shows nothing of the key.
    pub fn from_pem(chain: &[u8], key: &[u8]) -> anyhow::Result<Self> {
        let chain = super::chain(chain).context("certificate")?;
        let not_after = chain.first().context("no certificate").and_then(|leaf| not_after(leaf))?;
        // The parser's error could quote bytes of the key.
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| {
            anyhow::anyhow!("the file has no private key in PEM (BEGIN PRIVATE KEY)")
        })?;
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

/// The certificate of new connections. Clones share it.
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

    /// Sets the certificate of new connections.
    pub(super) fn replace(&self, pair: Pair) {
        *self.0.now.write().unwrap_or_else(PoisonError::into_inner) = pair;
    }

    pub(super) fn reload_failed(&self) {
        self.0.reload_failures.fetch_add(1, Ordering::Relaxed);
    }

    fn now(&self) -> Pair {
        self.0.now.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// When the current certificate expires.
    pub fn not_after(&self) -> SystemTime {
        self.now().not_after
    }

    /// Number of changed certificates that were rejected.
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
