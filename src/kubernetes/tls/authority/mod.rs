//! Certificate authorities of the program. A Secret holds one ([`secret`]), so that all replicas
//! share it ([`shared`]). With `--self-signed` each replica issues its own certificate ([`issue`]),
//! keeps it in memory and replaces it in time. A [`Signer`] signs the keys of other servers.

mod issue;
mod secret;
mod shared;
mod signer;

use std::path::Path;
use std::time::{Duration, SystemTime};

use kube::Client;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

pub use self::signer::{Issued, Signer};

use self::issue::Ca;
use self::secret::State;
use self::shared::{Refused, SharedAuthority};
use super::Certificates;
use crate::name;
use common::quantity::duration;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Limits of the poll interval of the Secret, which is a twentieth of a certificate's validity.
const POLL_INTERVAL: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// Timeout of the first certificate.
const START: Duration = Duration::from_secs(120);
/// Interval between attempts at the start.
const RETRY: Duration = Duration::from_secs(1);
/// File in a pod with the name of its namespace.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// Range of --self-signed-validity.
const VALIDITY: (Duration, Duration) =
    (Duration::from_secs(20), Duration::from_secs(10 * 365 * 24 * 3600));

/// The flags. A command that flattens them must also have --service-address.
#[derive(Debug, Clone, clap::Args)]
// The default name, `Args`, would collide with the group of the struct that flattens this one.
#[group(skip)]
pub struct Args {
    /// Issue certificates from an authority that is kept in a Secret, instead of --tls-cert;
    /// replicas share the authority
    #[arg(long, requires = "service_address", conflicts_with_all = ["tls_cert", "tls_key"])]
    pub self_signed: bool,

    /// Secret that holds the authority, created if missing; otherwise csi-loopback-MODE-ca is used
    #[arg(long, requires = "self_signed", value_parser = name::object, value_name = "NAME")]
    pub self_signed_secret: Option<String>,

    /// Validity of a certificate, 20s to 3650days; it is replaced after two thirds
    #[arg(long, requires = "self_signed", default_value = "7days", value_parser = validity, value_name = "TIME")]
    pub self_signed_validity: Duration,

    /// Namespace of the Secret; otherwise the pod's namespace is used
    #[arg(long, env = "POD_NAMESPACE", value_parser = name::object, value_name = "NAME")]
    pub namespace: Option<String>,
}

fn validity(text: &str) -> Result<Duration, String> {
    let (least, most) = VALIDITY;
    duration(text, least..=most, "from 20s to 3650days")
}

impl Args {
    /// The namespace of the program.
    ///
    /// # Errors
    /// The namespace is not given, and the program is not in a pod.
    pub fn namespace(&self) -> anyhow::Result<String> {
        if let Some(namespace) = &self.namespace {
            return Ok(namespace.clone());
        }
        let namespace =
            super::files::read("set --namespace or run in a pod:", Path::new(NAMESPACE_FILE))?;
        Ok(String::from_utf8_lossy(&namespace).trim().to_owned())
    }
}

/// Starts to maintain the authority in the Secret, and waits for the first certificate for `names`
/// (DNS names and IP addresses). Returns the certificate and the CA certificates that clients must
/// trust (PEM); both may change.
///
/// # Errors
/// The Secret belongs to another party, or there is no certificate within two minutes.
pub async fn start(
    client: Client,
    args: &Args,
    mode: &'static str,
    names: Vec<String>,
    shutdown: Shutdown,
) -> anyhow::Result<(Certificates, watch::Receiver<String>)> {
    let namespace = args.namespace()?;
    let name = args.self_signed_secret.clone().unwrap_or_else(|| format!("csi-loopback-{mode}-ca"));
    let (sender, pem) = watch::channel(String::new());
    let mut manager = OwnCertificate {
        authority: SharedAuthority::new(client, &namespace, name, mode),
        validity: args.self_signed_validity,
        names,
        pem: sender,
        served: None,
    };
    let until = Instant::now() + START;
    let certificates = loop {
        match manager.round().await {
            Ok(()) => {}
            Err(error) if error.is::<Refused>() || Instant::now() >= until => {
                return Err(error.context("--self-signed"));
            }
            Err(error) => manager.authority.complain(&error),
        }
        if let Some(served) = &manager.served {
            break served.certificates.clone();
        }
        tokio::select! {
            () = sleep(RETRY) => {}
            () = shutdown.draining() => anyhow::bail!("--self-signed: stopped before the first certificate was issued"),
        }
    };
    task::spawn(async move {
        tokio::select! {
            () = manager.run() => {}
            // Until the process ends: clients may connect while others are drained.
            () = shutdown.ending() => {}
        }
    });
    Ok((certificates, pem))
}

/// A certificate for `names` of an authority that exists only in this process, and the authority's
/// certificate (PEM).
///
/// # Errors
/// No random numbers.
pub fn in_memory(mode: &str, names: &[String]) -> anyhow::Result<(Certificates, String)> {
    let now = SystemTime::now();
    let ca = Ca::new(mode, now)?;
    let pair = issue::certificate(&ca, names, now, VALIDITY.1)?;
    Ok((Certificates::new(pair), ca.cert))
}

struct OwnCertificate {
    authority: SharedAuthority,
    /// Validity of a certificate.
    validity: Duration,
    names: Vec<String>,
    pem: watch::Sender<String>,
    served: Option<Served>,
}

/// The certificate that this replica issued for itself.
struct Served {
    certificates: Certificates,
    authority: Ca,
    renew_at: SystemTime,
}

impl OwnCertificate {
    async fn run(mut self) {
        let (least, most) = POLL_INTERVAL;
        let every = (self.validity / 20).clamp(least, most);
        loop {
            sleep(every).await;
            match self.round().await {
                Ok(()) => self.authority.succeeded(),
                Err(error) => {
                    self.authority.complain(&error);
                    // The last authority remains usable while the API server is unavailable.
                    if let Err(error) = self.renew(SystemTime::now()) {
                        tracing::error!(
                            error = format!("{error:#}"),
                            "failed to renew the certificate"
                        );
                    }
                }
            }
        }
    }

    /// Serves the content of the Secret.
    async fn round(&mut self) -> anyhow::Result<()> {
        let now = SystemTime::now();
        let state = self.authority.current(now).await?;
        self.serve(&state, now)
    }

    fn serve(&mut self, state: &State, now: SystemTime) -> anyhow::Result<()> {
        self.pem.send_if_modified(|pem| {
            let changed = *pem != state.bundle;
            pem.clone_from(&state.bundle);
            changed
        });
        match &mut self.served {
            Some(served) if served.authority == state.signing => self.renew(now),
            Some(served) => {
                served.authority = state.signing.clone();
                served.renew_at = now;
                self.renew(now)
            }
            None => {
                let authority = state.signing.clone();
                let pair = issue::certificate(&authority, &self.names, now, self.validity)?;
                let certificates = Certificates::new(pair);
                let renew_at = now + self.validity * 2 / 3;
                self.served = Some(Served { certificates, authority, renew_at });
                Ok(())
            }
        }
    }

    /// Replaces the certificate if it is due.
    fn renew(&mut self, now: SystemTime) -> anyhow::Result<()> {
        let Some(served) = self.served.as_mut().filter(|served| served.renew_at <= now) else {
            return Ok(());
        };
        let pair = issue::certificate(&served.authority, &self.names, now, self.validity)?;
        served.certificates.replace(pair);
        served.renew_at = now + self.validity * 2 / 3;
        tracing::info!("new connections use a new certificate");
        Ok(())
    }
}
