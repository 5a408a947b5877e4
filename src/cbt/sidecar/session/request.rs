//! Validates a session client's request before anything else uses it. Errors use KEP-3314's field
//! names.

use super::tokens;
use crate::sidecar::refusal::{Reason, Refusal};
use crate::sidecar::request::{MAX_HANDLE, Token, invalid, required, snapshot};
use grpc::proto::snapshotsession as api;

/// Length of a token in bytes: a token is the name of a SnapshotSessionData.
const TOKEN: std::ops::RangeInclusive<usize> = 52..=253;

/// A valid request of either RPC. With `base` it is a request for a delta.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionRequest {
    pub token: Token,
    /// CSI handle, or empty.
    pub volume_id: String,
    /// Name of the target VolumeSnapshot.
    pub target: String,
    /// Name of the base VolumeSnapshot.
    pub base: Option<String>,
    /// Bytes, not negative.
    pub starting_offset: i64,
    /// Not negative.
    pub max_results: i32,
}

impl SessionRequest {
    pub fn allocated(request: api::GetAllocatedRequest) -> Result<Self, Refusal> {
        let api::GetAllocatedRequest {
            session_token,
            volume_id,
            snapshot: target,
            starting_offset,
            max_results,
        } = request;
        required("session_token", &session_token)?;
        volume(&volume_id)?;
        snapshot("snapshot", &target)?;
        let starting_offset = offset("starting_offset", starting_offset)?;
        let max_results = clamped(max_results);
        let token = token(session_token)?;
        Ok(Self { token, volume_id, target, base: None, starting_offset, max_results })
    }

    pub fn delta(request: api::GetDeltaRequest) -> Result<Self, Refusal> {
        let api::GetDeltaRequest {
            session_token,
            volume_id,
            base_snapshot: base,
            target_snapshot: target,
            starting_byte_offset,
            max_results,
        } = request;
        required("session_token", &session_token)?;
        volume(&volume_id)?;
        snapshot("base_snapshot", &base)?;
        snapshot("target_snapshot", &target)?;
        let starting_offset = offset("starting_byte_offset", starting_byte_offset)?;
        let max_results = clamped(max_results);
        let token = token(session_token)?;
        Ok(Self { token, volume_id, target, base: Some(base), starting_offset, max_results })
    }
}

/// A text that cannot be the name of a SnapshotSessionData is refused before any call to the API
/// server.
fn token(text: String) -> Result<Token, Refusal> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    if TOKEN.contains(&text.len()) && text.bytes().all(plain) {
        return Ok(Token::from(text));
    }
    Err(tokens::invalid())
}

fn volume(text: &str) -> Result<(), Refusal> {
    if text.len() > MAX_HANDLE || text.chars().any(char::is_control) {
        let problem = format!("is not a CSI handle of at most {MAX_HANDLE} bytes");
        return Err(invalid("volume_id", &problem));
    }
    Ok(())
}

/// CSI uses int64, and no volume is larger.
fn offset(field: &str, bytes: u64) -> Result<i64, Refusal> {
    bytes.try_into().map_err(|_| {
        let message = format!("{field}: {bytes} is past the end of any volume");
        Refusal::new(Reason::OutOfRange, message)
    })
}

/// CSI uses int32. A message may always have fewer extents than requested.
fn clamped(max_results: u32) -> i32 {
    max_results.try_into().unwrap_or(i32::MAX)
}
