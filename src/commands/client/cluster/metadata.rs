//! The released Kubernetes SnapshotMetadata API, with the token of a ServiceAccount.

use tokio::time::Instant;
use tonic::Status;

use super::super::block_map::{
    Answer, BaseUnusable, Message, Query, Stream, Window, csi_style, message_of,
};
use super::super::connection::Deadline;
use super::failure::{Entry, Failure, Subject};
use super::find::{Finder, Service};
use super::resume::BlockApi;
use super::token::{Token, Tokens};
use super::wire::{self, LONGEST_MESSAGE};
use grpc::proto::snapshotmetadata as k8s;
use k8s::snapshot_metadata_client::SnapshotMetadataClient;

// Its types have CSI's numbers.
message_of!(volume_capacity_bytes, csi_style; k8s::GetMetadataAllocatedResponse, k8s::GetMetadataDeltaResponse);

/// A listing by the sidecar of the driver that holds the snapshot.
pub struct Metadata {
    finder: Finder,
    tokens: Tokens,
    query: Query,
    /// Whether the base is a CSI handle instead of the name of a VolumeSnapshot.
    base_is_handle: bool,
    window: Window,
    deadline: Instant,
    /// The same for all attempts.
    driver: Option<String>,
    /// Of the target, in bytes.
    size: Option<u64>,
}

/// What the sidecar of this project says of a base, too.
const IS_NAME: &str = "is the name of a VolumeSnapshot";

/// The response to a call.
type Blocks = Stream<k8s::GetMetadataAllocatedResponse, k8s::GetMetadataDeltaResponse>;

/// A call, with what its errors name.
pub struct Call {
    driver: String,
    service: Service,
    account: String,
}

impl Metadata {
    pub fn new(
        finder: Finder,
        tokens: Tokens,
        query: Query,
        window: Window,
        deadline: Instant,
    ) -> Self {
        Self {
            finder,
            tokens,
            query,
            base_is_handle: false,
            window,
            deadline,
            driver: None,
            size: None,
        }
    }

    /// The same for a base that is identified by its CSI handle.
    pub fn base_by_handle(self, base_is_handle: bool) -> Self {
        Self { base_is_handle, ..self }
    }

    /// Finds the driver, and replaces the base by its handle. Neither can change.
    async fn driver(&mut self) -> Result<String, Failure> {
        if let Some(driver) = &self.driver {
            return Ok(driver.clone());
        }
        let (driver, size) = match &mut self.query {
            Query::Allocated { snapshot } => self.finder.target(snapshot).await?,
            Query::Delta { base, target } => {
                let found = self.finder.target(target).await?;
                if !self.base_is_handle {
                    *base = self.finder.base(base).await?;
                }
                found
            }
        };
        self.size = size;
        self.driver = Some(driver.clone());
        Ok(driver)
    }

    /// Calls the sidecar over a new connection.
    async fn open(
        &mut self,
        call: &Call,
        token: String,
        window: Window,
    ) -> Result<Blocks, Failure> {
        let channel = wire::connect(&call.service.place).await?;
        let mut client = SnapshotMetadataClient::with_interceptor(channel, Deadline(self.deadline))
            .max_decoding_message_size(LONGEST_MESSAGE);
        let Window { starting_offset, max_results } = window;
        let namespace = self.finder.namespace().to_owned();
        let stream = match self.query.clone() {
            Query::Allocated { snapshot } => {
                let request = k8s::GetMetadataAllocatedRequest {
                    security_token: token,
                    namespace,
                    snapshot_name: snapshot,
                    starting_offset,
                    max_results,
                };
                client.get_metadata_allocated(request).await.map(Answer::Allocated)
            }
            Query::Delta { base, target } => {
                let request = k8s::GetMetadataDeltaRequest {
                    security_token: token,
                    namespace,
                    base_snapshot_id: base,
                    target_snapshot_name: target,
                    starting_offset,
                    max_results,
                };
                client.get_metadata_delta(request).await.map(Answer::Delta)
            }
        };
        let stream = stream.map_err(|status| self.ended(call, status))?;
        Ok(Stream::new(stream, self.deadline))
    }

    /// What the end of a stream with this status means.
    fn ended(&self, call: &Call, status: Status) -> Failure {
        let Call { driver, service: Service { place, audience }, account } = call;
        let subject = Subject {
            namespace: self.finder.namespace(),
            driver,
            address: &place.address,
            entry: Entry::Account { account, audience },
        };
        // A status with a cause comes from the connection.
        let code = std::error::Error::source(&status).is_none().then(|| status.code());
        let mut failure = Failure::stream(status, &subject);
        let is_of_base = self.base_is_handle && matches!(self.query, Query::Delta { .. });
        if is_of_base && code.is_some_and(BaseUnusable::is_meant_by) {
            failure.error = BaseUnusable(format!("{:#}", failure.error)).into();
        }
        failure
    }
}

impl Metadata {
    /// A refusal of a base with the next step if the base is a name, where a handle is required.
    async fn explained(&self, failure: Failure) -> Failure {
        let Query::Delta { base, .. } = &self.query else { return failure };
        let is_explained = failure.error.to_string().contains(IS_NAME);
        let is_of_base = failure.error.is::<BaseUnusable>() && !is_explained;
        if !is_of_base || !self.finder.exists(base).await {
            return failure;
        }
        let error = BaseUnusable(format!(
            "{:#}; {base:?} {IS_NAME}, and --base-id requires a CSI handle: set BASE instead",
            failure.error
        ));
        Failure { error: error.into(), ..failure }
    }
}

impl BlockApi for Metadata {
    type Response = (Call, Blocks);

    /// Repeats all lookups and requests what is missing.
    async fn request(&mut self, from: u64) -> Result<Self::Response, Failure> {
        let driver = self.driver().await?;
        let service = self.finder.service(&driver).await?;
        let Token { secret, account } = self.tokens.take(&service.audience).await?;
        let mut window = self.window;
        if let (1.., Ok(end)) = (from, i64::try_from(from)) {
            window.starting_offset = end;
        }
        let call = Call { driver, service, account };
        match self.open(&call, secret, window).await {
            Ok(blocks) => Ok((call, blocks)),
            Err(failure) => Err(self.explained(failure).await),
        }
    }

    async fn message(&mut self, response: &mut Self::Response) -> Result<Option<Message>, Failure> {
        let (call, stream) = response;
        match stream.message().await {
            Ok(message) => Ok(message),
            Err(status) => Err(self.explained(self.ended(call, status)).await),
        }
    }

    fn size(&self) -> Option<u64> {
        self.size
    }
}
