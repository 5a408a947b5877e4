//! Making authorities and certificates: ECDSA on P-256, which every client speaks.

use std::time::{Duration, SystemTime};

use anyhow::Context;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SerialNumber,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::super::certificates::Pair;

/// By so much the clocks of clients may be behind.
const BEHIND: Duration = Duration::from_secs(300);
/// How long the certificate of an authority is good for.
const LASTS: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// How the name of an authority of this program begins.
const OURS: &str = "csi-loopback-";

/// An authority: certificate and private key in PEM. The key is in no Debug.
#[derive(Clone, PartialEq, Eq)]
pub struct Ca {
    pub cert: String,
    pub key: String,
    pub not_after: SystemTime,
}

impl std::fmt::Debug for Ca {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ca").field("not_after", &self.not_after).finish_non_exhaustive()
    }
}

impl Ca {
    /// A new authority, named after the mode.
    pub fn new(mode: &str, now: SystemTime) -> anyhow::Result<Self> {
        let suffix: String = random()?.iter().map(|byte| format!("{byte:02x}")).collect();
        // A name of its own each, so that clients that hold two tell them apart.
        let key = KeyPair::generate().context("a key for the authority")?;
        sign(&format!("{OURS}{mode} {suffix}"), &key, now)
    }

    /// The same authority, name and key, with a certificate that begins anew, when less than half of its time is left. Clients
    /// that trust either trust what it signs. Nothing for an authority of somebody else.
    pub fn renewed(&self, now: SystemTime) -> anyhow::Result<Option<Self>> {
        if self.not_after > now + LASTS / 2 {
            return Ok(None);
        }
        let Some(name) = self.own_name()? else { return Ok(None) };
        let key = KeyPair::from_pem(&self.key).context("the authority's key")?;
        sign(&name, &key, now).map(Some)
    }

    /// Its name, if this program has made it.
    fn own_name(&self) -> anyhow::Result<Option<String>> {
        let cert = CertificateDer::from_pem_slice(self.cert.as_bytes()).context("the authority")?;
        let (_, cert) = x509_parser::parse_x509_certificate(&cert).context("the authority")?;
        let subject = cert.subject();
        let name = subject.iter_common_name().next().and_then(|name| name.as_str().ok());
        let is_all = subject.iter_attributes().count() == 1;
        Ok(name.filter(|name| is_all && name.starts_with(OURS)).map(str::to_owned))
    }
}

fn random() -> anyhow::Result<[u8; 8]> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).context("random numbers")?;
    Ok(random)
}

fn sign(name: &str, key: &KeyPair, now: SystemTime) -> anyhow::Result<Ca> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.serial_number = Some(SerialNumber::from_slice(&random()?));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = (now - BEHIND).into();
    params.not_after = (now + LASTS).into();
    let cert = params.self_signed(key).context("the authority's certificate")?.pem();
    let key = key.serialize_pem();
    // Read back: a certificate has whole seconds.
    let not_after = Pair::from_pem(cert.as_bytes(), key.as_bytes())?.not_after();
    Ok(Ca { cert, key, not_after })
}

/// A certificate of `ca` for these names (DNS names or IP addresses), good for `validity` from now on or
/// as long as its authority.
pub fn certificate(
    ca: &Ca,
    names: &[String],
    now: SystemTime,
    validity: Duration,
) -> anyhow::Result<Pair> {
    let authority = KeyPair::from_pem(&ca.key).context("the authority's key")?;
    let issuer = Issuer::from_ca_cert_pem(&ca.cert, authority).context("the authority")?;
    let mut params = CertificateParams::new(names).context("the names of --service-address")?;
    let name = names.first().map_or("", String::as_str);
    params.distinguished_name.push(DnType::CommonName, name.get(..64).unwrap_or(name));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    params.not_before = (now - BEHIND).into();
    params.not_after = (now + validity).min(ca.not_after).into();
    let key = KeyPair::generate().context("a key")?;
    let cert = params.signed_by(&key, &issuer).context("a certificate")?.pem();
    Pair::from_pem(cert.as_bytes(), key.serialize_pem().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

    #[test]
    fn an_authority_is_named_after_its_mode_and_renewed_with_name_and_key() {
        let now = SystemTime::now();
        let first = Ca::new("admission", now).unwrap();
        let name = first.own_name().unwrap().unwrap();
        assert!(name.starts_with("csi-loopback-admission "), "{name}");
        assert_eq!(first.renewed(now + 4 * YEAR).unwrap(), None);
        let later = now + 6 * YEAR;
        let second = first.renewed(later).unwrap().unwrap();
        assert_eq!((second.own_name().unwrap(), &second.key), (Some(name), &first.key));
        assert!(second.cert != first.cert && second.not_after > later + 9 * YEAR);
    }

    #[test]
    fn an_authority_of_somebody_else_is_not_renewed() {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::OrganizationName, "Example");
        params.distinguished_name.push(DnType::CommonName, "csi-loopback-x");
        let cert = params.self_signed(&key).unwrap().pem();
        let ca = Ca { cert, key: key.serialize_pem(), not_after: SystemTime::now() };
        assert_eq!(ca.renewed(SystemTime::now()).unwrap(), None);
    }

    #[test]
    fn no_key_is_shown() {
        let ca = Ca::new("sidecar", SystemTime::now()).unwrap();
        let shown = format!("{ca:?}");
        assert!(!shown.contains("PRIVATE") && !shown.contains(&ca.key), "{shown}");
    }
}
