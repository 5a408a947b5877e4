//! Tokens of this program's ServiceAccount (TokenRequest), one for each audience, so that a server
//! which receives one cannot use it elsewhere.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::Instant;

use super::cache::in_time;
use telemetry::memo::{Keep, Memo};

/// The purpose of the request for a token, for messages.
pub const REQUESTING: &str = "create a token of its ServiceAccount (serviceaccounts/token)";

/// The minimum validity that the API server grants.
const VALIDITY: Duration = Duration::from_secs(600);
/// Maximum number of cached tokens: more than a cluster has nodes.
const MAX_CACHED: u64 = 8192;

/// Clones share the cache.
#[derive(Clone)]
pub struct Tokens {
    accounts: Api<ServiceAccount>,
    account: String,
    /// By audience.
    known: Memo<String, Arc<Token>, kube::Error>,
}

/// A token. It is never printed.
pub struct Token {
    pub text: String,
    renew_at: Instant,
}

impl Tokens {
    pub fn new(client: Client, namespace: &str, account: &str) -> Self {
        Self {
            accounts: Api::namespaced(client, namespace),
            account: account.to_owned(),
            known: Memo::new(MAX_CACHED, Keep::Always),
        }
    }

    /// A token for this audience.
    ///
    /// # Errors
    /// The API server did not issue one.
    async fn of(&self, audience: &str) -> Result<Arc<Token>, Arc<kube::Error>> {
        let known = self.known.get_or_load(audience, self.make(audience)).await?;
        if Instant::now() < known.renew_at {
            return Ok(known);
        }
        self.forget(audience, &known);
        self.known.get_or_load(audience, self.make(audience)).await
    }

    /// Makes a call with a token for this audience, and a second one with a new token if `is_refused`
    /// says that the first was: it may have been revoked, or have expired while the process was
    /// suspended.
    ///
    /// # Errors
    /// That of the last call, or what `no_token` makes of the API server's.
    pub async fn call<T, E, C: Future<Output = Result<T, E>>>(
        &self,
        audience: &str,
        no_token: impl Fn(Arc<kube::Error>) -> E,
        is_refused: impl Fn(&E) -> bool,
        call: impl Fn(Arc<Token>) -> C,
    ) -> Result<T, E> {
        let token = self.of(audience).await.map_err(&no_token)?;
        let answer = call(token.clone()).await;
        if !answer.as_ref().is_err_and(is_refused) {
            return answer;
        }
        self.forget(audience, &token);
        call(self.of(audience).await.map_err(no_token)?).await
    }

    /// Removes a token that a server refused or that is too old.
    fn forget(&self, audience: &str, token: &Arc<Token>) {
        // Not a newer token of a concurrent call.
        if self.known.get(audience).is_some_and(|known| Arc::ptr_eq(&known, token)) {
            self.known.remove(audience);
        }
    }

    async fn make(&self, audience: &str) -> kube::Result<Arc<Token>> {
        let spec = TokenRequestSpec {
            audiences: vec![audience.to_owned()],
            expiration_seconds: i64::try_from(VALIDITY.as_secs()).ok(),
            ..TokenRequestSpec::default()
        };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        let requested_at = Instant::now();
        let post = PostParams::default();
        let made =
            in_time(self.accounts.create_token_request(&self.account, &post, &request)).await?;
        let none = || kube::Error::Service("the API server returned no token".into());
        let status = made.status.ok_or_else(none)?;
        let end = SystemTime::from(status.expiration_timestamp.0);
        let validity = end.duration_since(SystemTime::now()).unwrap_or_default();
        Ok(Arc::new(Token { text: status.token, renew_at: requested_at + usable_for(validity) }))
    }
}

/// How long a token is used, given its validity: the API server may grant more than requested, and
/// clocks differ.
fn usable_for(validity: Duration) -> Duration {
    validity.min(VALIDITY) * 4 / 5
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_used_for_four_fifths_of_its_validity() {
        assert_eq!(usable_for(Duration::from_secs(600)), Duration::from_secs(480));
        assert_eq!(usable_for(Duration::from_secs(3600)), Duration::from_secs(480));
        assert_eq!(usable_for(Duration::from_secs(10)), Duration::from_secs(8));
        assert_eq!(usable_for(Duration::ZERO), Duration::ZERO);
    }
}
