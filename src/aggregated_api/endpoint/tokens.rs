//! Tokens of this server's ServiceAccount (TokenRequest), one for each driver, so that an endpoint
//! cannot use its token elsewhere.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::PostParams;
use kube::{Api, Client};
use moka::future::Cache;
use tokio::time::Instant;

use crate::kubernetes::cache::in_time;
use crate::kubernetes::cbt_http::audience;

/// The minimum validity that the API server grants.
const VALIDITY: Duration = Duration::from_secs(600);
/// Maximum number of cached tokens.
const MAX_CACHED: u64 = 256;

/// Clones share the cache.
#[derive(Clone)]
pub struct Tokens {
    accounts: Api<ServiceAccount>,
    account: String,
    /// By the driver's name.
    known: Cache<String, Arc<Token>>,
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
            known: Cache::new(MAX_CACHED),
        }
    }

    /// A token that is valid for the driver's endpoint.
    pub async fn of(&self, driver: &str) -> Result<Arc<Token>, Arc<kube::Error>> {
        let known = self.known.try_get_with_by_ref(driver, self.make(driver)).await?;
        if Instant::now() < known.renew_at {
            return Ok(known);
        }
        self.forget(driver, &known).await;
        self.known.try_get_with_by_ref(driver, self.make(driver)).await
    }

    /// Removes a token that the endpoint refused or that is too old.
    pub async fn forget(&self, driver: &str, token: &Arc<Token>) {
        // Not a newer token of a concurrent call.
        if self.known.get(driver).await.is_some_and(|known| Arc::ptr_eq(&known, token)) {
            self.known.invalidate(driver).await;
        }
    }

    async fn make(&self, driver: &str) -> kube::Result<Arc<Token>> {
        let spec = TokenRequestSpec {
            audiences: vec![audience(driver)],
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
