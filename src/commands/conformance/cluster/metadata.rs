//! Metadata calls through the driver's sidecar, valid ones and those with a fault.

use std::io;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Client;
use serde_json::json;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::super::calls::Stop;
use super::super::door::{Done, End, Failure, Fault, Query, Refusal, Sidecar, Stream, Window};
use super::super::reading::{Reading, read};
use super::ClusterDoor;
use super::objects::Kind;
use crate::client::cluster::{LONGEST_MESSAGE, Place, Tokens, dial};
use grpc::proto::snapshotmetadata as k8s;
use k8s::snapshot_metadata_client::SnapshotMetadataClient;

/// Lifetime of a token: the API server's minimum.
const EXPIRY: Duration = Duration::from_secs(600);
/// A token is replaced earlier.
const REUSE: Duration = Duration::from_secs(300);
/// An audience that no sidecar has.
const OTHER: &str = "conformance.loopback.csi.local/other-audience";

/// Where the tokens of calls come from.
pub struct Caller {
    tokens: Tokens,
    /// The last token for the sidecar, and its age.
    current: Option<(String, Instant)>,
}

impl Caller {
    /// `account`: namespace and name; without one, the account of this process.
    pub fn new(client: Client, account: Option<(String, String)>) -> Self {
        Self { tokens: Tokens::requested(client, account, EXPIRY), current: None }
    }

    /// A token for the sidecar.
    async fn token(&mut self, audience: &str) -> Done<String> {
        if let Some((token, since)) = &self.current
            && since.elapsed() < REUSE
        {
            return Ok(token.clone());
        }
        let token = self.token_for(audience).await?;
        self.current = Some((token.clone(), Instant::now()));
        Ok(token)
    }

    async fn token_for(&mut self, audience: &str) -> Done<String> {
        Ok(self.tokens.take(audience).await?.secret)
    }
}

/// Why no TLS connection is possible that trusts only the published authorities.
///
/// # Errors
/// The sidecar cannot be reached at all.
pub async fn tls_problem(place: &Place) -> anyhow::Result<Option<String>> {
    match dial(place).await {
        Ok(_) => Ok(None),
        Err(failure) => {
            let is_tls = failure.error.chain().any(|cause| {
                let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
                inner.is_some_and(|inner| inner.is::<rustls::Error>())
            });
            match is_tls {
                true => Ok(Some(format!("{:#}", failure.error))),
                false => Err(failure.error),
            }
        }
    }
}

/// A failure of this side: no rule is judged by it.
fn unsent(message: String) -> End {
    End::Failed(Failure { code: Code::Unknown, message, has_details: false, is_sent: false })
}

/// The token, the namespace and the range of a call.
struct Request<'r> {
    token: String,
    namespace: &'r str,
    window: Window,
}

impl ClusterDoor {
    pub(super) fn metadata_stream(
        &self,
        query: &Query,
        window: Window,
        patience: Duration,
    ) -> Stream {
        let token = self.token();
        let namespace = &self.objects.namespace;
        match token {
            Ok(token) => self.send(Request { token, namespace, window }, query, patience),
            Err(Refusal::Stopped) => Reading::new().end(End::Stopped),
            Err(refusal) => Reading::new().end(unsent(refusal.to_string())),
        }
    }

    fn token(&self) -> Done<String> {
        self.wait(async { self.caller.lock().await.token(&self.audience).await })
    }

    fn send(&self, request: Request<'_>, query: &Query, patience: Duration) -> Stream {
        let mut reading = Reading::new();
        if self.calls.stop.is_now() {
            return reading.end(End::Stopped);
        }
        if let Some(problem) = &self.tls_problem {
            return reading.end(unsent(problem.clone()));
        }
        let end = self.calls.runtime.block_on(async {
            let channel = match dial(&self.place).await {
                Ok(channel) => channel,
                Err(failure) => {
                    let error = format!("{:#}", failure.error);
                    return End::Failed(Status::unavailable(error).into());
                }
            };
            // Not of the driver: the connection.
            reading.start = Instant::now();
            call(&mut reading, channel, request, query, &self.calls.stop, patience).await
        });
        reading.end(end)
    }

    /// A token of an account without rights, which is made for it.
    fn token_without_rights(&self) -> Done<String> {
        let name = format!("{}-no-rights", self.objects.run);
        let object = json!({ "metadata": { "name": name } });
        self.create::<ServiceAccount>(Kind::Account, &name, object)?;
        let account = Some((self.objects.namespace.clone(), name));
        let mut caller = Caller::new(self.objects.client.clone(), account);
        self.wait(caller.token(&self.audience))
    }
}

async fn call(
    reading: &mut Reading,
    channel: Channel,
    request: Request<'_>,
    query: &Query,
    stop: &Stop,
    patience: Duration,
) -> End {
    let mut client =
        SnapshotMetadataClient::new(channel).max_decoding_message_size(LONGEST_MESSAGE);
    let Request { token, namespace, window } = request;
    let Window { starting_offset, max_results } = window;
    let (security_token, namespace) = (token, namespace.to_owned());
    match query.clone() {
        Query::Allocated { snapshot } => {
            let request = k8s::GetMetadataAllocatedRequest {
                security_token,
                namespace,
                snapshot_name: snapshot,
                starting_offset,
                max_results,
            };
            read(reading, client.get_metadata_allocated(request), stop, patience).await
        }
        Query::Delta { base, target } => {
            let request = k8s::GetMetadataDeltaRequest {
                security_token,
                namespace,
                base_snapshot_id: base,
                target_snapshot_name: target,
                starting_offset,
                max_results,
            };
            read(reading, client.get_metadata_delta(request), stop, patience).await
        }
    }
}

impl Sidecar for ClusterDoor {
    fn tls_problem(&self) -> Option<String> {
        self.tls_problem.clone()
    }

    fn call_with(&self, fault: Fault, query: &Query) -> Done<(Stream, String)> {
        let token = match fault {
            Fault::NoToken => String::new(),
            Fault::InvalidToken => altered(&self.token()?),
            Fault::OtherAudience => {
                self.wait(async { self.caller.lock().await.token_for(OTHER).await })?
            }
            Fault::NoRights => self.token_without_rights()?,
            Fault::NoNamespace => self.token()?,
        };
        let namespace = match fault {
            Fault::NoNamespace => "",
            _ => self.objects.namespace.as_str(),
        };
        let request = Request { token: token.clone(), namespace, window: Window::default() };
        Ok((self.send(request, query, self.calls.timeout), token))
    }
}

/// The token with another signature of the same form.
fn altered(token: &str) -> String {
    let (signed, signature) = token.rsplit_once('.').unwrap_or(("", token));
    let swapped = |letter: char| match letter {
        'A'..='Z' => letter.to_ascii_lowercase(),
        'a'..='z' => letter.to_ascii_uppercase(),
        other => other,
    };
    format!("{signed}.{}", signature.chars().map(swapped).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_altered_token_has_the_same_claims_and_another_signature() {
        let token = altered("aGVhZGVy.Y2xhaW1z.c2lnbmF0dXJl-_0");
        assert_eq!(token, "aGVhZGVy.Y2xhaW1z.C2LNBMf0DxjL-_0");
    }
}
