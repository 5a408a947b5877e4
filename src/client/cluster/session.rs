//! The SnapshotMetadata API of snapshot sessions (KEP-3314, session design): with the token of a session, and in its names
//! alone. One that expired while extents came is replaced by another.

use std::sync::Arc;

use anyhow::anyhow;
use tonic::{Code, Status};

use super::super::block_map::{Answer, Message, Query, Window, message_of};
use super::super::connection::Deadline;
use super::failure::{Entry, Failure, Subject};
use super::named;
use super::request::{Granted, Requests};
use super::resume::BlockApi;
use super::wire::{self, LONGEST_MESSAGE};
use crate::proto::csi::v1::BlockMetadataType;
use crate::proto::snapshotsession as api;
use api::snapshot_metadata_client::SnapshotMetadataClient;

message_of!(volume_size_bytes, csi_style; api::GetAllocatedResponse, api::GetDeltaResponse);

/// The numbers of this API's types are one less than CSI's.
fn csi_style(number: i32) -> BlockMetadataType {
    match api::BlockMetadataType::try_from(number) {
        Ok(api::BlockMetadataType::FixedLength) => BlockMetadataType::FixedLength,
        Ok(api::BlockMetadataType::VariableLength) => BlockMetadataType::VariableLength,
        Err(_) => BlockMetadataType::Unknown,
    }
}

/// A question within a session.
pub struct Session<'a> {
    requests: &'a mut Requests,
    query: Query,
    portion: Portion,
    granted: Option<Arc<Granted>>,
    /// Whether the last one is over, so that the next is another.
    over: bool,
}

/// A [`Window`] as this API has it.
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

/// The VolumeSnapshots that a session for this question has to name, each once.
///
/// # Errors
/// What cannot be the name of one.
pub fn snapshots(query: &Query) -> anyhow::Result<Vec<String>> {
    let mut names = named(query, "in a session")?;
    names.dedup();
    Ok(names.into_iter().cloned().collect())
}

impl<'a> Session<'a> {
    pub fn new(requests: &'a mut Requests, query: Query, portion: Portion) -> Self {
        Self { requests, query, portion, granted: None, over: false }
    }

    /// The session under way, or the next.
    async fn session(&mut self) -> Result<Arc<Granted>, Failure> {
        if let Some(granted) = &self.granted {
            return Ok(granted.clone());
        }
        if std::mem::take(&mut self.over)
            && let Err(left) = self.requests.end().await
        {
            eprintln!("csi-loopback: {left:#}");
        }
        let granted = Arc::new(self.requests.open().await?);
        Ok(self.granted.insert(granted).clone())
    }

    /// What it means that an answer ended so.
    fn ended(&mut self, granted: &Arc<Granted>, status: Status) -> Failure {
        let Granted { request, driver, place, .. } = &**granted;
        let ours = self.requests.ours();
        if status.code() == Code::Unauthenticated {
            self.granted = None;
            self.over = true;
        }
        let subject = Subject {
            namespace: self.requests.namespace(),
            driver,
            address: &place.address,
            entry: Entry::Session { request, ours },
        };
        Failure::stream(status, &subject)
    }
}

impl BlockApi for Session<'_> {
    type Answer = (Arc<Granted>, Answer<api::GetAllocatedResponse, api::GetDeltaResponse>);

    async fn ask(&mut self, from: u64) -> Result<Self::Answer, Failure> {
        let granted = self.session().await?;
        let channel = wire::connect(&granted.place).await?;
        let deadline = Deadline(self.requests.limits().deadline);
        let mut client = SnapshotMetadataClient::with_interceptor(channel, deadline)
            .max_decoding_message_size(LONGEST_MESSAGE);
        let Portion { starting_offset, max_results } = self.portion;
        let offset = starting_offset.max(from);
        let (session_token, volume_id) = (granted.token.clone(), String::new());
        let answer = match self.query.clone() {
            Query::Allocated { snapshot } => {
                let request = api::GetAllocatedRequest {
                    session_token,
                    volume_id,
                    snapshot,
                    starting_offset: offset,
                    max_results,
                };
                client.get_allocated(request).await.map(Answer::allocated)
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
                client.get_delta(request).await.map(Answer::delta)
            }
        };
        match answer {
            Ok(answer) => Ok((granted, answer)),
            Err(status) => Err(self.ended(&granted, status)),
        }
    }

    async fn message(&mut self, answer: &mut Self::Answer) -> Result<Option<Message>, Failure> {
        let (granted, stream) = answer;
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
        let error = snapshots(&delta("Handle/7")).unwrap_err().to_string();
        assert!(
            error.contains("Handle/7") && error.contains("--api metadata --base-id"),
            "{error}"
        );
    }

    #[test]
    fn a_window_that_this_api_cannot_say_is_refused_by_name() {
        let refused = |starting_offset, max_results| {
            let window = Window { starting_offset, max_results };
            Portion::try_from(window).unwrap_err().to_string()
        };
        assert!(refused(-1, 0).contains("--starting-offset"));
        assert!(refused(0, -1).contains("--max-results"));
        let most = Portion::try_from(Window { starting_offset: i64::MAX, max_results: i32::MAX });
        assert_eq!(most.unwrap().starting_offset, i64::MAX as u64);
    }

    #[test]
    fn both_styles_are_told_by_the_numbers_of_this_api() {
        let styles = [0, 1, 2].map(csi_style);
        use BlockMetadataType::{FixedLength, Unknown, VariableLength};
        assert_eq!(styles, [FixedLength, VariableLength, Unknown]);
    }
}
