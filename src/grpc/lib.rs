//! gRPC as all services and clients of this program use it. It knows no service's meaning: a role
//! validates arguments and chooses codes.
//!
//! | module | owns |
//! |---|---|
//! | [`proto`] | messages, clients and servers, generated from `csi-spec/` |
//! | [`socket`], [`endpoint`] | unix sockets: creating one with the right owner and mode; where a driver listens |
//! | [`call`] | the run of each call: thread, deadline, log line, metrics |
//! | `describe` | which fields of a message may appear in the log |
//! | [`serve`] | serving until shutdown |
//! | [`authority`] | clients of grpc-core, whose requests tonic would refuse |
//! | [`reflection`] | server reflection |
//!
//! Here are the names of codes, fingerprints, which identify a token in a log without revealing it,
//! and [`RawMessage`], a message that passes through as bytes: servers return responses that can be
//! sent millions of times per second already encoded, and a relay never decodes them.

// Input may be hostile, so no code may panic on it. Tests may panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod authority;
pub mod call;
mod describe;
pub mod endpoint;
pub mod hints;
pub mod proto;
pub mod reflection;
pub mod serve;
pub mod socket;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use prost::DecodeError;
use prost::bytes::{Buf, BufMut, Bytes};
use prost::encoding::{DecodeContext, WireType};
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use tonic::Code;
use tonic::metadata::MetadataMap;

pub use endpoint::Endpoint;

/// Maximum bytes of a unix socket path in the kernel.
const MAX_SOCKET_PATH: usize = 107;

/// Absolute path of a unix socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketPath(PathBuf);

impl AsRef<Path> for SocketPath {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl FromStr for SocketPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rest = text.strip_prefix("unix:").unwrap_or(text);
        let path = rest.strip_prefix("//").unwrap_or(rest);
        let is_file_path = path.starts_with('/') && !path.ends_with('/') && !path.contains("://");
        if !is_file_path || (rest == text && text.starts_with("//")) {
            return Err(format!("{text:?} is not unix:///path, unix:/path or /path"));
        }
        if path.len() > MAX_SOCKET_PATH || path.contains('\0') {
            return Err(format!("the path of a unix socket has at most {MAX_SOCKET_PATH} bytes"));
        }
        Ok(Self(path.into()))
    }
}

impl fmt::Display for SocketPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.0.display())
    }
}

/// An encoded message of any type. Sending it is one copy, receiving it none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RawMessage(pub Bytes);

impl RawMessage {
    /// Encodes a message.
    pub fn of(message: &impl prost::Message) -> Self {
        Self(message.encode_to_vec().into())
    }
}

impl prost::Message for RawMessage {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        buf.put_slice(&self.0);
    }

    fn encoded_len(&self) -> usize {
        self.0.len()
    }

    fn clear(&mut self) {
        self.0.clear();
    }

    fn decode(mut buf: impl Buf) -> Result<Self, DecodeError> {
        Ok(Self(buf.copy_to_bytes(buf.remaining())))
    }

    /// Never called by `decode`: a raw message has no fields to merge.
    #[allow(deprecated)] // The error has no other constructor.
    fn merge_field(
        &mut self,
        _: u32,
        _: WireType,
        _: &mut impl Buf,
        _: DecodeContext,
    ) -> Result<(), DecodeError> {
        Err(DecodeError::new("a raw message cannot be part of another message"))
    }
}

/// Hexadecimal digits of a fingerprint.
const FINGERPRINT: usize = 16;

/// The deadline of the client's `grpc-timeout`. tonic applies it only until the response starts,
/// not to the stream that follows.
pub fn deadline(metadata: &MetadataMap) -> Option<Instant> {
    let timeout = parse_timeout(metadata.get("grpc-timeout")?.to_str().ok()?)?;
    Instant::now().checked_add(timeout)
}

/// gRPC over HTTP/2, "Timeout": at most 8 digits and a unit.
pub fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// Identifies a secret in a log: the first 16 hexadecimal digits of its SHA-256. It does not reveal
/// a secret that cannot be guessed, and it cannot be used as one.
pub fn fingerprint(secret: &str) -> String {
    let digest = Sha256::digest(secret.as_bytes());
    digest.iter().take(FINGERPRINT / 2).map(|byte| format!("{byte:02x}")).collect()
}

/// Whether `text` has the form of a [`fingerprint`].
pub fn is_fingerprint(text: &str) -> bool {
    text.len() == FINGERPRINT
        && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// The name of a code in gRPC, such as `NOT_FOUND`.
pub const fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

/// The code with this name in gRPC.
pub fn code_named(name: &str) -> Option<Code> {
    (0..=16).map(Code::from).find(|code| code_name(*code) == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_an_absolute_unix_socket_path() {
        for text in ["unix:///run/a.sock", "unix:/run/a.sock", "/run/a.sock"] {
            let path: SocketPath = text.parse().unwrap();
            assert_eq!(path.as_ref(), Path::new("/run/a.sock"), "{text}");
        }
        let long = format!("/{}", "x".repeat(MAX_SOCKET_PATH));
        let bad = [
            "",
            "a.sock",
            "unix://a.sock",
            "unix:a.sock",
            "tcp://127.0.0.1:1",
            "unix:///",
            "/run/",
            "//run/a.sock",
            "unix://",
            "http:///x",
            &long,
        ];
        for text in bad {
            assert!(text.parse::<SocketPath>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_fingerprint_is_a_prefix_of_the_digest() {
        // SHA-256 of "abc", FIPS 180-2, appendix B.1.
        assert_eq!(fingerprint("abc"), "ba7816bf8f01cfea");
        assert!(is_fingerprint(&fingerprint("")));
        for other in
            ["", "ba7816bf8f01cfe", "ba7816bf8f01cfeaa", "BA7816BF8F01CFEA", "ba7816bf8f01cfeg"]
        {
            assert!(!is_fingerprint(other), "{other}");
        }
    }

    #[test]
    fn grpc_timeouts_are_parsed() {
        assert_eq!(parse_timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(parse_timeout("250m"), Some(Duration::from_millis(250)));
        for bad in ["", "S", "123456789S", "1x", "-1S", "1é"] {
            assert_eq!(parse_timeout(bad), None, "{bad}");
        }
    }
}
