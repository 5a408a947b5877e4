//! Deletes objects, and waits until they are gone.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Result, bail};
use kube::Api;
use kube::api::DeleteParams;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep};

const POLL: Duration = Duration::from_millis(200);

/// Repeats a request, which returns whether there is an object, until there is none: at the earliest
/// after `late`. Has no time limit.
///
/// # Errors
/// The caller has no permission.
pub async fn until_gone<R: Future<Output = kube::Result<bool>>>(
    late: Duration,
    mut request: impl FnMut() -> R,
) -> Result<()> {
    let until = Instant::now() + late;
    loop {
        match request().await {
            Ok(true) => {}
            Ok(false) if Instant::now() >= until => return Ok(()),
            Err(kube::Error::Api(status)) if matches!(status.code, 401 | 403) => {
                bail!("{}", status.message)
            }
            Ok(false) | Err(_) => {}
        }
        sleep(POLL).await;
    }
}

/// Requests the deletion of an object; returns whether there was one.
///
/// # Errors
/// The API server refused.
pub async fn request_deletion<K: Clone + Debug + DeserializeOwned>(
    api: &Api<K>,
    name: &str,
    params: &DeleteParams,
) -> kube::Result<bool> {
    match api.delete(name, params).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        outcome => outcome.map(|_| true),
    }
}
