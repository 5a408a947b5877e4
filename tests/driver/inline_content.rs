//! Inline volumes with content (KEP-596, "Read-only volumes") or in memory, through the driver's
//! socket.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use csi_loopback::proto::csi::v1 as csi;
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use support::driver::*;
use support::inline::{PodVolume, is_mounted, pod_volume};
use support::{BLOCK, files_below, path, run};
use tonic::Code;

/// Must appear in no log and no catalog, and nowhere after the end.
const SECRET: &str = "correct-horse-battery-staple-0451";

/// The files that a user of the volume sees.
fn files(volume: &PodVolume) -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(&volume.target).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !name.starts_with("..") {
            files.insert(name.clone(), fs::read_to_string(volume.file(&name)).unwrap());
        }
    }
    files
}

fn expected(files: &[(&str, &str)]) -> BTreeMap<String, String> {
    files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
}

/// Whether these bytes are in any block of a file, skipping holes. (Here they fill blocks or are at
/// the start of one.)
fn contains(file: &Path, bytes: &[u8]) -> bool {
    let file = File::open(file).unwrap();
    let mut buffer = vec![0; 1 << 20];
    let zeros = [0; BLOCK as usize];
    let mut at = 0;
    loop {
        at = match lseek(&file, at, Whence::SeekData) {
            Ok(at) => at,
            Err(Errno::ENXIO) => return false,
            Err(e) => panic!("{e}"),
        };
        let read = file.read_at(&mut buffer, at as u64).unwrap();
        let mut blocks = buffer[..read].chunks(BLOCK as usize).filter(|block| *block != zeros);
        if blocks.any(|block| block.windows(bytes.len()).any(|window| window == bytes)) {
            return true;
        }
        at += read as i64;
    }
}

#[test]
fn each_key_of_content_and_secret_is_a_file() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "identity");
        let content = [("content/app.conf", "a=b\n"), ("content/.hidden", "")];
        let secret = [("token", SECRET), ("binary", "\u{0}\u{1f600}\r\n")];
        driver.ok(volume.publishing_content(&content, &secret));
        let all = [("app.conf", "a=b\n"), (".hidden", ""), secret[0], secret[1]];
        assert_eq!(files(&volume), expected(&all));
        // Files in it cannot be written, executed or opened as devices.
        let mount = mounts_at(&volume.target).remove(0);
        for option in ["ro", "nosuid", "nodev", "noexec"] {
            assert!(mount.has(option), "{option}: {mount:?}");
        }
        let usage = driver.ok(stats(&volume.handle, path(&volume.target)));
        assert!(!usage.volume_condition.is_some_and(|condition| condition.abnormal));
        // It survives the driver, and can then be refreshed as before.
        driver.kill();
        driver.start_again();
        assert_eq!(files(&volume), expected(&all));
        driver.ok(volume.publishing_content(&content[..1], &[("token", "other")]));
        assert_eq!(files(&volume), expected(&[("app.conf", "a=b\n"), ("token", "other")]));
        // Emptied, but still a volume.
        driver.ok(volume.publishing_content(&[("readOnlyContent", "true")], &[]));
        assert_eq!(files(&volume), expected(&[]));
        driver.unpublish(&volume.handle, &volume.target);
        assert!(!is_mounted(&volume.target) && !volume.target.exists());
    });
}

#[test]
fn a_reader_never_sees_a_mix_of_old_and_new_content() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "swapped");
        let text = |generation: u32| format!("{generation} ").repeat(5000);
        let publish = |generation: u32| {
            let text = text(generation);
            driver.ok(volume.publishing_content(&[], &[("a", &text), ("b", &text)]));
        };
        publish(0);
        let (done, reads) = (AtomicBool::new(false), AtomicU32::new(0));
        // An old directory is kept for one more call, so a read must not span two.
        let publish_and_wait = |generation: u32| {
            publish(generation);
            let before = reads.load(Ordering::Relaxed);
            wait_for("a read", || reads.load(Ordering::Relaxed) > before);
        };
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut last = 0;
                while !done.load(Ordering::Relaxed) {
                    // A file is available under its name, and complete, at any time.
                    let by_name = fs::read_to_string(volume.file("a")).unwrap();
                    let generation: u32 = by_name.split(' ').next().unwrap().parse().unwrap();
                    assert!(by_name == text(generation) && generation >= last, "half, or old");
                    last = generation;
                    // Both of one generation, through one directory. The directory is removed only
                    // by the call after the next.
                    let shown = File::open(volume.file("..data")).unwrap();
                    match (read_in(&shown, "a"), read_in(&shown, "b")) {
                        (Ok(a), Ok(b)) => assert!(a == b, "a mixture"),
                        (Err(e), _) | (_, Err(e)) => assert_eq!(e.kind(), io::ErrorKind::NotFound),
                    }
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
            let publishing = catch_unwind(AssertUnwindSafe(|| (1..40).for_each(publish_and_wait)));
            done.store(true, Ordering::Relaxed);
            reader.join().unwrap();
            publishing.unwrap();
        });
        driver.unpublish(&volume.handle, &volume.target);
    });
}

fn read_in(directory: &File, name: &str) -> io::Result<String> {
    use std::io::Read;
    let flags = nix::fcntl::OFlag::O_RDONLY;
    let file = nix::fcntl::openat(directory, name, flags, nix::sys::stat::Mode::empty())?;
    let mut text = String::new();
    File::from(file).read_to_string(&mut text)?;
    Ok(text)
}

#[test]
fn content_that_does_not_fit_keeps_the_old_content() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "small");
        let old = [("token", "old"), ("other", "same")];
        driver.ok(volume.publishing_content(&[("size", "8Mi")], &old));
        // A pod with write access, from an earlier version, has filled the volume.
        let allow = || run("mount", &["-o", "remount,bind,rw", path(&volume.target)]);
        allow();
        let junk = volume.file("..data/junk");
        assert!(fs::write(&junk, vec![1; 16 << 20]).is_err());
        let large = "x".repeat(2 << 20);
        let request = volume.publishing_content(&[("size", "8Mi")], &[("token", &large)]);
        driver.refused(request.clone(), Code::ResourceExhausted, "volume_context: size");
        assert_eq!(files(&volume), expected(&old));
        allow();
        fs::remove_file(junk).unwrap();
        driver.ok(request);
        assert_eq!(files(&volume), expected(&[("token", &large)]));
        driver.unpublish(&volume.handle, &volume.target);
    });
}

#[test]
fn a_group_can_read_refreshed_content() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "group");
        for value in ["first", "second"] {
            let mut request = volume.publishing_content(&[], &[("token", value)]);
            request.volume_capability = Some(in_group("4321"));
            driver.ok(request);
            for name in ["", "..data", "token"] {
                let found = fs::metadata(volume.file(name)).unwrap();
                assert!(found.gid() == 4321 && found.mode() & 0o040 != 0, "{name:?}: {found:?}");
            }
        }
        driver.unpublish(&volume.handle, &volume.target);
    });
}

#[test]
fn a_writable_volume_is_only_initialized_with_content() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "seeded");
        let attributes = [("readOnlyContent", "false"), ("content/a", "first"), ("size", "16Mi")];
        driver.ok(volume.publishing(&attributes));
        let found = fs::symlink_metadata(volume.file("a")).unwrap();
        assert!(found.is_file() && found.mode() & 0o777 == 0o666, "{found:?}");
        fs::write(volume.file("a"), "by the pod").unwrap();
        let outside = driver.scratch().join("outside");
        std::os::unix::fs::symlink(&outside, volume.file("b")).unwrap();
        let changed = [("readOnlyContent", "false"), ("content/b", "second"), ("size", "16Mi")];
        driver.ok(volume.publishing(&changed));
        assert_eq!(fs::read_to_string(volume.file("a")).unwrap(), "by the pod");
        assert!(!outside.exists());
        driver.unpublish(&volume.handle, &volume.target);
    });
}

#[test]
fn a_memory_volume_survives_the_driver_but_not_the_pod() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "memory");
        let publishing = volume.publishing(&[("medium", "Memory"), ("size", "16Mi")]);
        driver.ok(publishing.clone());
        assert_eq!(mounts_at(&volume.target)[0].fs_type, "tmpfs");
        fs::write(volume.file("written"), "by the pod").unwrap();
        driver.kill();
        fs::write(volume.file("meanwhile"), "too").unwrap();
        driver.start_again();
        driver.ok(publishing.clone());
        assert_eq!(files(&volume), expected(&[("written", "by the pod"), ("meanwhile", "too")]));
        let answer = driver.ok(stats(&volume.handle, path(&volume.target)));
        assert_eq!(answer.usage.len(), 2);
        assert!(!answer.volume_condition.is_some_and(|condition| condition.abnormal));
        // A reboot removes the mount, and kubelet publishes again: the volume is empty again.
        run("umount", &[path(&volume.target)]);
        driver.refused(stats(&volume.handle, path(&volume.target)), Code::NotFound, "not in use");
        driver.ok(publishing);
        assert_eq!(files(&volume), expected(&[]));
        driver.unpublish(&volume.handle, &volume.target);
        assert!(!is_mounted(&volume.target) && !volume.target.exists());
    });
}

#[test]
fn a_memory_volume_limits_bytes_and_files() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "bounded");
        driver.ok(volume.publishing(&[("medium", "Memory"), ("size", "4Mi")]));
        assert!(fs::write(volume.file("large"), vec![1; 5 << 20]).is_err());
        let files = (0..4096).take_while(|n| fs::write(volume.file(&n.to_string()), "").is_ok());
        let count = files.count();
        assert!((1000..2100).contains(&count), "{count}");
        driver.unpublish(&volume.handle, &volume.target);
        // No mount option removes the limits.
        let mode = csi::volume_capability::access_mode::Mode::SingleNodeMultiWriter;
        let flagged = csi::NodePublishVolumeRequest {
            volume_capability: Some(with_flags("", mode, &["size=1g"])),
            ..volume.publishing(&[("medium", "Memory"), ("size", "4Mi")])
        };
        driver.refused(flagged, Code::InvalidArgument, "mount_flags");
        assert!(!is_mounted(&volume.target));
    });
}

#[test]
fn content_and_secrets_are_never_on_disk() {
    with_driver(|driver| {
        let attributes: [&[(&str, &str)]; 3] =
            [&[], &[("medium", "Memory")], &[("readOnlyContent", "false")]];
        for (number, attributes) in attributes.into_iter().enumerate() {
            let volume = pod_volume(driver, "uid", &format!("secret-{number}"));
            let attributes = [attributes, &[("content/config", SECRET)]].concat();
            let mut request = volume.publishing_content(&attributes, &[("token", SECRET)]);
            request.readonly = number < 2;
            driver.ok(request);
            assert_eq!(mounts_at(&volume.target)[0].fs_type, "tmpfs", "{attributes:?}");
            run("sync", &["-f", path(&driver.data_dir())]);
            let is_stored = |bytes: &[u8]| {
                files_below(&driver.data_dir()).iter().any(|file| contains(file, bytes))
            };
            assert!(is_stored(volume.handle.as_bytes()), "its row is in the catalog");
            let nowhere = |when: &str| {
                for file in files_below(&driver.data_dir()) {
                    assert!(!contains(&file, SECRET.as_bytes()), "{when}: {}", file.display());
                }
                assert!(!driver.log().contains(SECRET), "{when}: the log");
            };
            assert_eq!(fs::read_to_string(volume.file("token")).unwrap(), SECRET);
            nowhere("while it is published");
            driver.unpublish(&volume.handle, &volume.target);
            nowhere("afterwards");
        }
        // Also content of attributes; a volume without content or secret is in the pool.
        for (attributes, expected) in
            [([("content/a", "x")], "tmpfs"), ([("size", "16Mi")], "ext4")]
        {
            let volume = pod_volume(driver, "uid", "other");
            let mut request = volume.publishing(&attributes);
            request.readonly = expected == "tmpfs";
            driver.ok(request);
            assert_eq!(mounts_at(&volume.target)[0].fs_type, expected);
            driver.unpublish(&volume.handle, &volume.target);
        }
    });
}
