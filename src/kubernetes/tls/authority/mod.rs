//! `--self-signed`: an authority of the program's own, which lasts. It is kept in a Secret ([`secret`]), so that any number of
//! replicas have the same one; each replica makes its own certificate of it ([`issue`]), which it keeps in memory and
//! replaces in time. The Secret is read again and again: an administrator may replace the authority in it.

mod issue;
mod secret;

use std::path::Path;
use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use self::issue::Ca;
use self::secret::{Found, State};
use super::Certificates;
use crate::kubernetes::client::within;
use crate::kubernetes::name;
use crate::quantity::duration;
use crate::telemetry::complaint::Complaint;
use crate::telemetry::shutdown::Shutdown;

/// Time between two looks at the Secret: a twentieth of a certificate's validity, within these.
const LOOK_EVERY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// How long one call to the API server may take.
const CALL: Duration = Duration::from_secs(10);
/// Writes of others that one round follows. Each is a step, so there are not many.
const CONFLICTS: usize = 10;
/// How long the first certificate may take.
const START: Duration = Duration::from_secs(120);
/// Time between two attempts at the start.
const RETRY: Duration = Duration::from_secs(1);
/// Where a pod finds the name of its namespace.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// What --self-signed-validity may be.
const VALIDITY: (Duration, Duration) =
    (Duration::from_secs(20), Duration::from_secs(10 * 365 * 24 * 3600));

/// The flags. The command that flattens them has --service-address, too.
#[derive(Debug, Clone, clap::Args)]
// Its group would have the name `Args`, as that of the role that flattens it.
#[group(skip)]
pub struct Args {
    /// Make certificates of an authority of its own, which is kept in a Secret; needs no --tls-cert. Replicas with the
    /// same Secret have the same authority.
    #[arg(long, requires = "service_address", conflicts_with_all = ["tls_cert", "tls_key"])]
    pub self_signed: bool,

    /// Secret that holds the authority; made if it is not there or has no data. By default one of the mode's own:
    /// csi-loopback-MODE-ca.
    #[arg(long, requires = "self_signed", value_parser = name::object, value_name = "NAME")]
    pub self_signed_secret: Option<String>,

    /// How long a certificate is good for, from 20s to ten years; it is replaced when two thirds are over. The authority
    /// lasts.
    #[arg(long, requires = "self_signed", default_value = "7days", value_parser = validity, value_name = "TIME")]
    pub self_signed_validity: Duration,

    /// Namespace of the Secret; by default that of the pod.
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
    /// It is not given, and this is no pod.
    pub fn namespace(&self) -> anyhow::Result<String> {
        if let Some(namespace) = &self.namespace {
            return Ok(namespace.clone());
        }
        let namespace =
            super::files::read("--namespace is not given, and", Path::new(NAMESPACE_FILE))?;
        Ok(String::from_utf8_lossy(&namespace).trim().to_owned())
    }
}

/// Begins to keep the authority in the Secret, and waits for the first certificate, which is for `names`: DNS names
/// and IP addresses. Returns the certificate and what clients are to trust (PEM), which may both change.
///
/// # Errors
/// The Secret is another's, or there is no certificate within two minutes; why.
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
    let mut keeper = Keeper {
        secrets: Api::namespaced(client, &namespace),
        place: format!("Secret {namespace}/{name}"),
        name,
        mode,
        validity: args.self_signed_validity,
        names,
        pem: sender,
        served: None,
        complaint: Complaint::default(),
    };
    let until = Instant::now() + START;
    let certificates = loop {
        match keeper.round().await {
            Ok(()) => {}
            Err(error) if error.is::<Refused>() || Instant::now() >= until => {
                return Err(error.context("--self-signed"));
            }
            Err(error) => keeper.complain(&error),
        }
        if let Some(served) = &keeper.served {
            break served.certificates.clone();
        }
        tokio::select! {
            () = sleep(RETRY) => {}
            () = shutdown.draining() => anyhow::bail!("--self-signed: stopped before there was a certificate"),
        }
    };
    tokio::spawn(async move {
        tokio::select! {
            () = keeper.keep() => {}
            // Until the very end: clients may come while others are drained.
            () = shutdown.ending() => {}
        }
    });
    Ok((certificates, pem))
}

/// The Secret cannot be used.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(
        "{place} is not this program's: {why}; name another with --self-signed-secret or delete it"
    )]
    Foreign { place: String, why: String },
    #[error(
        "the authority in {place} has expired; put another one in its place (docs/reference/sidecar.md) or delete the Secret"
    )]
    Expired { place: String },
}

struct Keeper {
    secrets: Api<Secret>,
    /// For messages.
    place: String,
    name: String,
    mode: &'static str,
    /// Of a certificate.
    validity: Duration,
    names: Vec<String>,
    pem: watch::Sender<String>,
    served: Option<Served>,
    complaint: Complaint,
}

/// The certificate that this replica has made for itself.
struct Served {
    certificates: Certificates,
    authority: Ca,
    renew_at: SystemTime,
}

impl Keeper {
    async fn keep(mut self) {
        let (least, most) = LOOK_EVERY;
        let every = (self.validity / 20).clamp(least, most);
        loop {
            sleep(every).await;
            match self.round().await {
                Ok(()) if self.complaint.is_over() => {
                    tracing::info!("{} is in order again", self.place);
                }
                Ok(()) => {}
                Err(error) => {
                    self.complain(&error);
                    // The authority that was read last is as good without the API server.
                    if let Err(error) = self.renew(SystemTime::now()) {
                        tracing::error!(error = format!("{error:#}"), "no new certificate");
                    }
                }
            }
        }
    }

    fn complain(&mut self, error: &anyhow::Error) {
        let error = format!("{error:#}");
        if self.complaint.is_new(&error) {
            tracing::warn!(error, "keeping the authority in {}; trying again", self.place);
        }
    }

    /// Reads the Secret, writes it if there is no authority in it or one that needs a new certificate, and serves what it holds
    /// then.
    async fn round(&mut self) -> anyhow::Result<()> {
        for _ in 0..CONFLICTS {
            let before = within(CALL, self.secrets.get_opt(&self.name)).await?;
            let now = SystemTime::now();
            let state = match secret::found(before.as_ref()) {
                Found::Held(state) => match state.signing.renewed(now)? {
                    Some(signing) => state.with(signing),
                    None => return self.serve(&state, now),
                },
                Found::Foreign(why) => Err(Refused::Foreign { place: self.place.clone(), why })?,
                Found::Corrupt(why) => self.anew(&format!("is damaged ({why})"), now)?,
                Found::Nothing if self.served.is_some() => self.anew("is gone", now)?,
                Found::Nothing => State::new(Ca::new(self.mode, now)?),
            };
            if self.write(&state, before.as_ref()).await? {
                tracing::info!("{}: written", self.place);
            }
            // Read again: what another wrote is followed.
        }
        anyhow::bail!("{} is changed by others all the time", self.place)
    }

    fn anew(&self, what: &str, now: SystemTime) -> anyhow::Result<State> {
        tracing::error!(
            "{} {what}: beginning with a new authority; clients need its certificate",
            self.place
        );
        Ca::new(self.mode, now).map(State::new)
    }

    /// Returns false when another was faster: there is one of that name by now, a later one, or none any more.
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

    fn serve(&mut self, state: &State, now: SystemTime) -> anyhow::Result<()> {
        if state.signing.not_after <= now {
            Err(Refused::Expired { place: self.place.clone() })?;
        }
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

    /// Replaces the certificate if it is time.
    fn renew(&mut self, now: SystemTime) -> anyhow::Result<()> {
        let Some(served) = self.served.as_mut().filter(|served| served.renew_at <= now) else {
            return Ok(());
        };
        let pair = issue::certificate(&served.authority, &self.names, now, self.validity)?;
        served.certificates.replace(pair);
        served.renew_at = now + self.validity * 2 / 3;
        tracing::info!("new connections get a new certificate");
        Ok(())
    }
}
