//! Looks up the SnapshotSessionData with a token's name in the sidecar's own namespace. Sessions
//! from a watch cost no call. A token that the watch does not know may be newer, and is looked up
//! by a client with a separate rate limit and in turns per caller ([`PeerLimit`]), so that guesses do
//! not use up the calls of others. The watch takes precedence: a revoked session ends with the next request.
//!
//! A presented token is hashed before the lookup and compared in constant time, so that timing
//! reveals nothing about existing tokens. All invalid tokens get the same refusal.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::watcher;
use kube::{Api, Client};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::sidecar::refusal::{Reason, Refusal};
use crate::sidecar::request::Token;
use kubernetes::cache::{Cache, in_time};
use kubernetes::peer_limit::PeerLimit;
use kubernetes::session::SnapshotSessionData;
use telemetry::memo::{Keep, Memo};
use telemetry::peer::Peer;
use telemetry::shutdown::Shutdown;

/// Time to cache a lookup while no watch is running, the maximum delay of a revocation.
const CACHE_TTL: Duration = Duration::from_secs(1);
/// Maximum number of cached lookups.
const MAX_CACHED: u64 = 10_000;

/// Looks up sessions. Clones share the watch and the cache.
#[derive(Clone)]
pub struct Tokens {
    watched: Cache<SnapshotSessionData>,
    lookup_api: Api<SnapshotSessionData>,
    /// Lookups by whether the watch was running, and digest. An entry from a running watch only
    /// serves concurrent requests for the same token.
    lookups: Memo<(bool, String), Arc<SnapshotSessionData>, Refusal>,
    peers: PeerLimit,
}

impl Tokens {
    /// Starts a watch of the namespace's sessions with the first client. The second client looks up
    /// tokens that the watch does not know.
    pub fn start(watching: &Client, lookups: Client, namespace: &str, shutdown: Shutdown) -> Self {
        let api: Api<SnapshotSessionData> = Api::namespaced(watching.clone(), namespace);
        let one = api.clone();
        let select = watcher::Config::default();
        Self {
            watched: Cache::start(api, move |_| one.clone(), select, digest_of, shutdown),
            lookup_api: Api::namespaced(lookups, namespace),
            lookups: Memo::new(MAX_CACHED, Keep::For(CACHE_TTL)),
            peers: PeerLimit::default(),
        }
    }

    /// The token's session, if it is valid. The caller checks that it is a session of this driver.
    /// `peer` sent the token.
    pub async fn session(
        &self,
        token: &Token,
        peer: Peer,
    ) -> Result<Arc<SnapshotSessionData>, Refusal> {
        let digest = digest(token.reveal());
        let cached = self.watched.cached_with(&digest);
        let live = cached.is_some();
        let session = match cached.into_iter().flatten().next() {
            Some(session) => session,
            None => match self.look_up(live, &digest, token, peer).await {
                Ok(session) => session,
                // Meanwhile the watch may have reported it, also if there were too many lookups.
                Err(refusal) => {
                    let cached = self.watched.cached_with(&digest).into_iter().flatten().next();
                    cached.ok_or(refusal)?
                }
            },
        };
        match is_valid(&session, token.reveal(), Timestamp::now()) {
            true => Ok(session),
            false => Err(invalid()),
        }
    }

    /// Queries the API server, once for concurrent requests for the same token.
    async fn look_up(
        &self,
        live: bool,
        digest: &str,
        token: &Token,
        peer: Peer,
    ) -> Result<Arc<SnapshotSessionData>, Refusal> {
        let key = (live, digest.to_owned());
        let found = self.lookups.get_or_load(&key, self.fetch(token, peer)).await;
        if live {
            // From now on the watch reports the session.
            self.lookups.remove(&key);
        }
        found.map_err(|refusal| Refusal::clone(&refusal))
    }

    async fn fetch(&self, token: &Token, peer: Peer) -> Result<Arc<SnapshotSessionData>, Refusal> {
        let failed = |error| Refusal::api("read SnapshotSessionData in its namespace", &error);
        let _turn = self.peers.turn(peer).await.map_err(failed)?;
        match in_time(self.lookup_api.get_opt(token.reveal())).await {
            Ok(Some(session)) => {
                self.peers.known(peer);
                Ok(Arc::new(session))
            }
            Ok(None) => Err(invalid()),
            Err(error) => Err(failed(error)),
        }
    }
}

/// The key of the index of sessions.
fn digest_of(session: &SnapshotSessionData) -> Option<Cow<'_, str>> {
    session.metadata.name.as_deref().map(|name| digest(name).into())
}

fn digest(token: &str) -> String {
    STANDARD_NO_PAD.encode(Sha256::digest(token.as_bytes()))
}

/// Whether the token is this session's, and the session has not ended.
fn is_valid(session: &SnapshotSessionData, token: &str, now: Timestamp) -> bool {
    let name = session.metadata.name.as_deref().unwrap_or_default();
    let same = bool::from(name.as_bytes().ct_eq(token.as_bytes()));
    same && session.metadata.deletion_timestamp.is_none() && now < session.spec.expiration_time.0
}

/// The same refusal for every kind of invalid token.
pub fn invalid() -> Refusal {
    Refusal::new(
        Reason::SessionInvalid,
        "session_token: is not a token of a snapshot session of this driver, or the session has ended; create another \
         SnapshotSessionRequest",
    )
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::SignedDuration;

    use super::*;
    use kubernetes::session::{SessionRequestReference, SnapshotSessionDataSpec};

    fn session(name: &str, expires: Timestamp) -> SnapshotSessionData {
        let request =
            SessionRequestReference { namespace: "n".into(), name: "r".into(), uid: "u".into() };
        let spec = SnapshotSessionDataSpec {
            driver: "d".into(),
            request,
            snapshots: Vec::new(),
            expiration_time: Time(expires),
        };
        SnapshotSessionData::new(name, spec)
    }

    #[test]
    fn a_session_is_valid_until_expiry_or_deletion() {
        let now = Timestamp::now();
        let second = SignedDuration::from_secs(1);
        assert!(is_valid(&session("abc", now + second), "abc", now));
        assert!(!is_valid(&session("abc", now), "abc", now), "the end is exclusive");
        assert!(!is_valid(&session("abc", now - second), "abc", now));
        assert!(!is_valid(&session("abc", now + second), "abd", now));
        let mut deleted = session("abc", now + second);
        deleted.metadata.deletion_timestamp = Some(Time(now));
        assert!(!is_valid(&deleted, "abc", now));
    }

    #[test]
    fn sessions_are_indexed_by_the_digest_of_their_token() {
        let one = session("abc", Timestamp::now());
        // SHA-256 of "abc", FIPS 180-2, appendix B.1.
        let expected = "ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0";
        assert_eq!(digest_of(&one).as_deref(), Some(expected));
        assert_eq!(digest("abc"), expected);
    }
}
