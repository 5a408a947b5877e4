//! `--self-signed`: an authority of the program's own. It is kept in a Secret, so that any number of replicas have the
//! same one; each replica makes its own certificate of it, which it keeps in memory. [`state`] says when what
//! is done, [`secret`] how it is kept, [`issue`] makes certificates; this file does it, round after round.

mod issue;
mod secret;
mod state;

use std::path::Path;
use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use self::state::{Action, Ca, Found, State, Timing};
use super::Certificates;
use super::bundles::{Bundles, Published};
use crate::kubernetes::client::within;
use crate::kubernetes::name;
use crate::quantity::duration;
use crate::telemetry::complaint::Complaint;
use crate::telemetry::shutdown::Shutdown;

/// A certificate lasts no longer than this, and is replaced when two thirds of it are over.
const CERTIFICATE: Duration = Duration::from_secs(7 * 24 * 3600);
/// Time between two looks at the Secret: a twentieth of the overlap, within these.
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
/// What --self-signed-validity may be. The upper end keeps times within what certificates can hold.
const VALIDITY: (Duration, Duration) =
    (Duration::from_secs(20), Duration::from_secs(10 * 365 * 24 * 3600));

/// The flags. The command that flattens them has --service-address, too.
#[derive(Debug, Clone, clap::Args)]
// Its group would have the name `Args`, as that of the role that flattens it.
#[group(skip)]
pub struct Args {
    /// Make certificates of an authority of its own, which is kept in a Secret and replaced in time; needs no
    /// --tls-cert. Replicas with the same Secret have the same authority.
    #[arg(long, requires = "service_address", conflicts_with_all = ["tls_cert", "tls_key"])]
    pub self_signed: bool,

    /// Secret that holds the authority; made if it is not there or has no data. By default one of the mode's own:
    /// csi-loopback-MODE-ca.
    #[arg(long, requires = "self_signed", value_parser = name::object, value_name = "NAME")]
    pub self_signed_secret: Option<String>,

    /// How long an authority is good for, from 20s to ten years. The next one is made when six tenths of it are left
    /// and signs when clients had two tenths to learn of it.
    #[arg(long, requires = "self_signed", default_value = "365days", value_parser = validity, value_name = "TIME")]
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
/// and IP addresses. Replicas of a mode share an authority, and modes do not: each knows only of its own that it is published
/// everywhere. `managed` says that somebody publishes what [`Bundles`] has, in each [`Place`](super::Place) of them, and
/// tells it; if not, publishing is done with writing the Secret.
///
/// # Errors
/// The Secret is another's, or there is no certificate within two minutes; why.
pub async fn start(
    client: Client,
    args: &Args,
    mode: &str,
    names: Vec<String>,
    managed: bool,
    shutdown: Shutdown,
) -> anyhow::Result<(Certificates, Bundles)> {
    let namespace = args.namespace()?;
    let name = args.self_signed_secret.clone().unwrap_or_else(|| format!("csi-loopback-{mode}-ca"));
    let (pem_sender, pem) = watch::channel(String::new());
    let (bundles, published) = Bundles::new(pem);
    let mut keeper = Keeper {
        secrets: Api::namespaced(client, &namespace),
        place: format!("Secret {namespace}/{name}"),
        name,
        timing: Timing { validity: args.self_signed_validity },
        names,
        published: managed.then_some(published),
        pem: pem_sender,
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
    Ok((certificates, bundles))
}

/// The Secret is another's.
#[derive(Debug, thiserror::Error)]
#[error(
    "{place} is not this program's: {why}; name another with --self-signed-secret or delete it"
)]
struct Refused {
    place: String,
    why: String,
}

struct Keeper {
    secrets: Api<Secret>,
    /// For messages.
    place: String,
    name: String,
    timing: Timing,
    names: Vec<String>,
    /// What clients find; nothing where the Secret is what they find.
    published: Option<Published>,
    pem: watch::Sender<String>,
    served: Option<Served>,
    complaint: Complaint,
}

/// The certificate that this replica has made for itself.
struct Served {
    certificates: Certificates,
    authority: String,
    renew_at: SystemTime,
    /// When the Secret was read last.
    heard: Instant,
}

impl Keeper {
    async fn keep(mut self) {
        let (least, most) = LOOK_EVERY;
        let every = (self.timing.overlap() / 20).clamp(least, most);
        loop {
            sleep(every).await;
            match self.round().await {
                Ok(()) if self.complaint.is_over() => {
                    tracing::info!("{} is in order again", self.place);
                }
                Ok(()) => {}
                Err(error) => {
                    self.complain(&error);
                    self.fall_silent();
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

    /// Whoever has not heard of the Secret for long publishes no more: it might be what others have replaced.
    fn fall_silent(&self) {
        let stale = self.timing.stale();
        if self.served.as_ref().is_none_or(|served| served.heard.elapsed() >= stale) {
            self.pem.send_if_modified(|pem| !std::mem::take(pem).is_empty());
        }
    }

    /// Reads the Secret, does what is due, and serves what it holds then.
    async fn round(&mut self) -> anyhow::Result<()> {
        for _ in 0..CONFLICTS {
            let heard = Instant::now();
            let before = within(CALL, self.secrets.get_opt(&self.name)).await?;
            let found = secret::found(before.as_ref());
            let action = self.due(&found)?;
            let timing = self.timing;
            let now = SystemTime::now();
            let make = || issue::new_authority(now, timing.validity);
            match state::apply(action, now, &found, timing, make)? {
                Some(state) => {
                    if self.write(&state, before.as_ref()).await? {
                        tracing::info!(?action, "{}: written", self.place);
                    }
                    // Read again: what another wrote is followed, and there may be more to do.
                }
                None => match found {
                    Found::Held(state) => return self.serve(&state, heard),
                    _ => return Ok(()),
                },
            }
        }
        anyhow::bail!("{} is changed by others all the time", self.place)
    }

    fn due(&self, found: &Found) -> anyhow::Result<Action> {
        match found {
            Found::Foreign(why) => {
                Err(Refused { place: self.place.clone(), why: why.clone() })?;
            }
            Found::Corrupt(why) => {
                tracing::error!(
                    why,
                    "{} is damaged: beginning with a new authority; clients need its certificate",
                    self.place
                );
            }
            Found::Nothing if self.served.is_some() => {
                tracing::error!(
                    "{} is gone: beginning with a new authority; clients need its certificate",
                    self.place
                );
            }
            Found::Nothing | Found::Held(_) => {}
        }
        Ok(state::step(SystemTime::now(), found, self.timing, self.is_published(found)))
    }

    /// Whether what clients find has the next authority in it.
    fn is_published(&self, found: &Found) -> bool {
        let Found::Held(State { next: Some(next), .. }) = found else { return false };
        let Some(published) = &self.published else { return true };
        published.everywhere(&next.ca.cert)
    }

    /// Returns false when another was faster: there is one of that name by now, a later one, or none any more.
    async fn write(&self, state: &State, before: Option<&Secret>) -> anyhow::Result<bool> {
        let secret = secret::holding(state, &self.name, before);
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

    fn serve(&mut self, state: &State, heard: Instant) -> anyhow::Result<()> {
        let now = SystemTime::now();
        let bundle = state.bundle();
        self.pem.send_if_modified(|pem| {
            let changed = *pem != bundle;
            *pem = bundle;
            changed
        });
        if let Some(served) = &mut self.served {
            served.heard = heard;
            if served.authority == state.signing.cert && now < served.renew_at {
                return Ok(());
            }
        }
        let (certificates, renew_at) = self.certify(&state.signing, now)?;
        let authority = state.signing.cert.clone();
        self.served = Some(Served { certificates, authority, renew_at, heard });
        tracing::info!("new connections get a new certificate");
        Ok(())
    }

    fn certify(&self, ca: &Ca, now: SystemTime) -> anyhow::Result<(Certificates, SystemTime)> {
        let validity = CERTIFICATE.min(self.timing.validity / 4);
        let pair = issue::certificate(ca, &self.names, now, validity)?;
        let certificates = match &self.served {
            Some(served) => {
                served.certificates.replace(pair);
                served.certificates.clone()
            }
            None => Certificates::new(pair),
        };
        Ok((certificates, now + validity * 2 / 3))
    }
}
