//! The SnapshotMetadata API of snapshot sessions (KEP-3314, session design): with the token of a
//! session, and only for snapshots that the session names. A session that expires during a listing
//! is replaced.

use std::sync::Arc;

use anyhow::anyhow;
use tonic::{Code, Status};

use super::super::block_map::{Answer, Message, Query, Stream, Window, message_of};
use super::super::connection::Deadline;
use super::super::progress;
use super::failure::{Entry, Failure, Subject};
use super::named;
use super::request::{Granted, Requests};
use super::resume::BlockApi;
use super::wire::{self, LONGEST_MESSAGE};
use api::snapshot_metadata_client::SnapshotMetadataClient;
use grpc::proto::csi::v1::BlockMetadataType;
use grpc::proto::snapshotsession as api;

message_of!(volume_size_bytes, csi_style; api::GetAllocatedResponse, api::GetDeltaResponse);

/// The numbers of this API's types are one less than CSI's.
fn csi_style(number: i32) -> BlockMetadataType {
    match api::BlockMetadataType::try_from(number) {
        Ok(api::BlockMetadataType::FixedLength) => BlockMetadataType::FixedLength,
        Ok(api::BlockMetadataType::VariableLength) => BlockMetadataType::VariableLength,
        Err(_) => BlockMetadataType::Unknown,
    }
}

/// A listing within a session.
pub struct Session<'a> {
    requests: &'a mut Requests,
    query: Query,
    portion: Portion,
    granted: Option<Arc<Granted>>,
    /// Whether the session has expired, so that the next request needs a new one.
    expired: bool,
}

/// A [`Window`] in the types of this API.
#[derive(Debug, Clone, Copy)]
pub struct Portion {
    pub starting_offset: u64,
    pub max_results: u32,
}

impl TryFrom<Window> for Portion {
    type Error = anyhow::Error;

    fn try_from(window: Window) -> Result<Self, anyhow::Error> {
        let starting_offset = u64::try_from(window.starting_offset)
            .map_err(|_| anyhow!("--starting-offset must be 0 or more"))?;
        let max_results = u32::try_from(window.max_results)
            .map_err(|_| anyhow!("--max-results must be 0 or more"))?;
        Ok(Self { starting_offset, max_results })
    }
}

/// The VolumeSnapshots that a session for this query must name, each once.
///
/// # Errors
/// A text cannot be the name of one.
pub fn snapshots(query: &Query) -> anyhow::Result<Vec<String>> {
    let mut names = named(query, "in a session")?;
    names.dedup();
    Ok(names.into_iter().cloned().collect())
}

impl<'a> Session<'a> {
    pub fn new(requests: &'a mut Requests, query: Query, portion: Portion) -> Self {
        Self { requests, query, portion, granted: None, expired: false }
    }

    /// The current session, or a new one.
    async fn session(&mut self) -> Result<Arc<Granted>, Failure> {
        if let Some(granted) = &self.granted {
            return Ok(granted.clone());
        }
        if std::mem::take(&mut self.expired)
            && let Err(remaining) = self.requests.end().await
        {
            progress::note(&format!("{remaining:#}"));
        }
        let granted = Arc::new(self.requests.open().await?);
        Ok(self.granted.insert(granted).clone())
    }

    /// What the end of a stream with this status means.
    fn ended(&mut self, granted: &Arc<Granted>, status: Status) -> Failure {
        let Granted { request, driver, place, .. } = &**granted;
        let own = self.requests.is_own();
        if status.code() == Code::Unauthenticated {
            self.granted = None;
            self.expired = true;
        }
        let subject = Subject {
            namespace: self.requests.namespace(),
            driver,
            address: &place.address,
            entry: Entry::Session { request, own },
        };
        Failure::stream(status, &subject)
    }
}

impl BlockApi for Session<'_> {
    type Response = (Arc<Granted>, Stream<api::GetAllocatedResponse, api::GetDeltaResponse>);

    async fn request(&mut self, from: u64) -> Result<Self::Response, Failure> {
        let granted = self.session().await?;
        let channel = wire::connect(&granted.place).await?;
        let deadline = self.requests.limits().deadline;
        let mut client = SnapshotMetadataClient::with_interceptor(channel, Deadline(deadline))
            .max_decoding_message_size(LONGEST_MESSAGE);
        let Portion { starting_offset, max_results } = self.portion;
        let offset = starting_offset.max(from);
        let (session_token, volume_id) = (granted.token.clone(), String::new());
        let stream = match self.query.clone() {
            Query::Allocated { snapshot } => {
                let request = api::GetAllocatedRequest {
                    session_token,
                    volume_id,
                    snapshot,
                    starting_offset: offset,
                    max_results,
                };
                client.get_allocated(request).await.map(Answer::Allocated)
            }
            Query::Delta { base, target } => {
                let request = api::GetDeltaRequest {
                    session_token,
                    volume_id,
                    base_snapshot: base,
                    target_snapshot: target,
                    starting_byte_offset: offset,
                    max_results,
                };
                client.get_delta(request).await.map(Answer::Delta)
            }
        };
        match stream {
            Ok(stream) => Ok((granted, Stream::new(stream, deadline))),
            Err(status) => Err(self.ended(&granted, status)),
        }
    }

    async fn message(&mut self, response: &mut Self::Response) -> Result<Option<Message>, Failure> {
        let (granted, stream) = response;
        stream.message().await.map_err(|status| self.ended(granted, status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_names_each_snapshot_once_and_no_handle() {
        let delta =
            |base: &str| Query::Delta { base: base.to_owned(), target: "tuesday".to_owned() };
        assert_eq!(snapshots(&delta("monday")).unwrap(), ["monday", "tuesday"]);
        assert_eq!(snapshots(&delta("tuesday")).unwrap(), ["tuesday"]);
        assert!(snapshots(&delta("Handle/7")).is_err());
    }

    #[test]
    fn both_block_types_have_the_numbers_of_this_api() {
        let styles = [0, 1, 2].map(csi_style);
        use BlockMetadataType::{FixedLength, Unknown, VariableLength};
        assert_eq!(styles, [FixedLength, VariableLength, Unknown]);
    }
}
