//! The token of a request to the sidecar: a ServiceAccount's, for the sidecar's audience. Each
//! attempt gets a new token, because a listing can last longer than a token.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use k8s_openapi::api::authentication::v1::{SelfSubjectReview, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::io::AsyncReadExt;

use super::failure::Failure;
use super::find::call;

/// Maximum size of a token file in bytes.
const LONGEST: u64 = 64 << 10;

/// Prefix of the user name of every ServiceAccount, and only of those.
const ACCOUNT_PREFIX: &str = "system:serviceaccount:";

/// Where tokens come from.
pub struct Tokens(Origin);

enum Origin {
    File(PathBuf),
    Request {
        client: Client,
        /// Namespace and name; looked up when first needed.
        account: Option<(String, String)>,
        expiry: Duration,
    },
}

/// A token and its account. It has no `Debug`, so that it is not printed by mistake.
pub struct Token {
    pub secret: String,
    /// For messages.
    pub account: String,
}

impl Tokens {
    pub fn file(path: PathBuf) -> Self {
        Self(Origin::File(path))
    }

    /// Tokens of a ServiceAccount, by namespace and name; of the caller without one.
    pub fn requested(client: Client, account: Option<(String, String)>, expiry: Duration) -> Self {
        Self(Origin::Request { client, account, expiry })
    }

    /// A new token for an audience.
    pub async fn take(&mut self, audience: &str) -> Result<Token, Failure> {
        match &mut self.0 {
            Origin::File(path) => {
                let secret = read(path).await.map_err(Failure::never)?;
                Ok(Token { secret, account: format!("--token-file {}", path.display()) })
            }
            Origin::Request { client, account, expiry } => {
                let (namespace, name) = match account {
                    Some(known) => known,
                    None => account.insert(own_account(client).await?),
                };
                let secret = request(client, namespace, name, audience, *expiry).await?;
                Ok(Token { secret, account: format!("ServiceAccount {namespace}/{name}") })
            }
        }
    }
}

async fn request(
    client: &Client,
    namespace: &str,
    name: &str,
    audience: &str,
    expiry: Duration,
) -> Result<String, Failure> {
    let spec = TokenRequestSpec {
        audiences: vec![audience.to_owned()],
        expiration_seconds: i64::try_from(expiry.as_secs()).ok(),
        ..TokenRequestSpec::default()
    };
    let body = TokenRequest { spec, ..TokenRequest::default() };
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let what = format!("token of ServiceAccount {namespace}/{name}");
    let none = PostParams::default();
    let granted = call(&what, accounts.create_token_request(name, &none, &body)).await?;
    let token = granted.status.map(|status| status.token).filter(|token| !token.is_empty());
    token.ok_or_else(|| Failure::never(anyhow!("{what}: the API server granted none")))
}

/// Namespace and name of the ServiceAccount that the API server knows this process as.
async fn own_account(client: &Client) -> Result<(String, String), Failure> {
    let reviews: Api<SelfSubjectReview> = Api::all(client.clone());
    let (none, empty) = (PostParams::default(), SelfSubjectReview::default());
    let review = call("SelfSubjectReview", reviews.create(&none, &empty)).await?;
    let user = review.status.and_then(|status| status.user_info).and_then(|user| user.username);
    let user = user.unwrap_or_default();
    let account = user.strip_prefix(ACCOUNT_PREFIX).and_then(|account| account.split_once(':'));
    match account {
        Some((namespace, name)) => Ok((namespace.to_owned(), name.to_owned())),
        None => Err(Failure::never(anyhow!(
            "the API server knows the kubeconfig's user as {user:?}, which is no ServiceAccount: set \
             --service-account or --token-file"
        ))),
    }
}

async fn read(path: &Path) -> Result<String> {
    let named = || format!("--token-file {}", path.display());
    let file = tokio::fs::File::open(path).await.with_context(named)?;
    let mut text = String::new();
    file.take(LONGEST + 1).read_to_string(&mut text).await.with_context(named)?;
    let token = text.trim();
    if token.is_empty() || text.len() as u64 > LONGEST || token.contains(char::is_whitespace) {
        bail!("{}: the file must contain one token and nothing else", named());
    }
    Ok(token.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_token_file_is_reread_and_holds_only_a_token() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let mut tokens = Tokens::file(path.clone());
        for token in ["first", "second\n"] {
            std::fs::write(&path, token).unwrap();
            let taken = tokens.take("audience").await.map_err(|failure| failure.error).unwrap();
            assert_eq!(taken.secret, token.trim());
        }
        let long = "x".repeat(70_000);
        for bad in ["", " \n", "two tokens", &long] {
            std::fs::write(&path, bad).unwrap();
            let Err(failure) = tokens.take("audience").await else { panic!("{bad:?}") };
            let message = format!("{:#}", failure.error);
            assert!(message.contains("--token-file") && !message.contains("two"), "{message}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(tokens.take("audience").await.is_err());
    }
}
