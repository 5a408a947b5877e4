//! Inline volumes of content (KEP-596, "Read-only volumes") and those in memory, through the driver's socket.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use support::driver::*;
use support::full::Small;
use support::inline::{PodVolume, is_mounted, pod_volume};
use support::{BLOCK, GIB, MIB, have_root, path, run};
use tonic::Code;

/// In no log, no catalog, and afterwards nowhere.
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

/// The loop device that is mounted there, and what the kernel calls its backing file.
fn device(at: &Path) -> (String, String) {
    let output = Command::new("findmnt").args(["-n", "-o", "SOURCE", path(at)]).output().unwrap();
    let device = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    let backing = backing(&device);
    (device, backing)
}

fn backing(device: &str) -> String {
    let name = device.strip_prefix("/dev/").expect(device);
    let file = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file"));
    file.unwrap_or_default().trim().to_owned()
}

/// Whether these bytes are in any block of a file, holes skipped. (Here they fill blocks, or are at the start of one.)
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

fn all_files(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => files.extend(all_files(&entry.path())),
            false => files.push(entry.path()),
        }
    }
    files
}

#[test]
fn each_key_of_the_content_and_of_the_secret_is_a_file() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "identity");
        let content = [("content/app.conf", "a=b\n"), ("content/.hidden", "")];
        let secret = [("token", SECRET), ("binary", "\u{0}\u{1f600}\r\n")];
        driver.ok(volume.publishing_content(&content, &secret));
        let all = [("app.conf", "a=b\n"), (".hidden", ""), secret[0], secret[1]];
        assert_eq!(files(&volume), expected(&all));
        // On the host it is written to; and what is in it is neither run nor opened as a device.
        let mount = mounts_at(&volume.target).remove(0);
        for option in ["rw", "nosuid", "nodev", "noexec"] {
            assert!(mount.has(option), "{option}: {mount:?}");
        }
        let usage = driver.ok(stats(&volume.handle, path(&volume.target)));
        assert!(!usage.volume_condition.is_some_and(|condition| condition.abnormal));
        // It outlives the driver, and is then refreshed as before.
        driver.kill();
        driver.start_again();
        assert_eq!(files(&volume), expected(&all));
        driver.ok(volume.publishing_content(&content[..1], &[("token", "other")]));
        assert_eq!(files(&volume), expected(&[("app.conf", "a=b\n"), ("token", "other")]));
        // Emptied, and still a volume.
        driver.ok(volume.publishing_content(&[("readOnlyContent", "true")], &[]));
        assert_eq!(files(&volume), expected(&[]));
        driver.unpublish(&volume.handle, &volume.target);
        assert!(!is_mounted(&volume.target) && !volume.target.exists());
    });
}

#[test]
fn what_cannot_be_content_is_refused_and_leaves_nothing() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "refused");
        let refused = |request: csi::NodePublishVolumeRequest, words: &str| {
            let answer = driver.call(request);
            let status = answer.expect_err(words);
            assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
            assert!(status.message().contains(words), "{status:?}");
            assert!(!status.message().contains(SECRET), "{status:?}");
            assert!(!volume.target.exists(), "{words}");
        };
        let with_secret = volume.publishing_content(&[], &[("token", SECRET)]);
        let writable = csi::NodePublishVolumeRequest { readonly: false, ..with_secret };
        refused(writable, "volumes[].csi.readOnly");
        let twice = volume.publishing_content(&[("content/token", "x")], &[("token", SECRET)]);
        refused(twice, "secrets");
        for name in ["", ".", "..data", "..", "a/b", "../a", "a\0b", "é", &"n".repeat(254)] {
            refused(volume.publishing_content(&[], &[(name, SECRET)]), "secrets");
        }
        let many: Vec<(String, &str)> = (0..1025).map(|n| (format!("key{n}"), SECRET)).collect();
        let many: Vec<(&str, &str)> = many.iter().map(|(n, value)| (n.as_str(), *value)).collect();
        refused(volume.publishing_content(&[], &many), "1024");
        let large = SECRET.repeat((3 << 20) / SECRET.len() + 1);
        refused(volume.publishing_content(&[], &[("large", &large)]), "secrets");
    });
}

#[test]
fn a_reader_sees_the_old_content_or_the_new_one_and_never_both() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "swapped");
        let text = |generation: u32| format!("{generation} ").repeat(5000);
        let publish = |generation: u32| {
            let text = text(generation);
            driver.ok(volume.publishing_content(&[], &[("a", &text), ("b", &text)]));
        };
        publish(0);
        let done = AtomicBool::new(false);
        let reads = thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let (mut reads, mut last) = (0, 0);
                while !done.load(Ordering::Relaxed) {
                    // By its name a file is there, and whole, at any time.
                    let by_name = fs::read_to_string(volume.file("a")).unwrap();
                    let generation: u32 = by_name.split(' ').next().unwrap().parse().unwrap();
                    assert!(by_name == text(generation) && generation >= last, "half, or old");
                    last = generation;
                    // Both of one generation, through one directory. It is gone only after the call after next.
                    let shown = File::open(volume.file("..data")).unwrap();
                    match (read_in(&shown, "a"), read_in(&shown, "b")) {
                        (Ok(a), Ok(b)) => assert!(a == b, "a mixture"),
                        (Err(e), _) | (_, Err(e)) => assert_eq!(e.kind(), io::ErrorKind::NotFound),
                    }
                    reads += 1;
                }
                reads
            });
            let publishing = catch_unwind(AssertUnwindSafe(|| (1..40).for_each(publish)));
            done.store(true, Ordering::Relaxed);
            let reads = reader.join().unwrap();
            publishing.unwrap();
            reads
        });
        assert!(reads > 0);
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
fn content_that_does_not_fit_leaves_the_old_whole() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "small");
        let old = [("token", "old"), ("other", "same")];
        driver.ok(volume.publishing_content(&[("size", "8Mi")], &old));
        // A pod that could write has filled the volume.
        let junk = volume.file("..data/junk");
        assert!(fs::write(&junk, vec![1; 16 << 20]).is_err());
        let large = "x".repeat(2 << 20);
        let request = volume.publishing_content(&[("size", "8Mi")], &[("token", &large)]);
        driver.refused(request.clone(), Code::ResourceExhausted, "volume_context: size");
        assert_eq!(files(&volume), expected(&old));
        fs::remove_file(junk).unwrap();
        driver.ok(request);
        assert_eq!(files(&volume), expected(&[("token", &large)]));
        driver.unpublish(&volume.handle, &volume.target);
    });
}

#[test]
fn a_group_reads_what_a_refresh_has_written() {
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
fn a_writable_volume_begins_with_the_content_and_is_the_pods_from_then_on() {
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
fn what_is_in_memory_outlives_the_driver_and_is_gone_with_the_pod() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "memory");
        let publishing = volume.publishing(&[("medium", "Memory"), ("size", "16Mi")]);
        driver.ok(publishing.clone());
        fs::write(volume.file("written"), "by the pod").unwrap();
        let (device, file) = device(&volume.target);
        // At the root of a filesystem that is mounted nowhere.
        assert!(file.starts_with("/inline-") && !Path::new(&file).exists(), "{file}");
        driver.kill();
        fs::write(volume.file("meanwhile"), "too").unwrap();
        driver.start_again();
        driver.ok(publishing);
        assert_eq!(files(&volume), expected(&[("written", "by the pod"), ("meanwhile", "too")]));
        let answer = driver.ok(stats(&volume.handle, path(&volume.target)));
        assert_eq!(answer.usage.len(), 2);
        assert!(!answer.volume_condition.is_some_and(|condition| condition.abnormal));
        assert!(!driver.log().contains("direct I/O"), "there is nothing to warn of");
        driver.unpublish(&volume.handle, &volume.target);
        wait_for("the device lets go of its memory", || backing(&device) != file);
        assert!(!is_mounted(&volume.target));
    });
}

#[test]
fn a_secret_in_memory_is_never_on_the_disk() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "memory");
        let attributes = [("medium", "Memory")];
        driver.ok(volume.publishing_content(&attributes, &[("token", SECRET)]));
        run("sync", &["-f", path(&volume.target)]);
        let nowhere = |when: &str| {
            for file in all_files(&driver.data_dir()) {
                assert!(!contains(&file, SECRET.as_bytes()), "{when}: {}", file.display());
            }
            assert!(!driver.log().contains(SECRET), "{when}: the log");
        };
        assert_eq!(fs::read_to_string(volume.file("token")).unwrap(), SECRET);
        nowhere("while it is published");
        driver.unpublish(&volume.handle, &volume.target);
        nowhere("afterwards");
    });
}

#[test]
fn after_a_pod_its_secret_is_nowhere_in_the_pool() {
    if !have_root() {
        return;
    }
    let reflink = Driver::with(PoolKind::Reflink, &["--log-level", "trace"]);
    let disk = reflink.scratch().join("xfs.img");
    check_wiped(&reflink, &disk);
    drop(reflink);
    let image = Driver::with(PoolKind::Image, &["--log-level", "trace"]);
    check_wiped(&image, &image.data_dir().join("pool.img"));
    drop(image);
    let place = tempfile::TempDir::with_prefix("csi-loopback-").unwrap();
    let small = Small::mount(place.path(), GIB);
    let flags = ["--log-level", "trace"];
    let copy = Driver::in_place(PoolKind::Copy, &place.path().join("small"), &flags);
    check_wiped(&copy, &place.path().join("small.img"));
    drop(copy);
    drop(small);
}

/// `disk`: the file that the pool's filesystem is in.
fn check_wiped(driver: &Driver, disk: &Path) {
    println!("with a pool of kind {}", driver.kind());
    let synced = |at: &Path| run("sync", &["-f", path(at)]);
    let attributes = [("size", "128Mi")];
    for (name, fs_type) in [("content", "ext4"), ("writable", "ext4"), ("btrfs", "btrfs")] {
        let volume = pod_volume(driver, "uid", name);
        // Many times, so that it is in generations that are gone too.
        for number in 0..4 {
            let secret = SECRET.repeat(300 + number);
            let mut request = volume.publishing_content(&attributes, &[("token", &secret)]);
            request.volume_capability = Some(mounted(fs_type));
            if name == "writable" {
                request.readonly = false;
                request.volume_context.insert("readOnlyContent".into(), "false".into());
            }
            driver.ok(request);
        }
        synced(&volume.target);
        synced(&driver.data_dir());
        assert!(contains(disk, SECRET.as_bytes()), "{name}: the test looks at the wrong place");
        driver.unpublish(&volume.handle, &volume.target);
        synced(&driver.data_dir());
        synced(disk);
        assert!(!contains(disk, SECRET.as_bytes()), "{name}: the secret is still there");
    }
    assert!(!driver.log().contains(SECRET), "the log");
    // Nothing else was touched on the way.
    let bytes = 16 * MIB;
    driver.volume("other", bytes, mounted("ext4"));
}

/// A device that one lets go of is the next one's, whose blocks have the numbers of the last.
#[test]
fn volumes_in_memory_that_come_and_go_side_by_side_keep_to_themselves() {
    with_driver(|driver| {
        std::thread::scope(|scope| {
            for thread in 0..6 {
                let driver = &*driver;
                scope.spawn(move || {
                    for round in 0..12 {
                        let volume = pod_volume(driver, &format!("uid-{thread}-{round}"), "memory");
                        driver.ok(volume.publishing(&[("medium", "Memory"), ("size", "4Mi")]));
                        let written = format!("{thread} {round}");
                        fs::write(volume.file("file"), &written).unwrap();
                        assert_eq!(fs::read_to_string(volume.file("file")).unwrap(), written);
                        driver.unpublish(&volume.handle, &volume.target);
                    }
                });
            }
        });
    });
}
