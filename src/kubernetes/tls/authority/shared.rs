//! An authority that replicas share: it is read from a Secret, which is polled, because an
//! administrator may replace it, and written there if it has none or needs a new certificate.

use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::{Api, Client};

use super::issue::Ca;
use super::secret::{self, Found, State};
use crate::client::within;
use telemetry::rate_limited_log::RateLimitedLog;

/// Timeout of one call to the API server.
const CALL: Duration = Duration::from_secs(10);
/// Maximum number of concurrent writes by others that one round follows. Each is one step of few.
const CONFLICTS: usize = 10;

/// Why the Secret cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error(
        "{title} does not belong to this program: {why}; select another one with --self-signed-secret or \
         --node-signer-secret, or delete it"
    )]
    Foreign { title: String, why: String },
    #[error(
        "the authority in {title} has expired; replace it (docs/reference/sidecar.md) or delete the Secret"
    )]
    Expired { title: String },
}

pub struct SharedAuthority {
    secrets: Api<Secret>,
    /// Title of the Secret, for messages.
    pub title: String,
    name: String,
    mode: &'static str,
    /// Whether a round has found an authority.
    is_known: bool,
    error_log: RateLimitedLog,
}

impl SharedAuthority {
    pub fn new(client: Client, namespace: &str, name: String, mode: &'static str) -> Self {
        Self {
            secrets: Api::namespaced(client, namespace),
            title: format!("Secret {namespace}/{name}"),
            name,
            mode,
            is_known: false,
            error_log: RateLimitedLog::default(),
        }
    }

    /// Logs that a round failed, unless the log has it.
    pub fn complain(&mut self, error: &anyhow::Error) {
        let error = format!("{error:#}");
        if self.error_log.is_new(&error) {
            tracing::warn!(error, "failed to maintain the authority in {}; retrying", self.title);
        }
    }

    /// Logs that a round succeeded again.
    pub fn succeeded(&mut self) {
        if self.error_log.clear() {
            tracing::info!("{} is up to date again", self.title);
        }
    }

    /// Reads the Secret, and writes it if it has no authority or one that needs a new certificate.
    pub async fn current(&mut self, now: SystemTime) -> anyhow::Result<State> {
        for _ in 0..CONFLICTS {
            let before = within(CALL, self.secrets.get_opt(&self.name)).await?;
            let state = match secret::found(before.as_ref()) {
                Found::Held(state) => match state.signing.renewed(now)? {
                    Some(signing) => state.with(signing),
                    None if state.signing.not_after <= now => {
                        Err(Refused::Expired { title: self.title.clone() })?
                    }
                    None => {
                        self.is_known = true;
                        return Ok(state);
                    }
                },
                Found::Foreign(why) => Err(Refused::Foreign { title: self.title.clone(), why })?,
                Found::Corrupt(why) => self.replace(&format!("is damaged ({why})"), now)?,
                Found::Nothing if self.is_known => self.replace("was deleted", now)?,
                Found::Nothing => State::new(Ca::new(self.mode, now)?),
            };
            if self.write(&state, before.as_ref()).await? {
                tracing::info!("wrote {}", self.title);
            }
            // Read again, because another replica may have written it.
        }
        anyhow::bail!("{} is constantly changed by other clients", self.title)
    }

    fn replace(&self, what: &str, now: SystemTime) -> anyhow::Result<State> {
        tracing::error!(
            "{} {what}: creating a new authority; clients must trust its certificate",
            self.title
        );
        Ca::new(self.mode, now).map(State::new)
    }

    /// Returns false if another client was faster: the Secret was created, changed or deleted
    /// meanwhile.
    async fn write(&self, state: &State, before: Option<&Secret>) -> anyhow::Result<bool> {
        let secret = secret::holding(state, &self.name, self.mode, before);
        let post = PostParams::default();
        let written = match before {
            Some(_) => within(CALL, self.secrets.replace(&self.name, &post, &secret)).await,
            None => within(CALL, self.secrets.create(&post, &secret)).await,
        };
        match written {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status))
                if status.code == 409 || (status.code == 404 && before.is_some()) =>
            {
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }
}
