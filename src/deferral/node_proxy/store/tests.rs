use std::fs;

use super::*;
use crate::crust::Directory;

fn deferred(volume: &str) -> DeferredVolume {
    let pod = PodRef { namespace: "n".into(), name: "p".into(), uid: "u".into() };
    let group = Some(Group { id: "7".into(), policy: None });
    DeferredVolume::new(volume, "/staging", group, pod)
}

/// A store in a directory, with targets next to it.
struct Fixture(tempfile::TempDir);

impl Fixture {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn open(&self) -> StateStore {
        StateStore::open(StateDir::open(self.directory()).unwrap())
    }

    fn directory(&self) -> Directory {
        Directory::new(self.0.path().join("state/store"))
    }

    /// Creates a target as kubelet does.
    fn target(&self, name: &str) -> String {
        let target = format!("pods/u/volumes/kubernetes.io~csi/{name}/mount");
        let target = self.0.path().join(target);
        fs::create_dir_all(&target).unwrap();
        target.to_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn deferred_volumes_survive_a_restart_until_unpublish() {
    let fixture = Fixture::new();
    let target = fixture.target("a");
    let store = fixture.open();
    drop(store.begin_publish(&target, &deferred("v")).await.unwrap());
    drop(store.begin_publish(&target, &deferred("v")).await.unwrap());
    drop(store);
    let store = fixture.open();
    assert_eq!(store.at_target("v", &target), Some(deferred("v")));
    assert_eq!(store.at_target("v", &format!("{target}/")), Some(deferred("v")));
    assert_eq!((store.at_target("w", &target), store.at_path("w", &target)), (None, None));
    store.remove(&format!("{target}/")).await.unwrap();
    store.remove(&target).await.unwrap();
    assert_eq!((store.at_path("v", &target), store.len()), (None, 0));
    drop(store);
    assert_eq!(fixture.open().len(), 0);
}

/// The publish timed out and its pod has ended, but the driver is still publishing.
#[tokio::test]
async fn an_unpublish_during_a_publish_keeps_the_volume() {
    let fixture = Fixture::new();
    let target = fixture.target("a");
    let store = fixture.open();
    let guard = store.begin_publish(&target, &deferred("v")).await.unwrap();
    store.remove(&target).await.unwrap();
    assert_eq!(store.at_target("v", &target), Some(deferred("v")));
    drop((guard, store));
    let store = fixture.open();
    assert_eq!(store.at_target("v", &target), Some(deferred("v")), "also on disk");
    store.remove(&target).await.unwrap();
    assert_eq!(store.len(), 0);
}

#[tokio::test]
async fn a_volume_is_found_by_target_and_staging_path_only() {
    let fixture = Fixture::new();
    let store = fixture.open();
    drop(store.begin_publish(&fixture.target("a"), &deferred("v")).await.unwrap());
    assert_eq!(store.at_path("v", "/staging"), Some(deferred("v")));
    // The same volume in another pod, mounted by the host.
    assert_eq!(store.at_path("v", &fixture.target("b")), None);
    assert_eq!((store.at_path("w", "/staging"), store.at_path("v", "")), (None, None));
}

#[tokio::test]
async fn the_state_file_has_the_keys_of_the_proposal() {
    let fixture = Fixture::new();
    let target = fixture.target("a");
    drop(fixture.open().begin_publish(&target, &deferred("v")).await.unwrap());
    let entry = fixture.directory().entry(&Target::new("t", &target).unwrap());
    let file = entry.read(FILE).unwrap().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&file).unwrap();
    let expected = serde_json::json!({
        "deferFSMount": "true", "volumeHandle": "v", "stagingTargetPath": "/staging",
        "group": { "id": "7", "policy": null }, "namespace": "n", "pod": "p", "podUid": "u",
    });
    assert_eq!(json, expected);
}

#[tokio::test]
async fn a_volume_is_removed_after_two_rounds_without_its_target() {
    let fixture = Fixture::new();
    let store = fixture.open();
    let (there, gone) = (fixture.target("there"), fixture.target("gone"));
    for (target, volume) in [(&there, "v"), (&gone, "w")] {
        drop(store.begin_publish(target, &deferred(volume)).await.unwrap());
    }
    fs::remove_dir_all(&gone).unwrap();
    store.collect().unwrap();
    assert_eq!(store.len(), 2);
    store.collect().unwrap();
    assert_eq!((store.len(), store.at_target("v", &there)), (1, Some(deferred("v"))));
    drop(store);
    assert_eq!(fixture.open().len(), 1);
}

#[tokio::test]
async fn a_publish_in_progress_prevents_collection() {
    let fixture = Fixture::new();
    let store = fixture.open();
    let target = fixture.target("a");
    let guard = store.begin_publish(&target, &deferred("v")).await.unwrap();
    fs::remove_dir_all(&target).unwrap();
    (0..3).for_each(|_| store.collect().unwrap());
    assert_eq!(store.len(), 1);
    // Nor in the first round after it: the driver may still be publishing.
    drop(guard);
    store.collect().unwrap();
    assert_eq!(store.len(), 1);
    store.collect().unwrap();
    assert_eq!(store.len(), 0);
}

#[tokio::test]
async fn an_invisible_kubelet_directory_prevents_collection() {
    let fixture = Fixture::new();
    let store = fixture.open();
    drop(store.begin_publish(&fixture.target("a"), &deferred("v")).await.unwrap());
    let elsewhere = fixture.0.path().join("x/y/z");
    drop(store.begin_publish(elsewhere.to_str().unwrap(), &deferred("w")).await.unwrap());
    fs::rename(fixture.0.path().join("pods"), fixture.0.path().join("away")).unwrap();
    (0..3).for_each(|_| store.collect().unwrap());
    assert_eq!(store.len(), 2);
    fs::create_dir(fixture.0.path().join("pods")).unwrap();
    fs::create_dir(fixture.0.path().join("x")).unwrap();
    (0..2).for_each(|_| store.collect().unwrap());
    assert_eq!(store.len(), 0);
}

#[test]
fn incomplete_entries_are_removed_and_damaged_ones_kept() {
    let fixture = Fixture::new();
    let directory = fixture.directory();
    let made = |path: &str, file: Option<&[u8]>| {
        let target = Target::new("t", path).unwrap();
        let entry = directory.entry(&target);
        entry.make(&target).unwrap();
        file.iter().for_each(|file| entry.write(FILE, file).unwrap());
        entry
    };
    let half = made("/half", None);
    let damaged = made("/damaged", Some(b"{"));
    let mut no = serde_json::to_value(deferred("v")).unwrap();
    no["deferFSMount"] = "false".into();
    let not_deferred = made("/not", Some(no.to_string().as_bytes()));
    let stray = made("/stray", Some(&serde_json::to_vec(&deferred("v")).unwrap()));
    let moved = directory.entry(&Target::new("t", "/moved").unwrap());
    fs::rename(stray.path(), moved.path()).unwrap();
    let store = fixture.open();
    assert_eq!(store.len(), 0);
    store.collect().unwrap();
    assert!(!half.path().exists());
    assert!([&damaged, &not_deferred, &moved].iter().all(|entry| entry.path().exists()));
}

#[tokio::test]
async fn a_publish_fails_until_its_entry_can_be_written() {
    let fixture = Fixture::new();
    let store = fixture.open();
    let target = fixture.target("a");
    let entry = fixture.directory().entry(&Target::new("t", &target).unwrap());
    fs::write(entry.path(), "not a directory").unwrap();
    let refused = store.begin_publish(&target, &deferred("v")).await.unwrap_err();
    assert_eq!(
        (refused.reason(super::super::call::Call::Publish), store.len()),
        ("not_remembered", 0)
    );
    let long = deferred(&"v".repeat(MAX_FILE));
    fs::remove_file(entry.path()).unwrap();
    store.begin_publish(&target, &long).await.unwrap_err();
    drop(store.begin_publish(&target, &deferred("v")).await.unwrap());
    assert_eq!(store.len(), 1);
}

#[tokio::test]
async fn the_state_directory_must_be_private_and_unshared() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = Fixture::new();
    let store = fixture.open();
    assert!(StateDir::open(fixture.directory()).is_err());
    drop(store);
    let root = fixture.directory().root().to_owned();
    fs::set_permissions(root, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(StateDir::open(fixture.directory()).is_err());
}

#[tokio::test]
async fn an_unusable_state_directory_is_loaded_later() {
    let fixture = Fixture::new();
    let target = fixture.target("a");
    drop(fixture.open().begin_publish(&target, &deferred("v")).await.unwrap());
    let (state, away) = (fixture.0.path().join("state"), fixture.0.path().join("away"));
    fs::rename(&state, &away).unwrap();
    fs::write(&state, "not a directory").unwrap();
    let store = fixture.open();
    store.begin_publish(&target, &deferred("v")).await.unwrap_err();
    fs::remove_file(&state).unwrap();
    fs::rename(&away, &state).unwrap();
    store.collect().unwrap();
    assert_eq!(store.at_target("v", &target), Some(deferred("v")));
}

#[tokio::test]
async fn a_condition_is_reported_while_the_volume_is_stored() {
    let fixture = Fixture::new();
    let store = fixture.open();
    let target = fixture.target("a");
    drop(store.begin_publish(&target, &deferred("v")).await.unwrap());
    store.set_condition("/other", true);
    assert!(store.conditions().is_empty());
    store.set_condition(&target, true);
    assert_eq!(store.conditions(), [(PathBuf::from(&target), deferred("v"), true)]);
    store.remove(&target).await.unwrap();
    assert!(store.conditions().is_empty());
}
