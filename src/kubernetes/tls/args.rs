//! The TLS flags, with Go's names of versions, suites and curves, so that command lines of the
//! released sidecar keep their meaning. Names that Go knows and ring lacks are omitted with a
//! warning, as long as others remain. Names that neither knows are errors.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum;
use rustls::crypto::ring::{ALL_CIPHER_SUITES, kx_group};
use rustls::crypto::{CryptoProvider, SupportedKxGroup};
use rustls::{SupportedCipherSuite, SupportedProtocolVersion, version};

/// The suites of Go's tls.CipherSuites(), with those of TLS 1.3 first.
const GO_SUITES: [&str; 13] = [
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
];
/// Number of TLS 1.3 suites in [`GO_SUITES`].
const GO_TLS13_SUITES: usize = 3;

/// Go's names of curves, and the curves in ring.
const GO_CURVES: [(&str, Option<&dyn SupportedKxGroup>); 5] = [
    ("X25519", Some(kx_group::X25519)),
    ("CurveP256", Some(kx_group::SECP256R1)),
    ("CurveP384", Some(kx_group::SECP384R1)),
    ("CurveP521", None),
    ("X25519MLKEM768", None),
];

/// The flags of a TLS server.
#[derive(Debug, Clone, Default, clap::Args)]
// The default name, `Args`, would collide with the group of the struct that flattens this one.
#[group(skip)]
pub struct Args {
    /// PEM file with the server's certificate chain, reloaded on change
    #[arg(long, env = "TLS_CERT_PATH", requires = "tls_key", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// PEM file with the private key of the certificate
    #[arg(long, env = "TLS_KEY_PATH", requires = "tls_cert", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// Minimum TLS version
    #[arg(long, value_enum, default_value_t = MinVersion::Tls12, value_name = "VERSION")]
    pub tls_min_version: MinVersion,

    /// TLS 1.2 cipher suites by Go's names, comma-separated; otherwise all secure ones are used.
    /// TLS 1.3 suites are always enabled
    #[arg(long, default_value = "", hide_default_value = true, value_name = "NAMES")]
    pub tls_cipher_suites: CipherSuites,

    /// Key exchange curves by Go's names in order of preference, comma-separated; otherwise X25519,
    /// CurveP256 and CurveP384 are used
    #[arg(long, default_value = "", hide_default_value = true, value_name = "NAMES")]
    pub tls_curve_preferences: Curves,
}

/// Minimum TLS version, `--tls-min-version`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum MinVersion {
    // As in Go, an empty value means the default.
    #[default]
    #[value(name = "VersionTLS12", alias = "")]
    Tls12,
    #[value(name = "VersionTLS13")]
    Tls13,
}

/// Cipher suites, `--tls-cipher-suites`.
#[derive(Debug, Clone, Default)]
pub struct CipherSuites {
    /// Suites of TLS 1.2; `None` for all.
    chosen: Option<Vec<SupportedCipherSuite>>,
    /// Named suites that ring lacks.
    lacking: Vec<&'static str>,
    /// Named suites of TLS 1.3, which are enabled in any case.
    always_on: Vec<&'static str>,
}

/// Curves, `--tls-curve-preferences`.
#[derive(Debug, Clone, Default)]
pub struct Curves {
    /// `None` for all, in ring's order.
    chosen: Option<Vec<&'static dyn SupportedKxGroup>>,
    lacking: Vec<&'static str>,
}

impl Args {
    /// Paths of certificate and key, if given.
    pub fn files(&self) -> Option<(&Path, &Path)> {
        Some((self.tls_cert.as_deref()?, self.tls_key.as_deref()?))
    }

    /// The enabled versions: TLS 1.2 needs a suite.
    pub(super) fn versions(&self) -> Vec<&'static SupportedProtocolVersion> {
        let no_tls12 = self.tls_cipher_suites.chosen.as_ref().is_some_and(Vec::is_empty);
        match self.tls_min_version {
            MinVersion::Tls12 if !no_tls12 => vec![&version::TLS13, &version::TLS12],
            _ => vec![&version::TLS13],
        }
    }

    /// ring's provider, limited to the chosen suites and curves.
    pub(super) fn provider(&self) -> CryptoProvider {
        let mut provider = super::provider();
        if let Some(chosen) = &self.tls_cipher_suites.chosen {
            provider.cipher_suites.retain(|suite| suite.tls13().is_some());
            provider.cipher_suites.extend(chosen);
        }
        if let Some(chosen) = &self.tls_curve_preferences.chosen {
            provider.kx_groups.clone_from(chosen);
        }
        provider
    }

    pub(super) fn warn_about_omissions(&self) {
        let suites = &self.tls_cipher_suites;
        if !suites.lacking.is_empty() {
            let suites = suites.lacking.join(",");
            tracing::warn!(%suites, "--tls-cipher-suites: these suites are not supported (CBC)");
        }
        if !suites.always_on.is_empty() {
            let suites = suites.always_on.join(",");
            tracing::warn!(%suites, "--tls-cipher-suites: all TLS 1.3 suites are always enabled");
        }
        if suites.chosen.as_ref().is_some_and(Vec::is_empty)
            && self.tls_min_version == MinVersion::Tls12
        {
            tracing::warn!(
                "--tls-cipher-suites names no usable TLS 1.2 suite: only TLS 1.3 is enabled"
            );
        }
        if !self.tls_curve_preferences.lacking.is_empty() {
            let curves = self.tls_curve_preferences.lacking.join(",");
            tracing::warn!(%curves, "--tls-curve-preferences: these curves are not supported");
        }
    }
}

impl FromStr for CipherSuites {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut suites = Self::default();
        let mut chosen = Vec::new();
        for name in names(text) {
            let known = GO_SUITES.iter().position(|known| *known == name);
            let Some(at) = known else {
                return Err(unknown("cipher suite", name, &GO_SUITES));
            };
            match tls12_suite(name) {
                _ if at < GO_TLS13_SUITES => suites.always_on.push(GO_SUITES[at]),
                Some(suite) if chosen.contains(&suite) => {}
                Some(suite) => chosen.push(suite),
                None => suites.lacking.push(GO_SUITES[at]),
            }
        }
        if chosen.is_empty() && suites.always_on.is_empty() && !suites.lacking.is_empty() {
            return Err(none_usable(
                "cipher suites",
                GO_SUITES.into_iter().filter(|name| tls12_suite(name).is_some()),
            ));
        }
        let any = names(text).next().is_some();
        Ok(Self { chosen: any.then_some(chosen), ..suites })
    }
}

impl FromStr for Curves {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut lacking = Vec::new();
        let mut chosen: Vec<&'static dyn SupportedKxGroup> = Vec::new();
        for name in names(text) {
            let Some((name, group)) = GO_CURVES.iter().find(|(known, _)| *known == name) else {
                return Err(unknown("curve", name, &GO_CURVES.map(|(name, _)| name)));
            };
            match group {
                Some(group) if chosen.iter().any(|other| other.name() == group.name()) => {}
                Some(group) => chosen.push(*group),
                None => lacking.push(*name),
            }
        }
        if chosen.is_empty() && !lacking.is_empty() {
            let usable = GO_CURVES.iter().filter(|(_, group)| group.is_some());
            return Err(none_usable("curves", usable.map(|(name, _)| *name)));
        }
        Ok(Self { chosen: (!chosen.is_empty()).then_some(chosen), lacking })
    }
}

/// As in Go, blanks around a name and empty names are ignored.
fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|name| !name.is_empty())
}

fn tls12_suite(name: &str) -> Option<SupportedCipherSuite> {
    let mut suites = ALL_CIPHER_SUITES.iter().filter(|suite| suite.tls13().is_none());
    suites.find(|suite| suite.suite().as_str() == Some(name)).copied()
}

fn unknown(what: &str, name: &str, known: &[&str]) -> String {
    format!("{name:?} is not a known secure {what}; known are {}", known.join(", "))
}

fn none_usable<'a>(what: &str, usable: impl Iterator<Item = &'a str>) -> String {
    let usable: Vec<_> = usable.collect();
    format!("none of these {what} are supported; usable are {}", usable.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ECDSA_AES: &str = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256";

    fn parse(line: &str) -> Result<Args, clap::Error> {
        let command = <Args as clap::Args>::augment_args(clap::Command::new("x"));
        let matches = command.try_get_matches_from(line.split_whitespace())?;
        <Args as clap::FromArgMatches>::from_arg_matches(&matches)
    }

    fn suites(text: &str) -> Vec<String> {
        let args = parse(&format!("x --tls-cipher-suites={text}")).unwrap();
        args.provider().cipher_suites.iter().map(|suite| format!("{:?}", suite.suite())).collect()
    }

    fn curves(text: &str) -> Vec<String> {
        let args = parse(&format!("x --tls-curve-preferences={text}")).unwrap();
        args.provider().kx_groups.iter().map(|group| format!("{:?}", group.name())).collect()
    }

    #[test]
    fn tls_1_3_suites_stay_enabled_with_chosen_tls_1_2_suites() {
        assert_eq!(suites("").len(), 9, "all by default");
        let chosen = suites(&format!("{ECDSA_AES},,{ECDSA_AES}"));
        assert_eq!(chosen.len(), 4, "{chosen:?}");
        assert_eq!(chosen[3], ECDSA_AES);
        assert!(chosen[..3].iter().all(|name| name.starts_with("TLS13_")), "{chosen:?}");
    }

    #[test]
    fn names_that_ring_lacks_are_omitted_if_others_remain() {
        let cbc = "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA";
        assert_eq!(suites(&format!("{cbc},{ECDSA_AES}")).len(), 4);
        let error = parse(&format!("x --tls-cipher-suites {cbc}")).unwrap_err().to_string();
        assert!(error.contains("usable are TLS_ECDHE_ECDSA"), "{error}");
        assert_eq!(curves("X25519MLKEM768,CurveP521,CurveP384"), ["secp384r1"]);
        let error = parse("x --tls-curve-preferences X25519MLKEM768").unwrap_err().to_string();
        assert!(error.contains("usable are X25519, CurveP256, CurveP384"), "{error}");
    }

    #[test]
    fn naming_only_tls_1_3_suites_disables_tls_1_2() {
        let args = parse("x --tls-cipher-suites TLS_AES_128_GCM_SHA256").unwrap();
        assert_eq!(args.versions(), [&version::TLS13]);
        assert_eq!(args.provider().cipher_suites.len(), 3);
        assert_eq!(parse("x").unwrap().versions(), [&version::TLS13, &version::TLS12]);
        let args = parse("x --tls-min-version VersionTLS13").unwrap();
        assert_eq!(args.versions(), [&version::TLS13]);
    }

    #[test]
    fn unknown_names_are_errors_that_list_the_known_ones() {
        for (line, known) in [
            ("x --tls-cipher-suites TLS_RSA_WITH_RC4_128_SHA", ECDSA_AES),
            ("x --tls-curve-preferences P-256", "CurveP256"),
            ("x --tls-min-version VersionTLS11", "VersionTLS12"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(known), "{error}");
        }
    }

    #[test]
    fn the_order_of_curves_is_kept() {
        assert_eq!(curves("CurveP384,X25519,CurveP384"), ["secp384r1", "X25519"]);
        assert_eq!(curves("").len(), 3);
    }

    #[test]
    fn certificate_and_key_require_each_other() {
        assert!(parse("x --tls-cert a").unwrap_err().to_string().contains("--tls-key"));
        assert!(parse("x --tls-key a").unwrap_err().to_string().contains("--tls-cert"));
        let args = parse("x --tls-cert a --tls-key b").unwrap();
        assert_eq!(args.files(), Some((Path::new("a"), Path::new("b"))));
    }
}
