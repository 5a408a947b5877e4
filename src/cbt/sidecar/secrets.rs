//! Reads the secrets for a driver's snapshot calls: the Secret that a class names (parameters
//! `csi.storage.k8s.io/snapshotter-secret-name` and `-namespace`). Only the driver receives its
//! content.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, ResourceExt};

use super::refusal::{Reason, Refusal};
use kubernetes::bound_snapshot::Snapshot;
use kubernetes::cache::{Cache, Key, in_time};
use kubernetes::cached::{DELETION_NAME_KEY, DELETION_NAMESPACE_KEY};
use kubernetes::name;
use kubernetes::secret::Secrets;
use kubernetes::snapshot::{DEFAULT_CLASS, VolumeSnapshotClass};

const NAME_KEY: &str = "csi.storage.k8s.io/snapshotter-secret-name";
const NAMESPACE_KEY: &str = "csi.storage.k8s.io/snapshotter-secret-namespace";

/// Namespace and name of a Secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretRef {
    pub namespace: String,
    pub name: String,
}

/// Finds the secrets for a snapshot. Clones share the watch.
#[derive(Clone)]
pub struct SecretFinder {
    pub client: Client,
    pub classes: Cache<VolumeSnapshotClass>,
}

impl SecretFinder {
    /// The secrets for calls about `snapshot`. Empty if its class names none, or if it has no
    /// class.
    pub async fn secrets(&self, snapshot: &Snapshot) -> Result<Secrets, Refusal> {
        let reference = match self.class(snapshot).await {
            Ok(Some(class)) => of_class(&class, snapshot)?,
            // The released sidecar's ClusterRole does not allow it to read classes.
            Err(refusal) if refusal.reason == Reason::SidecarNotAllowed => of_annotations(snapshot),
            Ok(None) => of_annotations(snapshot),
            Err(refusal) => return Err(refusal),
        };
        match reference {
            Some(at) => self.read(&at).await,
            None => Ok(Secrets::default()),
        }
    }

    async fn class(
        &self,
        snapshot: &Snapshot,
    ) -> Result<Option<Arc<VolumeSnapshotClass>>, Refusal> {
        let failed = |error| Refusal::api("read VolumeSnapshotClasses", &error);
        let own = snapshot.content.spec.volume_snapshot_class_name.as_deref();
        let requested = snapshot.object.spec.volume_snapshot_class_name.as_deref();
        if let Some(name) = own.or(requested).filter(|name| !name.is_empty()) {
            let class = self.classes.get(&Key::cluster(name)).await.map_err(failed)?;
            if let Some(class) = &class {
                check_driver(class, snapshot)?;
            }
            return Ok(class);
        }
        let of_driver = self.classes.with(&snapshot.content.spec.driver).await.map_err(failed)?;
        let is_default = |class: &VolumeSnapshotClass| {
            class.annotations().get(DEFAULT_CLASS).is_some_and(|it| it == "true")
        };
        let mut defaults = of_driver.into_iter().filter(|class| is_default(class));
        match (defaults.next(), defaults.next()) {
            (Some(one), None) => Ok(Some(one)),
            (None, _) => Ok(None),
            (Some(one), Some(other)) => Err(Refusal::new(
                Reason::SecretMissing,
                format!(
                    "VolumeSnapshot {} names no class, and the driver has several default classes, {} and {}: \
                     remove the annotation {DEFAULT_CLASS} from one of them",
                    snapshot.shown(),
                    one.name_any(),
                    other.name_any()
                ),
            )),
        }
    }

    async fn read(&self, at: &SecretRef) -> Result<Secrets, Refusal> {
        let SecretRef { namespace, name } = at;
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let doing =
            format!("read the Secret {namespace}/{name}, which the VolumeSnapshotClass names");
        let secret =
            in_time(api.get_opt(name)).await.map_err(|error| Refusal::api(&doing, &error))?;
        let Some(secret) = secret else {
            let message = format!(
                "the Secret {namespace}/{name}, which the VolumeSnapshotClass names, does not exist; create it"
            );
            return Err(Refusal::new(Reason::SecretMissing, message));
        };
        Secrets::of(secret).ok_or_else(|| {
            let message =
                format!("the Secret {namespace}/{name} has a value that is not UTF-8 text");
            Refusal::new(Reason::SecretMissing, message)
        })
    }
}

/// Users choose the class of a VolumeSnapshot. That of another driver names the other driver's
/// Secret, which this driver must not receive.
fn check_driver(class: &VolumeSnapshotClass, snapshot: &Snapshot) -> Result<(), Refusal> {
    let driver = &snapshot.content.spec.driver;
    if class.driver == *driver {
        return Ok(());
    }
    let message = format!(
        "VolumeSnapshot {} names the VolumeSnapshotClass {}, which belongs to the driver {}, not to {driver}; name a \
         class of {driver}",
        snapshot.shown(),
        class.name_any(),
        class.driver
    );
    Err(Refusal::new(Reason::OtherDriver, message))
}

/// The Secret that a class's parameters name.
fn of_class(
    class: &VolumeSnapshotClass,
    snapshot: &Snapshot,
) -> Result<Option<SecretRef>, Refusal> {
    let parameter =
        |key| class.parameters.get(key).map(String::as_str).filter(|text| !text.is_empty());
    let wrong = |problem: &str| {
        let message = format!("VolumeSnapshotClass {}: {problem}", class.name_any());
        Refusal::new(Reason::SecretMissing, message)
    };
    match (parameter(NAME_KEY), parameter(NAMESPACE_KEY)) {
        (None, None) => Ok(None),
        (Some(name), Some(namespace)) => {
            let content = snapshot.content.name_any();
            let own = snapshot.object.namespace().unwrap_or_default();
            let mut words =
                vec![("volumesnapshotcontent.name", content), ("volumesnapshot.namespace", own)];
            let namespace = fill(namespace, &words);
            words.push(("volumesnapshot.name", snapshot.object.name_any()));
            let name = fill(name, &words);
            let valid = |text: &Option<String>| text.as_deref().is_some_and(name::is_object);
            if !valid(&name) {
                return Err(wrong(&format!("{NAME_KEY} does not yield a valid Secret name")));
            }
            if !valid(&namespace) {
                return Err(wrong(&format!(
                    "{NAMESPACE_KEY} does not yield a valid namespace name"
                )));
            }
            Ok(name.zip(namespace).map(|(name, namespace)| SecretRef { namespace, name }))
        }
        _ => Err(wrong(&format!("set both {NAME_KEY} and {NAMESPACE_KEY}, or neither"))),
    }
}

/// Replaces each `${word}` in `template`; `None` if a word is unknown.
fn fill(template: &str, words: &[(&str, String)]) -> Option<String> {
    let mut filled = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("${") {
        let (word, after) = after.split_once('}')?;
        let (_, value) = words.iter().find(|(known, _)| *known == word)?;
        filled.push_str(before);
        filled.push_str(value);
        rest = after;
    }
    filled.push_str(rest);
    Some(filled)
}

/// The Secret that the content's annotations name.
fn of_annotations(snapshot: &Snapshot) -> Option<SecretRef> {
    let note = |key| snapshot.content.annotations().get(key).filter(|text| name::is_object(text));
    let (name, namespace) = (note(DELETION_NAME_KEY)?, note(DELETION_NAMESPACE_KEY)?);
    Some(SecretRef { namespace: namespace.clone(), name: name.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};

    fn snapshot() -> Snapshot {
        let mut object = VolumeSnapshot::new("db-1", Default::default());
        object.metadata.namespace = Some("shop".into());
        let content = VolumeSnapshotContent::new("content-7", Default::default());
        Snapshot { object: object.into(), content: content.into(), handle: "h".into() }
    }

    fn secret_of(parameters: &[(&str, &str)]) -> Result<Option<SecretRef>, Refusal> {
        let mut class = VolumeSnapshotClass::new("fast", "driver");
        class.parameters =
            parameters.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        of_class(&class, &snapshot())
    }

    #[test]
    fn a_class_names_its_secret_by_templates() {
        assert_eq!(secret_of(&[("other", "x")]), Ok(None));
        let found = secret_of(&[
            (NAME_KEY, "${volumesnapshot.name}-of-${volumesnapshotcontent.name}"),
            (NAMESPACE_KEY, "${volumesnapshot.namespace}"),
        ]);
        let expected = SecretRef { namespace: "shop".into(), name: "db-1-of-content-7".into() };
        assert_eq!(found, Ok(Some(expected)));
    }

    #[test]
    fn incomplete_or_invalid_secret_parameters_are_refused() {
        for parameters in [
            &[(NAME_KEY, "a")][..],
            &[(NAMESPACE_KEY, "a")],
            &[(NAME_KEY, "${pvc.name}"), (NAMESPACE_KEY, "a")],
            &[(NAME_KEY, "a"), (NAMESPACE_KEY, "${volumesnapshot.name}")],
            &[(NAME_KEY, "a/b"), (NAMESPACE_KEY, "a")],
            &[(NAME_KEY, "${volumesnapshot.name"), (NAMESPACE_KEY, "a")],
        ] {
            assert_eq!(
                secret_of(parameters).unwrap_err().reason,
                Reason::SecretMissing,
                "{parameters:?}"
            );
        }
    }
}
