//! Authentication and authorization by TokenReview and SubjectAccessReview. Granted reviews are
//! cached for a configurable time, during which a revoked token or permission may still pass.
//! Refused tokens are cached for [`REFUSED_TTL`], refused permissions are not. Only hashes of tokens
//! are kept. Clients take turns for token reviews ([`PeerLimit`]), because every client can cause them.
//! Equal reviews at the same time are one call.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use k8s_openapi::api::authentication::v1::{
    TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo,
};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::cache::in_time;
use super::peer_limit::PeerLimit;
use super::snapshot::GROUP;
use telemetry::memo::{Keep, Memo};
use telemetry::peer::Peer;

/// Maximum number of cached tokens, of refused tokens, and of cached permissions.
const MAX_CACHED: u64 = 10_000;
/// Maximum time for which a review without a cache is shared: that of the call.
const SHARED_TTL: Duration = Duration::from_secs(15);
/// Time to cache a refused token.
const REFUSED_TTL: Duration = Duration::from_secs(5);

/// Why a review did not grant the request.
#[derive(Debug, Clone)]
pub enum Denied {
    /// The review refused it, with the API server's reason if it gave one.
    Refused(String),
    /// The review failed.
    Unknown(Arc<kube::Error>),
}

/// Reviews tokens and permissions. Clones share the caches.
#[derive(Clone)]
pub struct Reviewer {
    client: Client,
    /// Time to cache granted reviews.
    ttl: Duration,
    users: Memo<[u8; 32], Grant, Denied>,
    /// Refused tokens, with the reason.
    refused: Memo<[u8; 32], String>,
    peers: PeerLimit,
    permissions: Memo<[u8; 32], (), Denied>,
}

/// An accepted token.
#[derive(Clone)]
struct Grant {
    user: Arc<UserInfo>,
    /// Expiry in the token's claims.
    expires: Option<SystemTime>,
}

/// An action to authorize.
#[derive(Debug, Clone, Copy)]
pub struct Action<'a> {
    pub verb: &'a str,
    pub group: &'a str,
    pub resource: &'a str,
    pub subresource: Option<&'a str>,
    /// Empty for cluster-scoped objects.
    pub namespace: &'a str,
    /// Name of one object; `None` for all objects.
    pub name: Option<&'a str>,
}

impl Reviewer {
    pub fn new(client: Client, ttl: Duration) -> Self {
        let shared = if ttl.is_zero() { SHARED_TTL } else { ttl };
        Self {
            client,
            ttl,
            users: Memo::new(MAX_CACHED, Keep::For(ttl)),
            refused: Memo::new(MAX_CACHED, Keep::For(REFUSED_TTL)),
            peers: PeerLimit::default(),
            permissions: Memo::new(MAX_CACHED, Keep::For(shared)),
        }
    }

    /// The user of a token that is valid for this audience. `peer` sent the token.
    pub async fn authenticate(
        &self,
        token: &str,
        audience: &str,
        peer: Peer,
    ) -> Result<Arc<UserInfo>, Denied> {
        let key = digest(&[audience, token]);
        if let Some(reason) = self.refused.get(&key) {
            return Err(Denied::Refused(reason));
        }
        if self.ttl.is_zero() {
            return Ok(self.review_token(key, token, audience, peer).await?.user);
        }
        for _ in 0..2 {
            let review = self.review_token(key, token, audience, peer);
            let grant = self
                .users
                .get_or_load(&key, review)
                .await
                .map_err(|denied| Denied::clone(&denied))?;
            if grant.expires.is_none_or(|at| SystemTime::now() < at) {
                return Ok(grant.user);
            }
            self.users.remove(&key);
        }
        Err(Denied::Refused("the token has expired".into()))
    }

    async fn review_token(
        &self,
        key: [u8; 32],
        token: &str,
        audience: &str,
        peer: Peer,
    ) -> Result<Grant, Denied> {
        let _turn = self.peers.turn(peer).await.map_err(unknown)?;
        let spec = TokenReviewSpec {
            token: Some(token.to_owned()),
            audiences: Some(vec![audience.to_owned()]),
        };
        let review = TokenReview { spec, ..TokenReview::default() };
        let api: Api<TokenReview> = Api::all(self.client.clone());
        let answer = in_time(api.create(&PostParams::default(), &review)).await.map_err(unknown)?;
        match granted(answer.status.unwrap_or_default(), audience) {
            Ok(user) => {
                self.peers.known(peer);
                Ok(Grant { user: Arc::new(user), expires: expiry(token) })
            }
            Err(reason) => {
                self.refused.insert(key, reason.clone());
                Err(Denied::Refused(reason))
            }
        }
    }

    /// Whether the user may get this VolumeSnapshot, or, without a name, all of the namespace.
    ///
    /// # Errors
    /// The review failed.
    pub async fn may_get_snapshots(
        &self,
        user: &UserInfo,
        namespace: &str,
        name: Option<&str>,
    ) -> Result<bool, Arc<kube::Error>> {
        let action = Action {
            verb: "get",
            group: GROUP,
            resource: "volumesnapshots",
            subresource: None,
            namespace,
            name,
        };
        match self.authorize(user, action).await {
            Ok(()) => Ok(true),
            Err(Denied::Refused(_)) => Ok(false),
            Err(Denied::Unknown(error)) => Err(error),
        }
    }

    /// Whether the user may perform the action.
    pub async fn authorize(&self, user: &UserInfo, action: Action<'_>) -> Result<(), Denied> {
        let identity =
            serde_json::to_string(user).map_err(|error| unknown(kube::Error::SerdeError(error)))?;
        let Action { verb, group, resource, subresource, namespace, name } = action;
        // Objects and subresources never have empty names.
        let [subresource, name] = [subresource, name].map(Option::unwrap_or_default);
        let key = digest(&[&identity, verb, group, resource, subresource, namespace, name]);
        let review = self.review_access(user, action);
        let allowed = self.permissions.get_or_load(&key, review).await;
        if self.ttl.is_zero() {
            // Later callers need a new answer.
            self.permissions.remove(&key);
        }
        allowed.map_err(|denied| Denied::clone(&denied))
    }

    async fn review_access(&self, user: &UserInfo, action: Action<'_>) -> Result<(), Denied> {
        let attributes = ResourceAttributes {
            verb: Some(action.verb.to_owned()),
            group: Some(action.group.to_owned()),
            resource: Some(action.resource.to_owned()),
            subresource: action.subresource.map(str::to_owned),
            namespace: Some(action.namespace.to_owned()),
            name: action.name.map(str::to_owned),
            ..ResourceAttributes::default()
        };
        let spec = SubjectAccessReviewSpec {
            user: user.username.clone(),
            uid: user.uid.clone(),
            groups: user.groups.clone(),
            extra: user.extra.clone(),
            resource_attributes: Some(attributes),
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let api: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let answer = in_time(api.create(&PostParams::default(), &review)).await.map_err(unknown)?;
        let status = answer.status.unwrap_or_default();
        if status.allowed && status.denied != Some(true) {
            return Ok(());
        }
        Err(Denied::Refused(status.reason.unwrap_or_default()))
    }
}

/// The user, or why the API server does not accept the token for the audience.
fn granted(status: TokenReviewStatus, audience: &str) -> Result<UserInfo, String> {
    if status.authenticated != Some(true) {
        return Err("it is not valid, has expired, or is for another audience".into());
    }
    // An authenticator without audiences omits them; the token may then be meant for the API server
    // itself.
    if !status.audiences.unwrap_or_default().iter().any(|one| one == audience) {
        return Err("it is for another audience".into());
    }
    Ok(status.user.unwrap_or_default())
}

fn unknown(error: kube::Error) -> Denied {
    Denied::Unknown(Arc::new(error))
}

/// A hash that is unique for this sequence of texts.
fn digest(parts: &[&str]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().into()
}

/// Expiry in a token's claims. The API server has verified the signature.
fn expiry(token: &str) -> Option<SystemTime> {
    #[derive(Deserialize)]
    struct Claims {
        exp: u64,
    }
    let payload = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    let claims: Claims = serde_json::from_slice(&payload).ok()?;
    UNIX_EPOCH.checked_add(Duration::from_secs(claims.exp))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokens_expiry_is_read_from_its_claims() {
        // {"aud":["a"],"exp":1763673303}
        let token = "eyJhbGciOiJub25lIn0.eyJhdWQiOlsiYSJdLCJleHAiOjE3NjM2NzMzMDN9.c2ln";
        assert_eq!(expiry(token), Some(UNIX_EPOCH + Duration::from_secs(1_763_673_303)));
        for opaque in ["", "opaque", "a.b", "a.!!.c", "..", "x.eyJhIjoxfQ.y"] {
            assert_eq!(expiry(opaque), None, "{opaque}");
        }
    }

    #[test]
    fn a_review_without_the_audience_refuses_the_token() {
        let status = |authenticated, audiences: &[&str]| TokenReviewStatus {
            authenticated,
            audiences: Some(audiences.iter().map(|one| (*one).to_owned()).collect()),
            ..TokenReviewStatus::default()
        };
        assert!(granted(status(Some(true), &["backup"]), "backup").is_ok());
        assert!(granted(status(Some(true), &["other", "backup"]), "backup").is_ok());
        assert!(granted(status(Some(true), &["other"]), "backup").is_err());
        assert!(granted(status(Some(true), &[]), "backup").is_err());
        assert!(granted(status(Some(false), &["backup"]), "backup").is_err());
        assert!(granted(TokenReviewStatus::default(), "backup").is_err());
    }

    #[test]
    fn digests_of_different_parts_differ() {
        assert_ne!(digest(&["ab", "c"]), digest(&["a", "bc"]));
        assert_ne!(digest(&["a", ""]), digest(&["a"]));
    }
}
