//! Making authorities and certificates: ECDSA on P-256, which every client speaks.

use std::time::{Duration, SystemTime};

use anyhow::Context;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use super::super::certificates::Pair;
use super::state::Ca;

/// By so much the clocks of clients may be behind.
const BEHIND: Duration = Duration::from_secs(300);

/// A new authority, good for `validity` from now on.
pub fn new_authority(now: SystemTime, validity: Duration) -> anyhow::Result<Ca> {
    let mut suffix = [0; 8];
    getrandom::fill(&mut suffix).context("random numbers")?;
    let suffix: String = suffix.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut params = CertificateParams::default();
    // A name of its own each, so that clients that hold two tell them apart.
    params.distinguished_name.push(DnType::CommonName, format!("csi-loopback-sidecar {suffix}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = (now - BEHIND).into();
    params.not_after = (now + validity).into();
    let key = KeyPair::generate().context("a key for the authority")?;
    let cert = params.self_signed(&key).context("the authority's certificate")?.pem();
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
