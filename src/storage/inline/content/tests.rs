use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use proptest::prelude::*;
use tempfile::TempDir;

use super::super::super::fail_point::in_tests::fail_after;
use super::super::super::testing::have_root;
use super::*;

type Files<'a> = &'a [(&'a str, &'a str)];

fn content(files: Files<'_>) -> Content {
    let owned = |(name, text): &(&str, &str)| ((*name).to_owned(), text.as_bytes().to_vec());
    Content::new(files.iter().map(owned).collect())
}

fn volume() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// The names in the volume, sorted.
fn names(root: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(root)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn visible(root: &Path) -> Vec<String> {
    names(root).into_iter().filter(|name| !name.starts_with("..")).collect()
}

/// The content of the visible files, by name.
fn read(root: &Path) -> BTreeMap<String, Vec<u8>> {
    visible(root)
        .into_iter()
        .filter_map(|n| Some((n.clone(), fs::read(root.join(&n)).ok()?)))
        .collect()
}

#[track_caller]
fn assert_holds(root: &Path, expected: &Content) {
    assert_eq!(read(root), expected.files);
    assert_eq!(visible(root).len(), expected.files.len(), "every name has a file");
}

#[test]
fn a_volume_contains_exactly_the_requested_files() {
    let volume = volume();
    let root = volume.path();
    fs::create_dir(root.join("lost+found")).unwrap();
    for files in [&[("a", "1"), ("b", "2")][..], &[("b", "3"), ("c", "")], &[], &[("a", "4")]] {
        refresh(root, &content(files)).unwrap();
        assert_holds(root, &content(files));
    }
    let file = fs::metadata(root.join("a")).unwrap();
    assert_eq!(file.permissions().mode() & 0o7777, 0o644);
    let directory = fs::metadata(root.join("..data")).unwrap();
    assert_eq!(directory.permissions().mode() & 0o7777, 0o755);
}

#[test]
fn unchanged_content_is_not_rewritten() {
    let volume = volume();
    let root = volume.path();
    let expected = content(&[("a", "1"), ("b", "2")]);
    refresh(root, &expected).unwrap();
    let inodes = || ["..data", "a", "b"].map(|name| fs::metadata(root.join(name)).unwrap().ino());
    let before = (inodes(), fs::read_link(root.join("..data")).unwrap());
    refresh(root, &expected).unwrap();
    assert_eq!((inodes(), fs::read_link(root.join("..data")).unwrap()), before);
}

#[test]
fn the_previous_generation_remains_until_the_next_call() {
    let volume = volume();
    let root = volume.path();
    refresh(root, &content(&[("a", "1")])).unwrap();
    let opened = fs::canonicalize(root.join("..data")).unwrap();
    refresh(root, &content(&[("a", "2")])).unwrap();
    assert_eq!(fs::read(opened.join("a")).unwrap(), b"1");
    refresh(root, &content(&[("a", "2")])).unwrap();
    assert!(!opened.exists());
    assert_eq!(names(root).len(), 3, "{:?}", names(root));
}

#[test]
fn a_new_file_has_the_group_of_its_volume() {
    // To give a directory away.
    if !have_root() {
        return;
    }
    let volume = volume();
    let root = volume.path();
    std::os::unix::fs::chown(root, None, Some(4321)).unwrap();
    fs::set_permissions(root, fs::Permissions::from_mode(0o2775)).unwrap();
    refresh(root, &content(&[("a", "1")])).unwrap();
    let directory = fs::metadata(root.join("..data")).unwrap();
    assert_eq!((directory.gid(), directory.mode() & 0o7777), (4321, 0o2755));
    assert_eq!(fs::metadata(root.join("a")).unwrap().gid(), 4321);
}

/// Everything that a pod with write access may leave in the volume. None of it makes the driver
/// write outside the volume.
#[test]
fn no_entry_of_the_volume_leads_outside_it() {
    let outside = tempfile::tempdir().unwrap();
    let precious = outside.path().join("precious");
    fs::write(&precious, "kept").unwrap();
    let expected = content(&[("a", "1"), ("b", "2")]);
    let hostile: &[&dyn Fn(&Path)] = &[
        &|root| symlink(outside.path(), root.join("..data")).unwrap(),
        &|root| symlink("..", root.join("..data")).unwrap(),
        &|root| fs::create_dir_all(root.join("..data/a")).unwrap(),
        &|root| fs::write(root.join("..data"), "x").unwrap(),
        &|root| symlink(outside.path(), root.join("..data_tmp")).unwrap(),
        &|root| fs::create_dir_all(root.join("..data_tmp/deep/deeper")).unwrap(),
        &|root| symlink(&precious, root.join("a")).unwrap(),
        &|root| fs::create_dir_all(root.join("a/x/y")).unwrap(),
        &|root| symlink("..data/b", root.join("a")).unwrap(),
        &|root| fs::write(root.join("a"), "x").unwrap(),
        &|root| symlink(outside.path(), root.join("z")).unwrap(),
        &|root| symlink(outside.path(), root.join("..0123456789abcdef")).unwrap(),
        &|root| {
            symlink("..0123456789abcdef", root.join("..data")).unwrap();
            symlink(outside.path(), root.join("..0123456789abcdef")).unwrap();
        },
        &|root| {
            let shown = root.join("..0123456789abcdef");
            fs::create_dir(&shown).unwrap();
            symlink("..0123456789abcdef", root.join("..data")).unwrap();
            fs::write(shown.join("a"), "1").unwrap();
            symlink(&precious, shown.join("b")).unwrap();
        },
        &|root| nix::unistd::mkfifo(&root.join("a"), nix::sys::stat::Mode::S_IRWXU).unwrap(),
        &|root| {
            let shown = root.join("..0123456789abcdef");
            fs::create_dir(&shown).unwrap();
            symlink("..0123456789abcdef", root.join("..data")).unwrap();
            fs::write(shown.join("a"), "1").unwrap();
            nix::unistd::mkfifo(&shown.join("b"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        },
    ];
    for (number, leave) in hostile.iter().enumerate() {
        let volume = volume();
        leave(volume.path());
        refresh(volume.path(), &expected).unwrap_or_else(|error| panic!("{number}: {error}"));
        assert_holds(volume.path(), &expected);
        assert_eq!(fs::read(&precious).unwrap(), b"kept", "{number}");
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1, "{number}");
        // A second call has the same result.
        refresh(volume.path(), &expected).unwrap();
        assert_eq!(names(volume.path()).len(), 4, "{number}: {:?}", names(volume.path()));
    }
}

#[test]
fn a_tree_deeper_than_the_descriptor_limit_is_removed() {
    let volume = volume();
    let top = volume.path().join("deep");
    fs::create_dir(&top).unwrap();
    let mut at: std::os::fd::OwnedFd = File::open(&top).unwrap().into();
    for _ in 0..3000 {
        let flags = nix::fcntl::OFlag::O_DIRECTORY;
        nix::sys::stat::mkdirat(&at, "d", nix::sys::stat::Mode::S_IRWXU).unwrap();
        at = nix::fcntl::openat(&at, "d", flags, nix::sys::stat::Mode::empty()).unwrap();
        nix::sys::stat::mkdirat(&at, "other", nix::sys::stat::Mode::S_IRWXU).unwrap();
    }
    refresh(volume.path(), &content(&[("a", "1")])).unwrap();
    assert_eq!(visible(volume.path()), ["a"]);
    assert_eq!(names(volume.path()).len(), 3);
}

#[test]
fn initial_files_are_plain_and_writable_by_all() {
    let volume = volume();
    let outside = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        seed(volume.path(), &content(&[("a", "1"), (".b", "")])).unwrap();
        assert_eq!(names(volume.path()), [".b", "a"]);
        let file = fs::symlink_metadata(volume.path().join("a")).unwrap();
        assert!(file.is_file() && file.permissions().mode() & 0o7777 == 0o666);
    }
    symlink(outside.path().join("made"), volume.path().join("c")).unwrap();
    seed(volume.path(), &content(&[("c", "1")])).unwrap_err();
    assert!(!outside.path().join("made").exists());
}

#[test]
fn file_contents_are_not_printed() {
    let shown = format!("{:?}", content(&[("password", "hunter2")]));
    assert!(shown.contains("password") && !shown.contains("hunter2"), "{shown}");
}

#[test]
fn a_full_volume_is_reported_as_a_size_error() {
    let error = || io_error("writing a file", io::Error::from_raw_os_error(libc::ENOSPC));
    let Error::Exhausted(message) = explain(error(), String::new) else { panic!("{:?}", error()) };
    assert!(message.starts_with("volume_context: size: "), "{message}");
}

fn any_content() -> impl Strategy<Value = Content> {
    let files = prop::collection::btree_map("[a-d]", prop::collection::vec(0..3u8, 0..3), 0..4);
    files.prop_map(Content::new)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Interrupts each refresh after any number of steps. A reader finds the old content or the new
    /// one.
    #[test]
    fn an_interrupted_refresh_leaves_old_or_new_content(
        contents in prop::collection::vec((any_content(), prop::option::of(0..24usize)), 1..8)
    ) {
        let volume = volume();
        let root = volume.path();
        let mut before = Content::default();
        for (after, death) in contents {
            fail_after(death);
            let done = refresh(root, &after);
            fail_after(None);
            let found = read(root);
            let is_of = |content: &Content| found.iter().all(|(name, bytes)| {
                content.files.get(name).is_none_or(|expected| expected == bytes)
            });
            let mut in_both = before.files.keys().filter(|name| after.files.contains_key(*name));
            prop_assert!(in_both.all(|name| found.contains_key(name)), "{found:?}");
            prop_assert!(is_of(&before) || is_of(&after), "{found:?}");
            match done {
                Ok(()) => prop_assert_eq!(&found, &after.files),
                Err(_) => refresh(root, &after).unwrap(),
            }
            prop_assert_eq!(&read(root), &after.files);
            prop_assert_eq!(visible(root).len(), after.files.len());
            before = after;
        }
        refresh(root, &before).unwrap();
        prop_assert_eq!(names(root).len(), before.files.len() + 2);
    }
}
