use std::fs;

use super::*;
use crate::crust::Directory;

fn left(volume: &str) -> Left {
    let pod = PodRef { namespace: "n".into(), name: "p".into(), uid: "u".into() };
    let group = Some(Group { id: "7".into(), policy: None });
    Left::new(volume, "/staging", group, pod)
}

/// A memory in a directory, with targets beside it.
struct Scene(tempfile::TempDir);

impl Scene {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn open(&self) -> Memory {
        Memory::open(Disk::open(self.directory()).unwrap())
    }

    fn directory(&self) -> Directory {
        Directory::new(self.0.path().join("state/memory"))
    }

    /// A target as kubelet makes them.
    fn target(&self, name: &str) -> String {
        let target = format!("pods/u/volumes/kubernetes.io~csi/{name}/mount");
        let target = self.0.path().join(target);
        fs::create_dir_all(&target).unwrap();
        target.to_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn what_was_left_is_known_after_a_restart_until_it_is_taken_back() {
    let scene = Scene::new();
    let target = scene.target("a");
    let memory = scene.open();
    drop(memory.publishing(&target, &left("v")).await.unwrap());
    drop(memory.publishing(&target, &left("v")).await.unwrap());
    drop(memory);
    let memory = scene.open();
    assert_eq!(memory.at("v", &target), Some(left("v")));
    assert_eq!(memory.at("v", &format!("{target}/")), Some(left("v")));
    assert_eq!((memory.at("w", &target), memory.of("w", &target)), (None, None));
    memory.forget(&format!("{target}/")).await.unwrap();
    memory.forget(&target).await.unwrap();
    assert_eq!((memory.of("v", &target), memory.len()), (None, 0));
    drop(memory);
    assert_eq!(scene.open().len(), 0);
}

/// Kubelet has given up on the publish, whose pod has ended, and the driver is still at it.
#[tokio::test]
async fn a_volume_that_is_taken_back_while_it_is_published_stays_known() {
    let scene = Scene::new();
    let target = scene.target("a");
    let memory = scene.open();
    let publishing = memory.publishing(&target, &left("v")).await.unwrap();
    memory.forget(&target).await.unwrap();
    assert_eq!(memory.at("v", &target), Some(left("v")));
    drop((publishing, memory));
    let memory = scene.open();
    assert_eq!(memory.at("v", &target), Some(left("v")), "also on disk");
    memory.forget(&target).await.unwrap();
    assert_eq!(memory.len(), 0);
}

#[tokio::test]
async fn a_volume_is_found_by_its_target_and_where_it_is_staged_and_nowhere_else() {
    let scene = Scene::new();
    let memory = scene.open();
    drop(memory.publishing(&scene.target("a"), &left("v")).await.unwrap());
    assert_eq!(memory.of("v", "/staging"), Some(left("v")));
    // The same volume in another pod, which has it from the host.
    assert_eq!(memory.of("v", &scene.target("b")), None);
    assert_eq!((memory.of("w", "/staging"), memory.of("v", "")), (None, None));
}

#[tokio::test]
async fn the_file_has_the_proposals_key() {
    let scene = Scene::new();
    let target = scene.target("a");
    drop(scene.open().publishing(&target, &left("v")).await.unwrap());
    let entry = scene.directory().entry(&Target::new("t", &target).unwrap());
    let file = entry.read(FILE).unwrap().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&file).unwrap();
    let expected = serde_json::json!({
        "deferFSMount": "true", "volumeHandle": "v", "stagingTargetPath": "/staging",
        "group": { "id": "7", "policy": null }, "namespace": "n", "pod": "p", "podUid": "u",
    });
    assert_eq!(json, expected);
}

#[tokio::test]
async fn what_nobody_takes_back_goes_when_its_target_was_gone_twice() {
    let scene = Scene::new();
    let memory = scene.open();
    let (there, gone) = (scene.target("there"), scene.target("gone"));
    for (target, volume) in [(&there, "v"), (&gone, "w")] {
        drop(memory.publishing(target, &left(volume)).await.unwrap());
    }
    fs::remove_dir_all(&gone).unwrap();
    memory.collect().unwrap();
    assert_eq!(memory.len(), 2);
    memory.collect().unwrap();
    assert_eq!((memory.len(), memory.at("v", &there)), (1, Some(left("v"))));
    drop(memory);
    assert_eq!(scene.open().len(), 1);
}

#[tokio::test]
async fn a_publish_under_way_is_not_collected() {
    let scene = Scene::new();
    let memory = scene.open();
    let target = scene.target("a");
    let publishing = memory.publishing(&target, &left("v")).await.unwrap();
    fs::remove_dir_all(&target).unwrap();
    (0..3).for_each(|_| memory.collect().unwrap());
    assert_eq!(memory.len(), 1);
    // Nor in the first round after it: a driver may still be at it.
    drop(publishing);
    memory.collect().unwrap();
    assert_eq!(memory.len(), 1);
    memory.collect().unwrap();
    assert_eq!(memory.len(), 0);
}

#[tokio::test]
async fn where_kubelets_directory_is_not_to_be_seen_nothing_is_forgotten() {
    let scene = Scene::new();
    let memory = scene.open();
    drop(memory.publishing(&scene.target("a"), &left("v")).await.unwrap());
    let elsewhere = scene.0.path().join("x/y/z");
    drop(memory.publishing(elsewhere.to_str().unwrap(), &left("w")).await.unwrap());
    fs::rename(scene.0.path().join("pods"), scene.0.path().join("away")).unwrap();
    (0..3).for_each(|_| memory.collect().unwrap());
    assert_eq!(memory.len(), 2);
    fs::create_dir(scene.0.path().join("pods")).unwrap();
    fs::create_dir(scene.0.path().join("x")).unwrap();
    (0..2).for_each(|_| memory.collect().unwrap());
    assert_eq!(memory.len(), 0);
}

#[test]
fn half_of_an_entry_goes_and_one_that_is_damaged_is_left_alone() {
    let scene = Scene::new();
    let directory = scene.directory();
    let made = |path: &str, file: Option<&[u8]>| {
        let target = Target::new("t", path).unwrap();
        let entry = directory.entry(&target);
        entry.make(&target).unwrap();
        file.iter().for_each(|file| entry.write(FILE, file).unwrap());
        entry
    };
    let half = made("/half", None);
    let damaged = made("/damaged", Some(b"{"));
    let mut no = serde_json::to_value(left("v")).unwrap();
    no["deferFSMount"] = "false".into();
    let not_deferred = made("/not", Some(no.to_string().as_bytes()));
    let stray = made("/stray", Some(&serde_json::to_vec(&left("v")).unwrap()));
    let moved = directory.entry(&Target::new("t", "/moved").unwrap());
    fs::rename(stray.path(), moved.path()).unwrap();
    let memory = scene.open();
    assert_eq!(memory.len(), 0);
    memory.collect().unwrap();
    assert!(!half.path().exists());
    assert!([&damaged, &not_deferred, &moved].iter().all(|entry| entry.path().exists()));
}

#[tokio::test]
async fn what_cannot_be_written_down_is_refused_and_works_when_it_can() {
    let scene = Scene::new();
    let memory = scene.open();
    let target = scene.target("a");
    let entry = scene.directory().entry(&Target::new("t", &target).unwrap());
    fs::write(entry.path(), "in the way").unwrap();
    let refused = memory.publishing(&target, &left("v")).await.unwrap_err();
    assert_eq!(
        (refused.reason(super::super::call::Call::Publish), memory.len()),
        ("not_remembered", 0)
    );
    let long = left(&"v".repeat(MAX_FILE));
    fs::remove_file(entry.path()).unwrap();
    memory.publishing(&target, &long).await.unwrap_err();
    drop(memory.publishing(&target, &left("v")).await.unwrap());
    assert_eq!(memory.len(), 1);
}

#[tokio::test]
async fn only_one_process_remembers_in_a_directory_and_nobody_where_others_may_write() {
    use std::os::unix::fs::PermissionsExt;
    let scene = Scene::new();
    let memory = scene.open();
    assert!(Disk::open(scene.directory()).is_err());
    drop(memory);
    let root = scene.directory().root().to_owned();
    fs::set_permissions(root, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(Disk::open(scene.directory()).is_err());
}

#[tokio::test]
async fn a_directory_that_cannot_be_used_at_the_start_is_used_when_it_can() {
    let scene = Scene::new();
    let target = scene.target("a");
    drop(scene.open().publishing(&target, &left("v")).await.unwrap());
    let (state, away) = (scene.0.path().join("state"), scene.0.path().join("away"));
    fs::rename(&state, &away).unwrap();
    fs::write(&state, "no directory").unwrap();
    let memory = scene.open();
    memory.publishing(&target, &left("v")).await.unwrap_err();
    fs::remove_file(&state).unwrap();
    fs::rename(&away, &state).unwrap();
    memory.collect().unwrap();
    assert_eq!(memory.at("v", &target), Some(left("v")));
}

#[tokio::test]
async fn a_condition_is_told_for_as_long_as_the_volume_is_remembered() {
    let scene = Scene::new();
    let memory = scene.open();
    let target = scene.target("a");
    drop(memory.publishing(&target, &left("v")).await.unwrap());
    memory.measured("/other", true);
    assert!(memory.conditions().is_empty());
    memory.measured(&target, true);
    assert_eq!(memory.conditions(), [(PathBuf::from(&target), left("v"), true)]);
    memory.forget(&target).await.unwrap();
    assert!(memory.conditions().is_empty());
}
