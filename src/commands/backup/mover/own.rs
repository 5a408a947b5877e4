//! The objects that a command creates. The client repeats a creation after the responses 429, 503
//! and 504, and the first attempt may have created the object. So each object has the random mark
//! of the command: "exists already" is success if the object has it. A creation that failed leaves
//! nothing: it may take effect late, so its object is then deleted for some time.

use std::time::Duration;

use anyhow::{Context, Result};
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::{Api, ResourceExt};
use kubernetes::cache::Object;
use serde::Serialize;
use tokio::time::timeout;

use super::super::document::nonce;
use super::{CLEAN_UP, Mover};
use crate::client::cluster::removal::{self, request_deletion};
use crate::client::cluster::{Retry, call};

/// Annotation with the mark of the command that created an object.
pub const MARK: &str = "backup.loopback.csi.local/command";
/// How long an object may appear after its creation got no response.
const LATE: Duration = Duration::from_secs(5);

/// Beginning of the random names.
const NAME_PREFIX: &str = "csi-loopback-mover-";

/// A name that is known before the call can be deleted even if the response is lost.
///
/// # Errors
/// The system has no random bytes.
pub fn new_name() -> Result<String> {
    Ok(format!("{NAME_PREFIX}{}", nonce()?))
}

/// [`removal::until_gone`], with the time limit of a clean-up.
pub async fn until_gone<R: Future<Output = kube::Result<bool>>>(
    late: Duration,
    request: impl FnMut() -> R,
) -> Result<()> {
    let removal = removal::until_gone(late, request);
    timeout(CLEAN_UP, removal).await.context("it was not removed in time")?
}

impl Mover<'_> {
    /// Creates an object, which has the mark of this command.
    ///
    /// # Errors
    /// The API server refused, and the object does not exist, or the error names it.
    pub(super) async fn create<K: Object + Serialize>(
        &self,
        api: &Api<K>,
        mut object: K,
    ) -> Result<()> {
        object.annotations_mut().insert(MARK.to_owned(), self.mark.clone());
        let (what, name) = (self.named(&object), object.name_any());
        let creation = async {
            match api.create(&PostParams::default(), &object).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    match api.get_opt(&name).await? {
                        // An earlier attempt created it.
                        Some(found) if self.owns(&found) => Ok(()),
                        _ => Err(kube::Error::Api(status)),
                    }
                }
                outcome => outcome.map(drop),
            }
        };
        let Err(failure) = call(&what, creation).await else { return Ok(()) };
        if failure.retry == Retry::Never {
            return Err(failure.error);
        }
        match self.discard(api, &name, LATE).await {
            Ok(()) => Err(failure.error),
            Err(left) => Err(failure.error.context(format!("{what} may remain: {left:#}"))),
        }
    }

    /// Deletes an object of this command, and returns when it is gone: at the earliest after `late`.
    /// An object of another creator with this name stays.
    pub(super) async fn discard<K: Object>(
        &self,
        api: &Api<K>,
        name: &str,
        late: Duration,
    ) -> Result<()> {
        until_gone(late, || self.delete(api, name)).await
    }

    /// Requests the deletion of an object of this command; returns whether there was one.
    async fn delete<K: Object>(&self, api: &Api<K>, name: &str) -> kube::Result<bool> {
        let mut params = DeleteParams::background();
        // A name that the user has chosen may be that of another object. A random one need not be
        // read, which may fail.
        if !name.starts_with(NAME_PREFIX) {
            let Some(found) = api.get_opt(name).await?.filter(|found| self.owns(found)) else {
                return Ok(false);
            };
            let uid = found.meta().uid.clone();
            params.preconditions = Some(Preconditions { uid, ..Preconditions::default() });
        }
        request_deletion(api, name, &params).await
    }

    fn owns<K: Object>(&self, object: &K) -> bool {
        object.annotations().get(MARK) == Some(&self.mark)
    }

    fn named<K: Object>(&self, object: &K) -> String {
        let (kind, name) = (K::kind(&()), object.name_any());
        match K::plural(&()).as_ref() {
            "persistentvolumes" => format!("{kind} {name}"),
            _ => format!("{kind} {}/{name}", self.namespace),
        }
    }
}
