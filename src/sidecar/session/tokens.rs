//! What a token stands for: the SnapshotSessionData of that name in the sidecar's own namespace. Those that a watch has
//! told cost no call; what it does not know may be newer, and is asked for by a client with a rate of its own, so that
//! guesses use up nobody else's calls. What the watch says wins at once: a session that is revoked is over with the next
//! request.
//!
//! A token that is presented is hashed before it is looked up, and compared in constant time at the end: how long it takes
//! tells nothing of those that are there. Why one is refused is told to nobody.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::watcher;
use kube::{Api, Client};
use moka::future;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::kubernetes::cache::{Cache, in_time};
use crate::kubernetes::session::SnapshotSessionData;
use crate::sidecar::call::Calls;
use crate::sidecar::refusal::{Reason, Refusal};
use crate::sidecar::request::Token;
use crate::sidecar::service::too_many;
use crate::telemetry::shutdown::Shutdown;

/// How long an answer of the API server is good for while no watch runs: so late at most a revocation is noticed then.
const GOOD_FOR: Duration = Duration::from_secs(1);
/// Sessions that are remembered so, at most.
const REMEMBERED: u64 = 10_000;
/// Tokens that are being asked for at once, at most: guesses are not to use up the calls of all others.
const LOOK_UPS: usize = 1024;

/// Cheap to clone.
#[derive(Clone)]
pub struct Tokens {
    watched: Cache<SnapshotSessionData>,
    asking: Api<SnapshotSessionData>,
    /// What was asked for, by whether the watch ran and digest. An entry of a time when it ran is there only for those who
    /// ask together.
    asked: future::Cache<(bool, String), Arc<SnapshotSessionData>>,
    look_ups: Calls,
}

impl Tokens {
    /// Starts to watch the sessions of a namespace with one client; the other one asks for those that the watch does
    /// not know.
    pub fn start(watching: &Client, asking: Client, namespace: &str, shutdown: Shutdown) -> Self {
        let api: Api<SnapshotSessionData> = Api::namespaced(watching.clone(), namespace);
        let one = api.clone();
        let select = watcher::Config::default();
        Self {
            watched: Cache::start(api, move |_| one.clone(), select, digest_of, shutdown),
            asking: Api::namespaced(asking, namespace),
            asked: future::Cache::builder().max_capacity(REMEMBERED).time_to_live(GOOD_FOR).build(),
            look_ups: Calls::new(LOOK_UPS),
        }
    }

    /// The session of a token, while it lasts. Whether it is one of this driver is left to the caller.
    pub async fn session(&self, token: &Token) -> Result<Arc<SnapshotSessionData>, Refusal> {
        let digest = digest(token.reveal());
        let told = self.watched.told_with(&digest);
        let live = told.is_some();
        let session = match told.into_iter().flatten().next() {
            Some(session) => session,
            None => match self.ask(live, &digest, token).await {
                Ok(session) => session,
                // By now the watch may have told it, also where too many others asked.
                Err(refusal) => {
                    let told = self.watched.told_with(&digest).into_iter().flatten().next();
                    told.ok_or(refusal)?
                }
            },
        };
        match lasts(&session, token.reveal(), Timestamp::now()) {
            true => Ok(session),
            false => Err(invalid()),
        }
    }

    /// Asks the API server, once for all who ask for the same at the same time.
    async fn ask(
        &self,
        live: bool,
        digest: &str,
        token: &Token,
    ) -> Result<Arc<SnapshotSessionData>, Refusal> {
        let key = (live, digest.to_owned());
        let asked = self.asked.try_get_with(key.clone(), self.fetch(token)).await;
        if live {
            // From here on it is for the watch to tell.
            self.asked.invalidate(&key).await;
        }
        asked.map_err(|refusal| Refusal::clone(&refusal))
    }

    async fn fetch(&self, token: &Token) -> Result<Arc<SnapshotSessionData>, Refusal> {
        let _one = self.look_ups.begin().ok_or_else(|| too_many("unknown session tokens"))?;
        match in_time(self.asking.get_opt(token.reveal())).await {
            Ok(Some(session)) => Ok(Arc::new(session)),
            Ok(None) => Err(invalid()),
            Err(error) => Err(Refusal::api("read SnapshotSessionData in its namespace", &error)),
        }
    }
}

/// The index of sessions.
fn digest_of(session: &SnapshotSessionData) -> Option<Cow<'_, str>> {
    session.metadata.name.as_deref().map(|name| digest(name).into())
}

fn digest(token: &str) -> String {
    STANDARD_NO_PAD.encode(Sha256::digest(token.as_bytes()))
}

/// Whether the token is this session's, and the session is not over.
fn lasts(session: &SnapshotSessionData, token: &str, now: Timestamp) -> bool {
    let name = session.metadata.name.as_deref().unwrap_or_default();
    let same = bool::from(name.as_bytes().ct_eq(token.as_bytes()));
    same && session.metadata.deletion_timestamp.is_none() && now < session.spec.expiration_time.0
}

/// One and the same for whatever is wrong with a token.
pub fn invalid() -> Refusal {
    Refusal::new(
        Reason::SessionInvalid,
        "session_token: is not that of a snapshot session of this driver, or the session is over; make another \
         SnapshotSessionRequest",
    )
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::SignedDuration;

    use super::*;
    use crate::kubernetes::session::{SessionRequestReference, SnapshotSessionDataSpec};

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
    fn a_session_lasts_until_its_end_or_its_deletion_and_for_its_token_alone() {
        let now = Timestamp::now();
        let second = SignedDuration::from_secs(1);
        assert!(lasts(&session("abc", now + second), "abc", now));
        assert!(!lasts(&session("abc", now), "abc", now), "the end is no part of it");
        assert!(!lasts(&session("abc", now - second), "abc", now));
        assert!(!lasts(&session("abc", now + second), "abd", now));
        let mut deleted = session("abc", now + second);
        deleted.metadata.deletion_timestamp = Some(Time(now));
        assert!(!lasts(&deleted, "abc", now));
    }

    #[test]
    fn sessions_are_found_by_a_digest_of_their_token() {
        let one = session("abc", Timestamp::now());
        // SHA-256 of "abc", FIPS 180-2, appendix B.1.
        let expected = "ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0";
        assert_eq!(digest_of(&one).as_deref(), Some(expected));
        assert_eq!(digest("abc"), expected);
    }
}
