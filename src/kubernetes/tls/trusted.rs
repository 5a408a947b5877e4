//! CA certificates from a file: to publish, or to verify clients.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::files;
use telemetry::rate_limited_log::RateLimitedLog;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// What `parse` makes of the CA certificates of a file (PEM), reloaded on change. `flag` names the
/// file in errors.
///
/// # Errors
/// The file cannot be read or has other content.
pub fn watch_authorities<T: Send + Sync + 'static>(
    flag: &'static str,
    file: &Path,
    parse: fn(&str) -> anyhow::Result<T>,
    shutdown: Shutdown,
) -> anyhow::Result<watch::Receiver<T>> {
    let pem = authorities(flag, file)?;
    let (sender, parsed) = watch::channel(parse(&pem)?);
    let file = file.to_owned();
    task::spawn(async move {
        tokio::select! {
            () = follow(flag, file, parse, pem, sender) => {}
            () = shutdown.draining() => {}
        }
    });
    Ok(parsed)
}

/// Reads certificates that clients may see: valid ones, and never a key.
fn authorities(flag: &'static str, file: &Path) -> anyhow::Result<String> {
    let content = files::read(flag, file)?;
    let name = || format!("{flag} {}", file.display());
    let text =
        String::from_utf8(content).map_err(|_| anyhow::anyhow!("{}: is not text", name()))?;
    anyhow::ensure!(!text.contains("PRIVATE KEY"), "{}: contains a private key", name());
    super::client_config(text.as_bytes()).with_context(name)?;
    Ok(text)
}

async fn follow<T>(
    flag: &'static str,
    file: PathBuf,
    parse: fn(&str) -> anyhow::Result<T>,
    mut pem: String,
    parsed: watch::Sender<T>,
) {
    let mut polls = interval(POLL_INTERVAL);
    polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut error_log = RateLimitedLog::default();
    loop {
        polls.tick().await;
        let path = file.clone();
        // A panic is already in the log.
        let Ok(found) = task::blocking(move || authorities(flag, &path)).await else {
            continue;
        };
        match found.and_then(|found| Ok((parse(&found)?, found))) {
            Ok((new, found)) => {
                if found != pem {
                    parsed.send_replace(new);
                    pem = found;
                }
                error_log.clear();
            }
            Err(error) => {
                let error = format!("{error:#}");
                if error_log.is_new(&error) {
                    tracing::warn!(
                        error,
                        "rejected the changed CA certificates; keeping the current ones"
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn a_private_key_is_never_published() {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("ca.crt");
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(["x".to_owned()]).unwrap();
        let cert = params.self_signed(&key).unwrap().pem();
        std::fs::write(&file, &cert).unwrap();
        assert_eq!(authorities("--ca", &file).unwrap(), cert);
        for bad in [format!("{cert}{}", key.serialize_pem()), String::new(), "x".into()] {
            std::fs::write(&file, bad).unwrap();
            let error = format!("{:#}", authorities("--ca", &file).unwrap_err());
            assert!(error.contains("--ca"), "{error}");
        }
    }
}
