//! Validates a client's request before anything else uses it. Names become parts of API server
//! paths, so they must be valid Kubernetes names.

use std::fmt;

use http::HeaderMap;
use http::header::AUTHORIZATION;

use super::refusal::{Reason, Refusal};
use grpc::proto::snapshotmetadata as api;
use kubernetes::name;

/// Maximum bytes of a CSI handle. CSI's limit is 128, but some drivers exceed it.
pub const MAX_HANDLE: usize = 1024;
/// Maximum bytes of a token, more than any ServiceAccount token has.
const MAX_TOKEN: usize = 16 << 10;

/// A token, which is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<String> for Token {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// A valid request of either RPC. With `base` it is a request for a delta.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataRequest {
    pub token: Token,
    pub namespace: String,
    /// Name of the target VolumeSnapshot.
    pub target: String,
    /// CSI handle of the base, or name of its VolumeSnapshot.
    pub base: Option<String>,
    /// Bytes.
    pub starting_offset: i64,
    pub max_results: i32,
}

impl MetadataRequest {
    pub fn allocated(request: api::GetMetadataAllocatedRequest) -> Result<Self, Refusal> {
        let api::GetMetadataAllocatedRequest {
            security_token,
            namespace,
            snapshot_name,
            starting_offset,
            max_results,
        } = request;
        let token = token(security_token)?;
        namespaced(&namespace)?;
        snapshot("snapshot_name", &snapshot_name)?;
        window(starting_offset, max_results)?;
        let target = snapshot_name;
        Ok(Self { token, namespace, target, base: None, starting_offset, max_results })
    }

    pub fn delta(request: api::GetMetadataDeltaRequest) -> Result<Self, Refusal> {
        let api::GetMetadataDeltaRequest {
            security_token,
            namespace,
            base_snapshot_id,
            target_snapshot_name,
            starting_offset,
            max_results,
        } = request;
        let token = token(security_token)?;
        namespaced(&namespace)?;
        handle("base_snapshot_id", &base_snapshot_id)?;
        snapshot("target_snapshot_name", &target_snapshot_name)?;
        window(starting_offset, max_results)?;
        let (target, base) = (target_snapshot_name, Some(base_snapshot_id));
        Ok(Self { token, namespace, target, base, starting_offset, max_results })
    }
}

/// The token of the only Authorization header (RFC 6750, section 2.1).
pub fn bearer(headers: &HeaderMap) -> Option<&str> {
    let mut all = headers.get_all(AUTHORIZATION).iter();
    let (Some(one), None) = (all.next(), all.next()) else { return None };
    let (scheme, token) = one.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn token(text: String) -> Result<Token, Refusal> {
    required("security_token", &text)?;
    if text.len() > MAX_TOKEN || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(invalid("security_token", "is not a ServiceAccount token"));
    }
    Ok(Token(text))
}

fn namespaced(text: &str) -> Result<(), Refusal> {
    required("namespace", text)?;
    if !name::is_namespace(text) {
        return Err(invalid("namespace", "is not a valid namespace name"));
    }
    Ok(())
}

pub fn snapshot(field: &str, text: &str) -> Result<(), Refusal> {
    required(field, text)?;
    if !name::is_object(text) {
        return Err(invalid(field, "is not a valid VolumeSnapshot name"));
    }
    Ok(())
}

/// A CSI handle, or the name of a VolumeSnapshot where that is accepted.
pub fn handle(field: &str, text: &str) -> Result<(), Refusal> {
    required(field, text)?;
    if text.len() > MAX_HANDLE || text.chars().any(char::is_control) {
        let problem =
            format!("is not a CSI handle or VolumeSnapshot name of at most {MAX_HANDLE} bytes");
        return Err(invalid(field, &problem));
    }
    Ok(())
}

/// Drivers check these numbers too, but one known driver loops forever on a negative number.
pub fn window(starting_offset: i64, max_results: i32) -> Result<(), Refusal> {
    if max_results < 0 {
        return Err(invalid("max_results", "is negative; use 0 for the driver's default"));
    }
    if starting_offset < 0 {
        let message =
            "starting_offset: is negative; set it to a byte offset from the start of the volume";
        return Err(Refusal::new(Reason::OutOfRange, message));
    }
    Ok(())
}

pub fn required(field: &str, text: &str) -> Result<(), Refusal> {
    if text.is_empty() {
        return Err(Refusal::new(Reason::MissingArgument, format!("{field}: is required")));
    }
    Ok(())
}

pub fn invalid(field: &str, problem: &str) -> Refusal {
    Refusal::new(Reason::InvalidArgument, format!("{field}: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_never_printed() {
        let request = MetadataRequest::allocated(api::GetMetadataAllocatedRequest {
            security_token: "a.b.c".into(),
            namespace: "shop".into(),
            snapshot_name: "db-1".into(),
            ..Default::default()
        });
        assert!(!format!("{:?}", request.unwrap()).contains("a.b.c"));
    }
}
