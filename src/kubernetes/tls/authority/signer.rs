//! An authority for other servers, whose private keys this program never has.

use std::time::{Duration, SystemTime};

use kube::Client;

use super::issue::{self, Ca};
use super::shared::{Refused, SharedAuthority};

/// A certificate, and its validity in whole seconds, as it states it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issued {
    /// In PEM.
    pub certificate: String,
    pub not_before: SystemTime,
    pub not_after: SystemTime,
}

/// Signs with the authority in a Secret.
pub struct Signer {
    authority: SharedAuthority,
    signing: Option<Ca>,
}

impl Signer {
    /// `mode` names the authority, and marks the Secret.
    pub fn new(client: Client, namespace: &str, secret: String, mode: &'static str) -> Self {
        Self { authority: SharedAuthority::new(client, namespace, secret, mode), signing: None }
    }

    /// Reads the authority, or creates it. Returns the CA certificates (PEM) that clients must trust.
    /// If that fails, the last one remains in use.
    ///
    /// # Errors
    /// The Secret cannot be read or written, or belongs to another party ([`Signer::is_final`]).
    pub async fn refresh(&mut self) -> anyhow::Result<String> {
        match self.authority.current(SystemTime::now()).await {
            Ok(state) => {
                self.authority.succeeded();
                self.signing = Some(state.signing);
                Ok(state.bundle)
            }
            Err(error) => {
                self.authority.complain(&error);
                Err(error)
            }
        }
    }

    /// Whether no later attempt can succeed without an administrator.
    pub fn is_final(error: &anyhow::Error) -> bool {
        error.is::<Refused>()
    }

    /// A certificate for the key of a request (PKCS#10, DER) and this name, valid for at most
    /// `validity`. Nothing else of the request is used.
    ///
    /// # Errors
    /// The kind of key is not supported, or the request is not signed with it.
    pub fn sign(&self, request: &[u8], name: &str, validity: Duration) -> anyhow::Result<Issued> {
        let authority = self.signing.as_ref();
        let authority = authority.ok_or_else(|| anyhow::anyhow!("there is no authority yet"))?;
        issue::for_request(authority, request, name, SystemTime::now(), validity)
    }
}
