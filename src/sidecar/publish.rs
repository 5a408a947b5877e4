//! `--manage-service`: the driver's SnapshotMetadataService, by which backup applications find the sidecar, is made
//! and kept as it should be. All replicas write the same, under one name of a field manager, so none has to
//! lead. The object stays when the sidecar ends: another replica may go on.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher::watch_object;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_stream::{Stream, StreamExt};

use crate::kubernetes::client::within;
use crate::kubernetes::metadata_service::{Address, DRIVER_LABEL, SnapshotMetadataService};
use crate::kubernetes::tls;
use crate::kubernetes::tls::authority::Bundles;
use crate::telemetry::shutdown::Shutdown;

/// Field of the spec that not every CRD has.
const OPTIONAL_FIELD: &str = "requireBaseSnapshotForDelta";
/// As whom the fields are written (server-side apply).
const MANAGER: &str = "csi-loopback-sidecar";
/// The object is looked at as often even where the watch says nothing.
const RESYNC: Duration = Duration::from_secs(30);
/// Time after an attempt that failed: the first, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Time after one that wrote, so that somebody who keeps undoing it makes no load.
const SETTLE: Duration = Duration::from_millis(500);
/// How long one call to the API server may take.
const CALL: Duration = Duration::from_secs(10);
/// Time between two looks at --service-ca.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The flags. The command that flattens them has those of [`tls::authority`], too.
#[derive(Debug, Clone, clap::Args)]
// Its group would have the name `Args`, as that of the role that flattens it.
#[group(skip)]
pub struct Args {
    /// Make the driver's SnapshotMetadataService and keep it so: address, audience, caCert. Without --audience
    /// the audience is then the driver's name.
    #[arg(long, requires = "service_address")]
    pub manage_service: bool,

    /// Where clients reach this sidecar, as host:port: the name of a Service. The certificate of --self-signed
    /// is for this host.
    #[arg(long, value_name = "ADDRESS")]
    pub service_address: Option<Address>,

    /// File with the certificates (PEM) of the authorities that clients are to trust; by default ca.crt beside
    /// --tls-cert. It may change at any time.
    #[arg(long, requires = "manage_service", conflicts_with = "self_signed", value_name = "FILE")]
    pub service_ca: Option<PathBuf>,
}

/// What the object says.
#[derive(Debug, Clone)]
pub struct Service {
    /// Name of the CSI driver, and of the object.
    pub driver: String,
    pub address: Address,
    pub audience: String,
}

/// The authorities of --service-ca, or of ca.crt beside --tls-cert, read again when they change. For
/// certificates from files; an authority of its own has bundles of its own.
///
/// # Errors
/// The file cannot be read or holds something else; which.
pub fn bundles_of_files(
    args: &Args,
    tls: &tls::Args,
    shutdown: Shutdown,
) -> anyhow::Result<Bundles> {
    let beside = tls.tls_cert.as_deref().map(|cert| cert.with_file_name("ca.crt"));
    let file = args.service_ca.clone().or(beside).context("--manage-service needs --service-ca")?;
    let (sender, pem) = watch::channel(authorities(&file)?);
    tokio::spawn(async move {
        tokio::select! {
            () = follow(file, sender) => {}
            () = shutdown.draining() => {}
        }
    });
    Ok(Bundles { pem, published: watch::channel(String::new()).0 })
}

/// What clients may see of a file: certificates that can be trusted, and never a key.
fn authorities(file: &Path) -> anyhow::Result<String> {
    let content = tls::read_file("--service-ca", file)?;
    let name = || format!("--service-ca {}", file.display());
    let text = String::from_utf8(content).map_err(|_| anyhow::anyhow!("{}: not text", name()))?;
    anyhow::ensure!(!text.contains("PRIVATE KEY"), "{}: holds a private key", name());
    tls::client_config(text.as_bytes()).with_context(name)?;
    Ok(text)
}

async fn follow(file: PathBuf, pem: watch::Sender<String>) {
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut complaint = String::new();
    loop {
        looks.tick().await;
        let path = file.clone();
        // A panic is in the log already.
        let Ok(found) = tokio::task::spawn_blocking(move || authorities(&path)).await else {
            continue;
        };
        let said = match found {
            Ok(text) => {
                pem.send_if_modified(|pem| std::mem::replace(pem, text.clone()) != text);
                String::new()
            }
            Err(error) => format!("{error:#}"),
        };
        if !said.is_empty() && said != complaint {
            tracing::warn!(
                error = said,
                "the changed authorities are not taken; those before stay"
            );
        }
        complaint = said;
    }
}

/// Makes the object and keeps it until draining begins. Whatever goes wrong is tried again.
pub async fn keep(client: Client, service: Service, bundles: Bundles, shutdown: Shutdown) {
    let services: Api<SnapshotMetadataService> = Api::all(client);
    let seen = watch_object(services.clone(), &service.driver);
    let publisher =
        Publisher { services, service, bundles, complaint: None, crd_lacks_field: false };
    tokio::select! {
        () = publisher.keep(seen) => {}
        () = shutdown.draining() => {}
    }
}

/// What the watch says.
type Seen = kube::runtime::watcher::Result<Option<SnapshotMetadataService>>;

struct Publisher {
    services: Api<SnapshotMetadataService>,
    service: Service,
    bundles: Bundles,
    /// What was told last of what went wrong.
    complaint: Option<String>,
    /// Whether the CRD is one without [`OPTIONAL_FIELD`].
    crd_lacks_field: bool,
}

impl Publisher {
    async fn keep(mut self, seen: impl Stream<Item = Seen>) {
        tokio::pin!(seen);
        let mut pause = BACKOFF.0;
        loop {
            match self.publish().await {
                Ok(wrote) => {
                    pause = BACKOFF.0;
                    if self.complaint.take().is_some() {
                        tracing::info!(
                            "SnapshotMetadataService {} is in order",
                            self.service.driver
                        );
                    }
                    sleep(if wrote { SETTLE } else { Duration::ZERO }).await;
                    self.next_reason(seen.as_mut()).await;
                }
                Err(error) => {
                    self.complain(&error);
                    sleep(pause).await;
                    pause = (pause * 2).min(BACKOFF.1);
                }
            }
        }
    }

    /// Waits until the object or what it should be may have changed.
    async fn next_reason(&mut self, mut seen: impl Stream<Item = Seen> + Unpin) {
        let watched = async {
            match seen.next().await {
                Some(Ok(_)) => sleep(SETTLE).await,
                // Without a watch it is looked at now and then.
                Some(Err(_)) | None => sleep(RESYNC).await,
            }
        };
        tokio::select! {
            // Nobody has more to say: what is published is still kept.
            Ok(()) = self.bundles.pem.changed() => {}
            () = watched => {}
            () = sleep(RESYNC) => {}
        }
    }

    /// Says it once.
    fn complain(&mut self, error: &anyhow::Error) {
        let error = format!("{error:#}");
        if self.complaint.as_ref() != Some(&error) {
            let driver = &self.service.driver;
            tracing::warn!(error, "SnapshotMetadataService {driver} cannot be kept; trying again");
            self.complaint = Some(error);
        }
    }

    /// Returns whether it had to write.
    async fn publish(&mut self) -> anyhow::Result<bool> {
        let pem = self.bundles.pem.borrow_and_update().clone();
        let name = self.service.driver.clone();
        let found = within(CALL, self.services.get_opt(&name)).await;
        let found = found.map_err(|error| told(error, "reading"))?;
        if let Some(found) = &found {
            let published = String::from_utf8_lossy(&found.spec.ca_cert.0).into_owned();
            self.bundles.published.send_replace(published);
        }
        // Nothing that could be published now.
        if pem.is_empty()
            || found.is_some_and(|found| self.service.is_as_it_should_be(&found, &pem))
        {
            return Ok(false);
        }
        self.apply(&pem).await.map_err(|error| told(error, "writing"))?;
        tracing::info!(name, address = %self.service.address, "SnapshotMetadataService written");
        self.bundles.published.send_replace(pem);
        Ok(true)
    }

    /// Server-side apply refuses a field that the CRD lacks, as the released one does; other writes drop it.
    async fn apply(&mut self, pem: &str) -> kube::Result<()> {
        let params = PatchParams::apply(MANAGER).force();
        let (services, name) = (self.services.clone(), self.service.driver.clone());
        let write = async |wanted: Value| {
            within(CALL, services.patch(&name, &params, &Patch::Apply(wanted))).await
        };
        let mut wanted = self.service.wanted(pem);
        if !self.crd_lacks_field {
            match write(wanted.clone()).await {
                Err(error) if is_field_unknown(&error) => self.crd_lacks_field = true,
                written => return written.map(drop),
            }
        }
        if let Some(spec) = wanted["spec"].as_object_mut() {
            spec.remove(OPTIONAL_FIELD);
        }
        write(wanted).await.map(drop)
    }
}

fn is_field_unknown(error: &kube::Error) -> bool {
    let unknown = |text: &str| text.contains(OPTIONAL_FIELD) && text.contains("not declared");
    matches!(error, kube::Error::Api(status) if unknown(&status.message))
}

/// Says what to do where the API server knows no such objects.
fn told(error: kube::Error, doing: &'static str) -> anyhow::Error {
    let is_unknown = matches!(&error, kube::Error::Api(status) if status.code == 404);
    let error = anyhow::Error::from(error);
    match is_unknown {
        true => error.context(
            "install the CustomResourceDefinition snapshotmetadataservices.cbt.storage.k8s.io (v1beta1)",
        ),
        false => error.context(doing),
    }
}

impl Service {
    /// As server-side apply takes it.
    fn wanted(&self, pem: &str) -> Value {
        json!({
            "apiVersion": "cbt.storage.k8s.io/v1beta1",
            "kind": "SnapshotMetadataService",
            "metadata": { "name": self.driver, "labels": { DRIVER_LABEL: self.driver } },
            "spec": {
                "address": self.address.to_string(),
                "audience": self.audience,
                "caCert": k8s_openapi::ByteString(pem.as_bytes().to_vec()),
                OPTIONAL_FIELD: false,
            },
        })
    }

    fn is_as_it_should_be(&self, found: &SnapshotMetadataService, pem: &str) -> bool {
        let spec = &found.spec;
        let label = found.metadata.labels.as_ref().and_then(|labels| labels.get(DRIVER_LABEL));
        label == Some(&self.driver)
            && spec.address == self.address.to_string()
            && spec.audience == self.audience
            && spec.ca_cert.0 == pem.as_bytes()
            && spec.require_base_snapshot_for_delta != Some(true)
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command, FromArgMatches};
    use kube::api::ObjectMeta;
    use tempfile::TempDir;

    use super::*;
    use crate::kubernetes::metadata_service::SnapshotMetadataServiceSpec;
    use crate::kubernetes::tls::authority;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        let command = tls::Args::augment_args(Command::new("x"));
        let command = Args::augment_args(authority::Args::augment_args(command));
        command.clone().debug_assert();
        Args::from_arg_matches(&command.try_get_matches_from(line.split_whitespace())?)
    }

    #[test]
    fn flags_that_contradict_each_other_are_errors_of_the_command_line() {
        for good in [
            "x --manage-service --service-address a:1 --tls-cert c --tls-key k --service-ca f",
            "x --manage-service --service-address a:1 --self-signed --self-signed-validity 1h",
            "x --self-signed --service-address a:1",
            "x --namespace n",
        ] {
            parse(good).unwrap();
        }
        for (bad, named) in [
            ("x --manage-service", "--service-address"),
            ("x --self-signed", "--service-address"),
            ("x --self-signed --service-address a:1 --tls-cert c --tls-key k", "--tls-cert"),
            ("x --service-ca f", "--manage-service"),
            (
                "x --self-signed --manage-service --service-address a:1 --service-ca f",
                "--service-ca",
            ),
            ("x --self-signed-validity 1h", "--self-signed"),
            ("x --self-signed-secret s", "--self-signed"),
            ("x --self-signed --service-address a:1 --self-signed-validity 1s", "3650days"),
            ("x --self-signed --service-address a:1 --self-signed-validity 11years", "3650days"),
            ("x --self-signed --service-address a:1 --self-signed-secret A_b", "a-z"),
            ("x --service-address https://a:1", "host:port"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(named), "{bad}: {error}");
        }
    }

    #[test]
    fn a_field_that_the_crd_lacks_is_no_drift_and_any_other_difference_is() {
        let service =
            Service { driver: "d".into(), address: "a:1".parse().unwrap(), audience: "u".into() };
        let object: SnapshotMetadataService =
            serde_json::from_value(service.wanted("pem")).unwrap();
        let spec = object.spec.clone();
        let with = |spec: SnapshotMetadataServiceSpec| SnapshotMetadataService {
            spec,
            metadata: object.metadata.clone(),
        };
        let good = |object: &SnapshotMetadataService| service.is_as_it_should_be(object, "pem");
        assert!(good(&object));
        let pruned =
            SnapshotMetadataServiceSpec { require_base_snapshot_for_delta: None, ..spec.clone() };
        assert!(good(&with(pruned)));
        let required = SnapshotMetadataServiceSpec {
            require_base_snapshot_for_delta: Some(true),
            ..spec.clone()
        };
        let address = SnapshotMetadataServiceSpec { address: "b:1".into(), ..spec.clone() };
        let audience = SnapshotMetadataServiceSpec { audience: "v".into(), ..spec.clone() };
        for other in [required, address, audience] {
            assert!(!good(&with(other.clone())), "{other:?}");
        }
        assert!(!service.is_as_it_should_be(&object, "other"));
        assert!(!good(&SnapshotMetadataService { metadata: ObjectMeta::default(), spec }));
    }

    #[test]
    fn a_private_key_is_never_published() {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("ca.crt");
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(["x".to_owned()]).unwrap();
        let cert = params.self_signed(&key).unwrap().pem();
        std::fs::write(&file, &cert).unwrap();
        assert_eq!(authorities(&file).unwrap(), cert);
        for bad in [format!("{cert}{}", key.serialize_pem()), String::new(), "x".into()] {
            std::fs::write(&file, bad).unwrap();
            let error = format!("{:#}", authorities(&file).unwrap_err());
            assert!(error.contains("--service-ca"), "{error}");
        }
    }
}
