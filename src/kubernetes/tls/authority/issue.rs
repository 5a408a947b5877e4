//! Creates authorities and certificates: ECDSA on P-256, which every client supports.

use std::time::{Duration, SystemTime};

use anyhow::Context;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SerialNumber,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};

use super::super::certificates::Pair;
use super::signer::Issued;

/// Tolerated clock skew of clients.
const CLOCK_SKEW: Duration = Duration::from_secs(300);
/// The same for certificates that the API server checks: notBefore must be within 5 minutes of its
/// own clock.
const CHECKED_CLOCK_SKEW: Duration = Duration::from_secs(120);
/// Validity of an authority's certificate.
const CA_VALIDITY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Prefix of the names of this program's authorities.
const NAME_PREFIX: &str = "csi-loopback-";

/// An authority: certificate and private key in PEM. Debug does not print the key.
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
        // A unique name, so that clients that trust two authorities can distinguish them.
        let key = KeyPair::generate().context("a key for the authority")?;
        sign(&format!("{NAME_PREFIX}{mode} {suffix}"), &key, now)
    }

    /// When less than half of the validity remains, the same authority (name and key) with a new
    /// certificate. Clients that trust either certificate trust what it signs. `None` if there is
    /// no need, or if another party created the authority.
    pub fn renewed(&self, now: SystemTime) -> anyhow::Result<Option<Self>> {
        if self.not_after > now + CA_VALIDITY / 2 {
            return Ok(None);
        }
        let Some(name) = self.own_name()? else { return Ok(None) };
        let key = KeyPair::from_pem(&self.key).context("the authority's key")?;
        sign(&name, &key, now).map(Some)
    }

    /// Its name, if this program created it.
    fn own_name(&self) -> anyhow::Result<Option<String>> {
        let cert = CertificateDer::from_pem_slice(self.cert.as_bytes()).context("the authority")?;
        let (_, cert) = x509_parser::parse_x509_certificate(&cert).context("the authority")?;
        let subject = cert.subject();
        let name = subject.iter_common_name().next().and_then(|name| name.as_str().ok());
        let is_all = subject.iter_attributes().count() == 1;
        Ok(name.filter(|name| is_all && name.starts_with(NAME_PREFIX)).map(str::to_owned))
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
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + CA_VALIDITY).into();
    let cert = params.self_signed(key).context("the authority's certificate")?.pem();
    let key = key.serialize_pem();
    // Read back, because a certificate has whole seconds.
    let not_after = Pair::from_pem(cert.as_bytes(), key.as_bytes())?.not_after();
    Ok(Ca { cert, key, not_after })
}

/// A certificate of `ca` for these names (DNS names or IP addresses), valid for `validity` from
/// now, but not longer than its authority.
pub fn certificate(
    ca: &Ca,
    names: &[String],
    now: SystemTime,
    validity: Duration,
) -> anyhow::Result<Pair> {
    let mut params = server(names).context("the names of --service-address")?;
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + validity).min(ca.not_after).into();
    let key = KeyPair::generate().context("a key")?;
    let cert = params.signed_by(&key, &issuer(ca)?).context("a certificate")?.pem();
    Pair::from_pem(cert.as_bytes(), key.serialize_pem().as_bytes())
}

/// A certificate for this name and the key of a request. The whole span from notBefore on is at most
/// `validity`.
pub fn for_request(
    ca: &Ca,
    request: &[u8],
    name: &str,
    now: SystemTime,
    validity: Duration,
) -> anyhow::Result<Issued> {
    let request = CertificateSigningRequestDer::from(request);
    let request = CertificateSigningRequestParams::from_der(&request).context("its key")?;
    let not_before = whole(now - CHECKED_CLOCK_SKEW);
    let not_after = whole((not_before + validity).min(ca.not_after));
    let mut params = server(&[name.to_owned()]).context("the name")?;
    (params.not_before, params.not_after) = (not_before.into(), not_after.into());
    let certificate =
        params.signed_by(&request.public_key, &issuer(ca)?).context("a certificate")?;
    Ok(Issued { certificate: certificate.pem(), not_before, not_after })
}

/// Whole seconds, as in a certificate.
fn whole(time: SystemTime) -> SystemTime {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    SystemTime::UNIX_EPOCH + Duration::from_secs(since.as_secs())
}

fn issuer(ca: &Ca) -> anyhow::Result<Issuer<'static, KeyPair>> {
    let authority = KeyPair::from_pem(&ca.key).context("the authority's key")?;
    Issuer::from_ca_cert_pem(&ca.cert, authority).context("the authority")
}

/// The content of a server's certificate for these names (DNS names or IP addresses).
fn server(names: &[String]) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    let name = names.first().map_or("", String::as_str);
    params.distinguished_name.push(DnType::CommonName, name.get(..64).unwrap_or(name));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::*;

    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

    #[test]
    fn a_renewed_authority_keeps_name_and_key() {
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
    fn only_the_key_of_a_request_is_signed() {
        use rcgen::PublicKeyData;
        let now = SystemTime::now();
        let ca = Ca::new("nodes", now).unwrap();
        let key = KeyPair::generate().unwrap();
        // A request that names another node.
        let params = CertificateParams::new(["node-2".to_owned()]).unwrap();
        let request = params.serialize_request(&key).unwrap();
        let validity = Duration::from_secs(3600);
        let issued = for_request(&ca, request.der(), "node-1", now, validity).unwrap();
        assert_eq!(issued.not_after, issued.not_before + validity);
        let der = CertificateDer::from_pem_slice(issued.certificate.as_bytes()).unwrap();
        let (_, cert) = x509_parser::parse_x509_certificate(&der).unwrap();
        let names = cert.subject_alternative_name().unwrap().unwrap().value.general_names.clone();
        assert_eq!(names, [x509_parser::extensions::GeneralName::DNSName("node-1")]);
        assert!(!cert.is_ca() && cert.public_key().raw == key.subject_public_key_info());
        let seconds = |time: SystemTime| {
            time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() as i64
        };
        let span = cert.validity();
        assert_eq!(span.not_before.timestamp(), seconds(issued.not_before));
        assert_eq!(span.not_after.timestamp(), seconds(issued.not_after));
        let mut damaged = request.der().to_vec();
        *damaged.last_mut().unwrap() ^= 1;
        for bad in [&damaged[..], b"", b"nonsense"] {
            for_request(&ca, bad, "node-1", now, validity).unwrap_err();
        }
    }

    #[test]
    fn a_foreign_authority_is_not_renewed() {
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
    fn a_key_is_never_printed() {
        let ca = Ca::new("sidecar", SystemTime::now()).unwrap();
        let shown = format!("{ca:?}");
        assert!(!shown.contains("PRIVATE") && !shown.contains(&ca.key), "{shown}");
    }
}
